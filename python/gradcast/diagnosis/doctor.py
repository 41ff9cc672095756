"""One diagnosis inside a running training: observe ordinary steps, probe once, and let the training go on.

All ranks do the same. At the end of the last observed ``optimizer.step()``, every rank takes a snapshot, runs the
probes, tries gradcast, checks the network, and restores the snapshot. The loop notices nothing but the time it took.
"""

import functools
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.analyze import result
from gradcast.diagnosis.analyze.measurements import RankMeasurements, TrainingSetup, aligned_traces
from gradcast.diagnosis.analyze.step_breakdown import RankSteps
from gradcast.diagnosis.network import check as network_check
from gradcast.diagnosis.network import hosts as network_hosts
from gradcast.diagnosis.network.pairs import Progress
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.observe.loader import LoaderTimer
from gradcast.diagnosis.observe.observer import RECORDED_STEPS_MAX, Observer
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.probe import clock_sync, launch_overhead, layer_times, prober, trial
from gradcast.diagnosis.probe.prober import Prober
from gradcast.diagnosis.probe.snapshot import Snapshot
from gradcast.diagnosis.trace.merged import Clock, merge
from gradcast.errors import Error
from gradcast.host_traffic import Hosts
from gradcast.training.ranks.group import Group, backend_of, nccl_settings
from gradcast.training.ranks.group_pool import lasting_group
from gradcast.training.ranks.hosts import own_host

# In the first steps memory is allocated, DDP lays out its buckets, and loaders fill their queues.
WARMUP_STEPS = 5
_LAYER_STEPS = 3
_TIMEOUT = timedelta(minutes=5)


