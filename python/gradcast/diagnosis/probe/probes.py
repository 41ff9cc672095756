"""Steps that are not the user's: the same passes again, with less of what an ordinary step does.

They run between two ordinary steps, on the tapes of the last ones, while a snapshot holds the training's state. Who
sends gradients are further DistributedDataParallel wrappers around the same module, with the user's options and other
groups of ranks: all of them ("cluster"), those of this node ("node"), this rank by itself ("alone"), for which DDP does
everything but send. The user's own wrapper takes no part: it reduces only after a forward pass of its own. (With
find_unused_parameters it does note which gradients have come, so all have to come in every step.)
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import record_function

from gradcast.diagnosis.observe import recorded_step
from gradcast.diagnosis.observe.recorded_step import Tape

# Before the names of stages, where torch's profiler records steps.
STAGE_MARK = "gradcast: "
_MIB = 1 << 20
# Of a kind, before any counts: DDP lays out its buckets anew after the first; and of each turn, in which caches and
# TCP's windows are those that another kind has left: on a slow link the first step took 6 % less than later ones, the
# second 3 %.
_SETTLING_STEPS = 2
LEFT_OUT_PER_TURN = 2
STEPS_PER_TURN = 6
_USUAL_ROUNDS = 4


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Which rank is on which node, by hosts' names."""

    hosts: tuple[str, ...]  # by rank

    @property
    def of_rank(self) -> list[int]:
        names = list(dict.fromkeys(self.hosts))
        return [names.index(host) for host in self.hosts]

    @property
    def ranks(self) -> list[list[int]]:
        """By node."""
        places = self.of_rank
        return [[rank for rank, node in enumerate(places) if node == each] for each in sorted(set(places))]


def kinds(nodes: Nodes) -> dict[str, str]:
    """Which steps are run for each kind: where one node holds a single rank, or all of them, two kinds are the same."""
    run = {"alone": "alone", "node": "node", "cluster": "cluster"}
    if len(nodes.ranks) == 1:
        run["node"] = "cluster"
    elif len(nodes.ranks) == len(nodes.hosts):
        run["node"] = "alone"
    return run


class Prober:
    """Runs tapes through wrappers of one module. All methods are collective over ``everybody``, a group of all ranks
    that is used for nothing else."""

    def __init__(
        self, ddp: DistributedDataParallel, optimizers: Sequence[Optimizer], tapes: Sequence[Tape], everybody: Any
    ) -> None:
        self._ddp, self._optimizers, self._everybody = ddp, list(optimizers), everybody
        self._tapes = itertools.cycle(tapes)

    def wrapper(self, group: Any, **changes: Any) -> DistributedDataParallel:
        """``changes``: of the user's options, for DDP's constructor."""
        wrapper = DistributedDataParallel(
            self._ddp.module, **(_options(self._ddp) | {"process_group": group} | changes)
        )
        for function, _ in hooks_of(self._ddp):
            wrapper.register_comm_hook(group, function)  # torch's own, whose state is the group
        return wrapper

    def run(
        self,
        makers: dict[str, Callable[[], Any]],
        rounds: int,
        told: Callable[[str], None],
        threads: Mapping[str, int] | None = None,
    ) -> tuple[dict[str, Any], dict[str, dict[str, list]]]:
        """The wrappers that ``makers`` make, by name, and ms by name and stage. They take turns, so that whatever else
        the machine does falls on all of them. ``threads``: with how many this rank computes under a name, if that is
        another number than usual."""
        threads = threads or {}
        wrappers = {}
        for name, make in makers.items():
            told(f"steps {name}")
            # With a static graph DDP counts in its first steps every gradient that comes, also of others' steps: so
            # one wrapper has made its first before the next one exists.
            wrappers[name] = make()
            with _computing_with(threads.get(name)):
                self.steps(wrappers[name], _SETTLING_STEPS)
        found: dict[str, dict[str, list]] = {name: {} for name in wrappers}
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            for name, wrapper in wrappers.items():
                with _computing_with(threads.get(name)):
                    made = self.turn(wrapper)
                for times in made[LEFT_OUT_PER_TURN:]:
                    for stage, ms in times.items():
                        found[name].setdefault(stage, []).append(ms)
        return wrappers, found

    def turn(self, model: Any) -> list[dict[str, float]]:
        """Steps of which some are left out. Turns are alike: each begins with the same batch."""
        return self.steps(model, LEFT_OUT_PER_TURN + STEPS_PER_TURN)

    def steps(self, model: Any, count: int, *, pause_ms: float = 0.0) -> list[dict[str, float]]:
        """ms by stage. The ranks begin together. ``pause_ms``: before each step, and part of it."""
        dist.barrier(group=self._everybody)
        return [self.step(model, pause_ms) for _ in range(count)]

    def step(self, model: Any, pause_ms: float = 0.0) -> dict[str, float]:
        began = self.now_ns()
        time.sleep(max(0.0, pause_ms) / 1e3)
        times = {"forward": 0.0, "backward": 0.0, "update": 0.0}
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for passes in next(self._tapes).by_backward:
            again = recorded_step.run_again(model, passes)
            with self._stage("forward", times):
                next(again)
            with self._stage("backward", times):
                next(again, None)
        with self._stage("update", times):
            for optimizer in self._optimizers:
                optimizer.step()
        return times | {"step": (self.now_ns() - began) / 1e6}

    @contextlib.contextmanager
    def _stage(self, name: str, times: dict[str, float]) -> Iterator[None]:
        """Adds to ``times``, and is seen by torch's profiler."""
        start = self.now_ns()
        with record_function(STAGE_MARK + name):
            yield
            end = self.now_ns()
        times[name] += (end - start) / 1e6

    def now_ns(self) -> int:
        """When the device has done what it was given."""
        if self._ddp.device.type == "cuda":
            torch.cuda.synchronize(self._ddp.device)
        return time.perf_counter_ns()


