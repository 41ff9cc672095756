"""One diagnosis inside a running training: ordinary steps are watched, then probed, then the training goes on.

On all ranks alike: after so many ordinary steps, at the end of ``optimizer.step()``, every rank takes a snapshot, runs
the probes, tries gradcast, checks the network, and restores the snapshot. The loop has seen nothing of it, but time.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.analyze import findings
from gradcast.diagnosis.analyze.step_breakdown import RankSteps
from gradcast.diagnosis.network import hosts as network_hosts
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.observe.loader import LoaderWatch
from gradcast.diagnosis.observe.observer import TAPES, Observer
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.probe import clock_sync, launch_overhead, probes, trial
from gradcast.diagnosis.probe.probes import Nodes, Prober
from gradcast.diagnosis.probe.snapshot import Snapshot
from gradcast.diagnosis.trace.merged import clock_between, merge
from gradcast.errors import Error
from gradcast.training.ranks.group import Group, backend_of, lasting_group

# In these memory is allocated, DDP lays out its buckets, and loaders fill their queues.
LEFT_OUT_STEPS = 5
_LAYER_STEPS = 3
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Settings:
    """``steps``: ordinary ones that count. ``seconds``: about so long may the probes take, within 1 to 4 rounds of each
    kind, more where that is fewer than the ordinary steps. ``network``, ``trial``: whether these parts are wanted."""

    steps: int = 20
    seconds: float = 60.0
    network: bool = True
    trial: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 5:
            raise Error(f"steps is {self.steps!r}; a whole number of at least 5 is expected", "invalid_option")
        if not self.seconds > 0:
            raise Error(f"seconds is {self.seconds!r}; a number above 0 is expected", "invalid_option")


class Doctor:
    """Tells the outcome what was found, or why nothing was: then the training goes on as well."""

    def __init__(self, settings: Settings, outcome: Outcome) -> None:
        self._settings, self._outcome = settings, outcome
        self._loader = LoaderWatch()
        self._observer: Observer | None = None
        self.done = False

    @property
    def steps(self) -> int:
        """Ordinary ones that were seen."""
        return 0 if self._observer is None else len(self._observer.steps)

    @property
    def watches(self) -> bool:
        """Whether a module was found."""
        return self._observer is not None

    @property
    def optimizer_steps(self) -> int:
        """Also those in which the module had no part that could be seen."""
        return 0 if self._observer is None else self._observer.optimizer_steps

    @property
    def needed_steps(self) -> int:
        return LEFT_OUT_STEPS + self._settings.steps

    def begin(self, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        """REQUIRES: ``obstacle`` knows none."""
        self._ddp, self._optimizers = ddp, list(optimizers)
        keep_from = self.needed_steps - TAPES
        self._observer = Observer(ddp, optimizers, self._loader, self._step_ended, keep_from=keep_from)

    def close(self) -> None:
        """Nothing of the diagnosis is left in the training. Idempotent."""
        self._loader.close()
        if self._observer is not None:
            self._observer.close()

    def _step_ended(self) -> None:
        if self.steps == LEFT_OUT_STEPS:
            self._loader_before = self._loader.totals_ms()
        if self.steps < self.needed_steps or self.done:
            return
        self.done = True
        try:
            # Whatever the user's step() is called in.
            kind = self._ddp.device.type
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
                why_nothing = self._diagnose()
        except Exception as error:  # a diagnosis that fails must not end a training
            why_nothing = _sentence(error)
        finally:
            self.close()
        if why_nothing is None:
            self._outcome.over()
        else:
            self._outcome.nothing(why_nothing)

    def _diagnose(self) -> str | None:
        """Why rank 0 could not tell what was found; the same on all ranks, which all go on, or all end."""
        everybody = lasting_group(self._ranks(), _TIMEOUT, "gloo", "doctor")
        rank = dist.get_rank(self._ddp.process_group)
        group = Group(rank, len(self._ranks()), self._ddp.process_group, everybody, _TIMEOUT.total_seconds())
        tell = _Teller(rank)
        tell(f"{self._settings.steps} ordinary steps were watched; now steps with less in them, on the same batches")
        looks = self._ddp.find_unused_parameters or self._ddp.static_graph
        all_used = all(group.gather(self._observer.all_used)) if looks else True
        if not all_used:
            raise Error(
                "parameters stay without a gradient in some steps, and DDP, which looks for them, would take the "
                "doctor's steps for the training's"
            )
        snapshot = Snapshot(self._ddp.module, self._optimizers)
        try:
            measured = self._measure(group, tell)
        finally:
            snapshot.restore()
        tell("parameters, optimizer and random generators are what they were; the training goes on")
        everything = group.gather(measured)
        return group.from_first(self._told(everything) if rank == 0 else None)

    def _told(self, everything: "Sequence[findings.Measured]") -> str | None:
        try:
            traces = findings.aligned(everything)
            self._outcome.arrived(findings.result(everything, self._facts()), merge(traces) if traces else None)
        except Exception as error:
            return _sentence(error)
        return None

    def _measure(self, group: Group, tell: "_Teller") -> "findings.Measured":
        nodes = Nodes(tuple(network_hosts.names(group.gather(network_hosts.own_host()))))
        ordinary = self._observer.steps[LEFT_OUT_STEPS:]
        prober = Prober(self._ddp, self._optimizers, list(self._observer.tapes), group.own)
        # In one order on all ranks: making a wrapper is collective.
        run = [name for name in ("alone", "node", "cluster") if name in probes.kinds(nodes).values()]
        groups = {name: self._group_of(name, nodes, group) for name in run}
        makers = {name: functools.partial(prober.wrapper, groups[name]) for name in run}
        options = _without_mistakes(self._ddp)
        makers |= {name: functools.partial(prober.wrapper, groups["cluster"], **{name: False}) for name in options}
        process = environment.own_process()
        threads = _fitting_threads(nodes, group.rank, group.gather(process))
        if threads is not None:
            options.append("threads")
            makers["threads"] = makers["cluster"]
        rounds = self._rounds(group, ordinary, len(makers))
        wrappers, found = prober.run(makers, rounds, tell, {} if threads is None else {"threads": threads})
        usual_ms = {stage: _median(samples) for stage, samples in found["alone"].items()}
        computing = launch_overhead.computing_ms(prober, wrappers["alone"], self._ddp.device, usual_ms)
        untold = next((each for each in group.gather(computing) if isinstance(each, str)), None)
        layers = probes.layers_ms(prober, wrappers["alone"], self._ddp.module, _LAYER_STEPS)
        pause_ms = _median([each["loader"] + each["loop"] for each in ordinary])
        tried, clocks = None, []
        if self._settings.trial:
            tell("gradcast for a few steps")
            before = clock_sync.offsets(group)
            tried = trial.try_overlap(prober, [self._ddp, *wrappers.values()], self._optimizers, pause_ms)
            refused = next((each for each in group.gather(tried.error) if each is not None), None)
            if refused is not None:  # maybe by one rank alone
                tried = trial.Trial(error=refused)
            clocks = [clock_between(*each) for each in zip(before, clock_sync.offsets(group), strict=True)]
        network = self._network(group, tell)
        reading = self._reading()
        return findings.Measured(
            RankSteps(
                rank=group.rank,
                node=nodes.of_rank[group.rank],
                host=nodes.hosts[group.rank],
                normal={name: [each[name] for each in ordinary] for name in ordinary[0]},
                probes={kind: found[run] for kind, run in probes.kinds(nodes).items()},
                computing=found["alone"] if untold else computing,
                loader_workers=self._loader.workers,
                read_ms=reading and reading[0],
                prepare_ms=reading and reading[1],
                layers_ms=layers,
            ),
            options={name: found[name]["step"] for name in options},
            trial=tried,
            clocks=clocks,
            network=network,
            launching_untold=untold,
            probe_steps=probes.step_count(len(makers), rounds),
            process=process,
        )

    def _network(self, group: Group, tell: "_Teller") -> dict[str, Any] | None:
        if not self._settings.network:
            return None
        from gradcast.diagnosis.network import check as network_check

        tell("the network between the hosts")
        return network_check.check(group, tell, device_type=self._ddp.device.type)

    def _reading(self) -> tuple[float, float] | None:
        """Of one batch: ms of reading and of preparing it. None where no worker could be seen."""
        now = self._loader.totals_ms()
        reading, preparing, batches = (after - before for after, before in zip(now, self._loader_before, strict=True))
        return (reading / batches, preparing / batches) if batches else None

    def _rounds(self, group: Group, ordinary: Sequence[dict[str, float]], kind_count: int) -> int:
        """The same on every rank."""
        step_s = max(group.gather(_median([each["step"] for each in ordinary]))) / 1e3
        return probes.round_count(kind_count, self._settings.steps, self._settings.seconds / step_s)

    def _group_of(self, kind: str, nodes: Nodes, group: Group) -> Any:
        own = group.rank
        members = {"alone": [own], "node": nodes.ranks[nodes.of_rank[own]], "cluster": range(group.world_size)}[kind]
        everyone = self._ranks()
        backend = dist.get_backend(self._ddp.process_group)
        return lasting_group([everyone[member] for member in members], _TIMEOUT, backend, "doctor")

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._ddp.process_group)

    def _facts(self) -> "findings.Facts":
        ddp = self._ddp
        return findings.Facts(
            backend=backend_of(ddp.process_group, ddp.device.type),
            device=ddp.device.type,
            torch=torch.__version__,
            model=type(ddp.module).__name__,
            parameter_bytes={name: p.numel() * p.element_size() for name, p in ddp.module.named_parameters()},
            caps_bytes=_caps_bytes(ddp),
            is_fp32=any(p.dtype == torch.float32 for p in ddp.module.parameters()),
            compiled=ddp.module._compiled_call_impl is not None or hasattr(ddp.module, "_orig_mod"),
            find_unused_parameters=ddp.find_unused_parameters,
            rebuilt=_rebuilds(ddp),
            broadcast_buffers=ddp.broadcast_buffers,
            buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in ddp.module.buffers()),
            left_out_steps=LEFT_OUT_STEPS,
            gradients_used=self._observer.gradients_used,
        )


class _Teller:
    """Progress, of rank 0, on standard error."""

    def __init__(self, rank: int) -> None:
        self._tells = rank == 0

    def __call__(self, text: str) -> None:
        if self._tells:
            print(f"gradcast doctor: {text}", file=sys.stderr, flush=True)


def obstacle(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> str | None:
    """Why this training cannot be diagnosed, as a sentence; the same on all ranks."""
    members, everybody = dist.get_world_size(ddp.process_group), dist.get_world_size()
    if members == 1:
        return "there is one worker, so nothing travels and nobody waits; start two or more with torchrun"
    if members < everybody:
        return (
            f"the module's gradients are averaged over {members} of {everybody} ranks, and the others would not know "
            "of the doctor's own steps; diagnose it in a group of all"
        )
    for name in ("mixed_precision", "_delay_all_reduce_params"):
        if getattr(ddp, name, None):
            return f"DDP's {name.strip('_')} is not supported by the doctor's own steps; leave it out for the diagnosis"
    for each in optimizers:
        name = type(each).__name__
        if _needs_arguments(type(each).step):
            return f"{name}.step() needs a closure, which the doctor's own steps do not have"
        if any(isinstance(value, Optimizer) for value in vars(each).values()):
            return f"{name} holds another optimizer, whose state would not be kept; diagnose it with that one alone"
    return _hook_obstacle(ddp)


def holds_any_of(optimizer: Optimizer, module: nn.Module) -> bool:
    """Whether it updates a parameter of the module."""
    owned = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in owned for group in optimizer.param_groups for parameter in group["params"])


def _needs_arguments(step: Callable[..., Any]) -> bool:
    """Besides the optimizer itself."""
    given = list(inspect.signature(step).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)
    return any(each.kind in named and each.default is inspect.Parameter.empty for each in given)


def _hook_obstacle(ddp: DistributedDataParallel) -> str | None:
    hooks = probes.hooks_of(ddp)
    for function, state in hooks:
        stateless = state is None or isinstance(state, dist.ProcessGroup)
        if getattr(function, "__module__", None) != default_hooks.__name__ or not stateless:
            return (
                f"the communication hook {getattr(function, '__name__', function)} is not one of torch's simple ones; "
                "leave it out for the diagnosis"
            )
    if not hooks and ddp._get_ddp_logging_data().get("comm_hook"):
        return "a communication hook of C++ is registered; leave it out for the diagnosis"
    return None


def _sentence(error: Exception) -> str:
    if os.environ.get("GRADCAST_DEBUG"):
        raise error
    return str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"


def _without_mistakes(ddp: DistributedDataParallel) -> list[str]:
    """Options that cost time each step and can be measured by leaving them out."""
    options = []
    if ddp.find_unused_parameters:  # all are used, or there would be no diagnosis
        options.append("find_unused_parameters")
    if ddp.broadcast_buffers and len(ddp.modules_buffers) > 0:
        options.append("broadcast_buffers")
    return options


def _fitting_threads(nodes: Nodes, rank: int, processes: Sequence[environment.Process]) -> int | None:
    """For this rank, where on some host more threads compute than there are cores; None on all ranks alike."""
    hosts = {host.name: host for host in environment.hosts(nodes.hosts, processes)}
    if all(host.fitting_threads is None for host in hosts.values()):
        return None
    return hosts[nodes.hosts[rank]].fitting_threads or processes[rank].threads


def _rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether it lays its buckets out anew, after the first step, by when gradients come."""
    return ddp.static_graph or not ddp.find_unused_parameters


def _caps_bytes(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Of the first bucket and of the others."""
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return first, ddp.bucket_bytes_cap


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