class Doctor:
    """Runs one diagnosis and hands it to ``outcome``. If the diagnosis fails, the training still goes on.

    ``steps`` is the number of ordinary steps that count. The probes take about ``seconds``: 1 to 4 rounds of each kind
    of step, or more rounds until as many steps are probed as were observed. ``network`` and ``trial``: whether the
    network is checked and gradcast is tried.
    """

    def __init__(self, outcome: Outcome, *, steps: int, seconds: float, network: bool, trial: bool) -> None:
        self._steps, self._seconds, self._network, self._trial = steps, seconds, network, trial
        self._outcome = outcome
        self._loader = LoaderTimer()
        self.observer: Observer | None = None  # set when a module is observed
        self.needed_steps = WARMUP_STEPS + steps
        self.done = False

    def watch(self, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        """Begins to observe. REQUIRES: ``preconditions.obstacle`` finds none."""
        self._ddp, self._optimizers = ddp, list(optimizers)
        keep_from = self.needed_steps - RECORDED_STEPS_MAX
        self.observer = Observer(ddp, optimizers, self._loader, self._on_step_end, keep_from=keep_from)

    def close(self) -> None:
        """Removes everything from the training. Idempotent."""
        self._loader.close()
        if self.observer is not None:
            self.observer.close()

    def _on_step_end(self) -> None:
        made = len(self.observer.steps)
        if made == WARMUP_STEPS:
            self._loader_before = self._loader.totals_ms()
        if made < self.needed_steps or self.done:
            return
        self.done = True
        try:
            # The user's step() may be called in any of these modes.
            kind = self._ddp.device.type
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
                why_nothing = self._diagnose()
        except Exception as error:  # a failed diagnosis must not end the training
            why_nothing = _describe(error)
        finally:
            self.close()
        if why_nothing is not None:
            self._outcome.fail(why_nothing)
        elif self._outcome.ends:
            raise SystemExit(0)

    def _diagnose(self) -> str | None:
        """Returns None, or why rank 0 could not analyze the measurements. The return value is the same on all ranks."""
        rank, ranks = dist.get_rank(self._ddp.process_group), self._ranks()
        everybody = lasting_group(ranks, _TIMEOUT, "gloo", "doctor")
        group = Group(rank, len(ranks), self._ddp.process_group, everybody, _TIMEOUT.total_seconds())
        progress: Progress = _print_progress if rank == 0 else lambda _: None
        progress(f"observed {self._steps} ordinary steps; now probing with the same batches")
        searches = self._ddp.find_unused_parameters or self._ddp.static_graph
        if searches and not all(group.gather(self.observer.all_used)):
            raise Error(
                "some parameters have no gradient in some steps. DDP searches for them (find_unused_parameters or "
                "static_graph), and would mistake the doctor's steps for the training's"
            )
        snapshot = Snapshot(self._ddp.module, self._optimizers)
        try:
            measurements = self._measure(group, progress)
        finally:
            snapshot.restore()
        progress("restored parameters, optimizer state and random generators; the training goes on")
        all_ranks = group.gather(measurements)
        return group.from_first(self._analyze(all_ranks) if rank == 0 else None)

    def _analyze(self, ranks: Sequence[RankMeasurements]) -> str | None:
        """Saves the result, or returns why that failed."""
        try:
            traces = aligned_traces(ranks)
            self._outcome.save(result.build(ranks, self._setup()), merge(traces) if traces else None)
        except Exception as error:
            return _describe(error)
        return None

    def _measure(self, group: Group, progress: Progress) -> RankMeasurements:
        hosts = network_hosts.names(group.computed_by_each(own_host, "reading the host's name"))
        nodes = Hosts.of(hosts).ranks
        ordinary = self.observer.steps[WARMUP_STEPS:]
        probes = Prober(self._ddp, self._optimizers, list(self.observer.recorded_steps), group.own)
        # In the same order on all ranks, because making a wrapper is collective.
        kinds = prober.kinds(nodes)
        own_node = next(ranks for ranks in nodes if group.rank in ranks)
        members = {"alone": [group.rank], "node": own_node, "cluster": range(group.world_size)}
        groups = {name: self._group_of(members[name]) for name in members if name in kinds.values()}
        makers = {name: functools.partial(probes.wrapper, of_kind) for name, of_kind in groups.items()}
        options = _costly_options(self._ddp)
        makers |= {name: functools.partial(probes.wrapper, groups["cluster"], **{name: False}) for name in options}
        processes = group.computed_by_each(environment.own_process, "reading the process's limits")
        process = processes[group.rank]
        threads = own_fitting_threads(hosts, group.rank, processes)
        if threads is not None:
            options.append("threads")
            makers["threads"] = makers["cluster"]
        rounds = self._rounds(group, ordinary, len(makers))
        wrappers, found = probes.run(makers, rounds, progress, threads)
        usual_ms = {stage: statistics.median_high(samples) for stage, samples in found["alone"].items()}
        computing: Any = launch_overhead.computing_ms(probes, wrappers["alone"], self._ddp.device, usual_ms)
        launch_unknown = next((each for each in group.gather(computing) if isinstance(each, str)), None)
        layers = layer_times.layers_ms(probes, wrappers["alone"], self._ddp.module, _LAYER_STEPS)
        pause_ms = statistics.median_high([each["loader"] + each["loop"] for each in ordinary])
        tried, clocks = self._try_gradcast(group, probes, [self._ddp, *wrappers.values()], pause_ms, progress)
        network = None
        if self._network:
            progress("measuring the network between the hosts")
            network = network_check.check(group, progress, device_type=self._ddp.device.type)
        return RankMeasurements(
            RankSteps(
                rank=group.rank,
                host=hosts[group.rank],
                normal={name: [each[name] for each in ordinary] for name in ordinary[0]},
                probes={kind: found[stand_in] for kind, stand_in in kinds.items()},
                computing=found["alone"] if launch_unknown else computing,
                loader_workers=self._loader.workers,
                batch_ms=self._batch_ms(),
                layers_ms=layers,
            ),
            options={name: found[name]["step"] for name in options},
            trial=tried,
            clocks=clocks,
            network=network,
            launch_unknown=launch_unknown,
            probe_steps=prober.step_count(len(makers), rounds),
            process=process,
        )

    def _try_gradcast(
        self,
        group: Group,
        probes: Prober,
        wrappers: Sequence[DistributedDataParallel],
        pause_ms: float,
        progress: Progress,
    ) -> tuple[trial.Trial | None, list[Clock]]:
        """Returns this rank's trial, and on rank 0 the clocks of all ranks during it."""
        if not self._trial:
            return None, []
        progress("trying gradcast for a few steps")
        before = clock_sync.offsets(group)
        tried = trial.try_overlap(probes, wrappers, self._optimizers, pause_ms)
        refused = next((each for each in group.gather(tried.error) if each is not None), None)
        if refused is not None:  # possibly by one rank only
            tried = trial.Trial(error=refused)
        return tried, [clock_sync.clock_between(*each) for each in zip(before, clock_sync.offsets(group), strict=True)]

    def _batch_ms(self) -> tuple[float, float] | None:
        """Returns the ms that reading and preparing one batch took, or None if no loader worker was seen."""
        now = self._loader.totals_ms()
        reading, preparing, batches = (after - before for after, before in zip(now, self._loader_before, strict=True))
        return (reading / batches, preparing / batches) if batches else None

    def _rounds(self, group: Group, ordinary: Sequence[dict[str, float]], kind_count: int) -> int:
        """Returns the number of rounds, the same on every rank."""
        step_s = max(group.gather(statistics.median_high([each["step"] for each in ordinary]))) / 1e3
        return prober.round_count(kind_count, self._steps, self._seconds / step_s)

    def _group_of(self, members: Sequence[int]) -> Any:
        everyone = self._ranks()
        shared = self._ddp.process_group
        settings = nccl_settings(shared, next(self._ddp.parameters()).device)
        ranks = [everyone[member] for member in members]
        return lasting_group(ranks, _TIMEOUT, dist.get_backend(shared), "doctor", settings)

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._ddp.process_group)

    def _setup(self) -> TrainingSetup:
        ddp = self._ddp
        return TrainingSetup(
            backend=backend_of(ddp.process_group, ddp.device.type),
            device=ddp.device.type,
            torch=torch.__version__,
            model=type(ddp.module).__name__,
            parameter_bytes={name: p.numel() * p.element_size() for name, p in ddp.module.named_parameters()},
            caps_bytes=_caps_bytes(ddp),
            is_fp32=any(p.dtype == torch.float32 for p in ddp.module.parameters()),
            compiled=ddp.module._compiled_call_impl is not None or hasattr(ddp.module, "_orig_mod"),
            find_unused_parameters=ddp.find_unused_parameters,
            rebuilt=ddp.static_graph or not ddp.find_unused_parameters,
            broadcast_buffers=ddp.broadcast_buffers,
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in ddp.module.buffers()),
            warmup_steps=WARMUP_STEPS,
            gradients_used=self.observer.gradients_used,
            early_uses=self._early_uses(),
        )

    def _early_uses(self) -> list[dict[str, Any]]:
        names = [name for name, each in self._ddp.module.named_parameters() if each.requires_grad]
        return [
            each | {"parameters": [names[index] for index in each["parameters"]]}
            for each in self.observer.early_uses.described()
        ]


def _print_progress(text: str) -> None:
    print(f"gradcast doctor: {text}", file=sys.stderr, flush=True)


def _describe(error: Exception) -> str:
    if os.environ.get("GRADCAST_DEBUG"):
        raise error
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _costly_options(ddp: DistributedDataParallel) -> list[str]:
    """Lists options that are on, cost time in each step, and can be measured by a run without them."""
    options = []
    if ddp.find_unused_parameters:  # every parameter is used, or _diagnose would have raised
        options.append("find_unused_parameters")
    if ddp.broadcast_buffers and len(ddp.modules_buffers) > 0:
        options.append("broadcast_buffers")
    return options


def own_fitting_threads(hosts: Sequence[str], rank: int, processes: Sequence[environment.Process]) -> int | None:
    """Returns this rank's number of threads that fits its host, or None on all ranks if it fits everywhere."""
    found = {host.name: host for host in environment.hosts(hosts, processes)}
    if all(host.fitting_threads is None for host in found.values()):
        return None
    return found[hosts[rank]].fitting_threads or processes[rank].threads


def _caps_bytes(ddp: DistributedDataParallel) -> tuple[int, int]:
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return first, ddp.bucket_bytes_cap