@contextlib.contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    usual = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(usual)


def step_count(kind_count: int, rounds: int) -> int:
    """How many steps ``run`` takes."""
    return kind_count * (_SETTLING_STEPS + rounds * (LEFT_OUT_PER_TURN + STEPS_PER_TURN))


def round_count(kind_count: int, watched_steps: int, affordable_steps: float) -> int:
    """How many rounds to run in the time of ``affordable_steps``: with as many steps of each kind as ordinary ones were
    watched, since more would tell little, but four where those were few; one at least."""
    per_round = step_count(kind_count, 1) - step_count(kind_count, 0)
    wanted = max(_USUAL_ROUNDS, watched_steps // STEPS_PER_TURN)
    return max(1, min(wanted, int(affordable_steps / per_round)))


def layers_ms(prober: Prober, model: Any, module: torch.nn.Module, steps: int) -> dict[str, float]:
    """What each module with parameters of its own computes, forward and backward, ms per step, by its name.

    Forward is from its call to its return. Backward is from the gradient before it, of the module behind, to the last
    of its own.
    """
    owners = {
        f"{name}.{parameter}" if name else parameter: name or type(module).__name__
        for name, each in module.named_modules()
        for parameter, _ in each.named_parameters(recurse=False)
    }
    found = dict.fromkeys(owners.values(), 0.0)
    with _Stamps(module, owners, found, prober.now_ns):
        prober.steps(model, steps)
    return {name: ms / steps for name, ms in found.items()}


class _Stamps:
    """Hooks on modules and parameters that add up times."""

    def __init__(
        self, module: torch.nn.Module, owners: dict[str, str], found: dict[str, float], now_ns: Callable[[], int]
    ) -> None:
        self._found, self._now_ns = found, now_ns
        self._last_ns = 0
        self._handles: list[Any] = []
        names = set(owners.values())
        for name, each in module.named_modules():
            if (name or type(module).__name__) in names and not any(True for _ in each.children()):
                self._watch_forward(name or type(module).__name__, each)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook = self._ready_hook(owners[name])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch_forward(self, name: str, module: torch.nn.Module) -> None:
        started: list[int] = []

        def begin(*_: Any) -> None:
            started.append(self._now_ns())

        def end(*_: Any) -> None:
            self._last_ns = self._now_ns()
            if started:  # not where the begin was in a pass that failed
                self._found[name] += (self._last_ns - started.pop()) / 1e6

        self._handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _ready_hook(self, name: str) -> Callable[[Any], None]:
        def ready(_: Any) -> None:
            now_ns = self._now_ns()
            self._found[name] += (now_ns - self._last_ns) / 1e6
            self._last_ns = now_ns

        return ready


def _options(ddp: DistributedDataParallel) -> dict[str, Any]:
    """For a constructor: what the user's wrapper was made with."""
    options: dict[str, Any] = {
        "device_ids": ddp.device_ids,
        "output_device": ddp.output_device,
        "dim": ddp.dim,
        "broadcast_buffers": ddp.broadcast_buffers,
        "init_sync": False,
        "find_unused_parameters": ddp.find_unused_parameters,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "static_graph": ddp.static_graph,
        "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
    }
    caps = getattr(ddp, "bucket_bytes_cap_list", [])
    if caps:
        options["bucket_cap_mb_list"] = [cap / _MIB for cap in caps]
    elif not ddp.bucket_bytes_cap_default:
        options["bucket_cap_mb"] = ddp.bucket_bytes_cap / _MIB
    return options


def hooks_of(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The communication hooks that the user has registered: (function, state)."""
    return list(getattr(ddp, "_comm_hooks", []))
