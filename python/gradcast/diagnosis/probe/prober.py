"""Runs extra steps that omit part of an ordinary step, to measure the cost of that part.

The steps replay recorded ones between two ordinary steps, while a snapshot holds the training's state. Gradients are
sent by further DistributedDataParallel wrappers around the same module, with the user's options and other groups of
ranks: all of them ("cluster"), those of this node ("node"), or this rank alone ("alone"), for which DDP does everything
but send. The user's own wrapper is idle: it reduces only after a forward pass of its own. (With find_unused_parameters
it does record which gradients have arrived. Therefore every step has to produce all of them.)
"""

import collections
import contextlib
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
from gradcast.diagnosis.observe.recorded_step import RecordedStep

# Prefix of the stages' names in torch's profiler.
STAGE_MARK = "gradcast: "
_MIB = 1 << 20
# Uncounted steps. After a wrapper's first step DDP rebuilds its buckets. And at the beginning of each turn, caches and
# TCP windows are still those of another kind of step: on a slow link the first step took 6 % less than later ones, the
# second 3 %.
_WARMUP_STEPS = 2
WARMUP_STEPS_PER_TURN = 2
STEPS_PER_TURN = 6
_ROUNDS_WANTED_MIN = 4


def kinds(nodes: Sequence[Sequence[int]]) -> dict[str, str]:
    """Returns the kind of step that is run for each: two coincide if a node holds a single rank, or all of them."""
    run = {name: name for name in ("alone", "node", "cluster")}
    if len(nodes) == 1:
        run["node"] = "cluster"
    elif all(len(ranks) == 1 for ranks in nodes):
        run["node"] = "alone"
    return run


class Prober:
    """Replays recorded steps through wrappers of one module.

    All methods are collective over ``everybody``, a group of all ranks that is used for nothing else.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        recorded_steps: Sequence[RecordedStep],
        everybody: Any,
    ) -> None:
        self._ddp, self._optimizers, self._everybody = ddp, list(optimizers), everybody
        self._recorded_steps = itertools.cycle(recorded_steps)

    def wrapper(self, group: Any, **changes: Any) -> DistributedDataParallel:
        """Makes a DDP wrapper with the user's options and ``changes`` to these arguments of DDP. Collective."""
        wrapper = DistributedDataParallel(
            self._ddp.module, **(_options(self._ddp) | {"process_group": group} | changes)
        )
        for function, _ in comm_hooks(self._ddp):
            wrapper.register_comm_hook(group, function)  # torch's stateless hooks, whose state is the group
        return wrapper

    def run(
        self,
        makers: Mapping[str, Callable[[], Any]],
        rounds: int,
        progress: Callable[[str], None],
        threads: int | None = None,
    ) -> tuple[dict[str, Any], dict[str, dict[str, list]]]:
        """Makes the wrappers that ``makers`` make, and runs ``rounds`` rounds of steps through each.

        Wrappers take turns, so that disturbances of the machine hit all of them alike. The one that is called
        "threads" computes with ``threads`` threads. Returns the wrappers by name, and ms by name and stage.
        """

        wrappers = {}
        for name, make in makers.items():
            progress(f"warm-up steps: {name}")
            # With a static graph, DDP counts in its first steps every gradient that arrives, also those of other
            # wrappers' steps. So one wrapper makes its first steps before the next one exists.
            wrappers[name] = make()
            with _computing_with(threads if name == "threads" else None):
                self.steps(wrappers[name], _WARMUP_STEPS)
        found: dict[str, dict[str, list]] = {name: collections.defaultdict(list) for name in wrappers}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for name, wrapper in wrappers.items():
                with _computing_with(threads if name == "threads" else None):
                    made = self.turn(wrapper)
                for times in made[WARMUP_STEPS_PER_TURN:]:
                    for stage, ms in times.items():
                        found[name][stage].append(ms)
        return wrappers, found

    def turn(self, model: Any) -> list[dict[str, float]]:
        """Runs one turn: uncounted steps, then counted ones. Every turn begins with the same batch."""
        return self.steps(model, WARMUP_STEPS_PER_TURN + STEPS_PER_TURN)

    def steps(self, model: Any, count: int, *, pause_ms: float = 0.0) -> list[dict[str, float]]:
        """Runs ``count`` steps that the ranks begin together, each after ``pause_ms``. Returns ms by stage of each."""
        dist.barrier(group=self._everybody)
        return [self.step(model, pause_ms) for _ in range(count)]

    def step(self, model: Any, pause_ms: float = 0.0) -> dict[str, float]:
        """Runs one step. Its "step" time includes ``pause_ms``, the wait before it."""
        start_ns = self.now_ns()
        time.sleep(max(0.0, pause_ms) / 1e3)
        times = dict.fromkeys(("forward", "backward", "update"), 0.0)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for passes in recorded_step.by_backward(next(self._recorded_steps)):
            replayed = recorded_step.replay(model, passes)
            with self.timed_stage("forward", times):
                next(replayed)
            with self.timed_stage("backward", times):
                next(replayed, None)
        with self.timed_stage("update", times):
            for optimizer in self._optimizers:
                optimizer.step()
        return times | {"step": (self.now_ns() - start_ns) / 1e6}

    @contextlib.contextmanager
    def timed_stage(self, name: str, times: dict[str, float]) -> Iterator[None]:
        """Adds the time of a stage to ``times``, and marks the stage for torch's profiler."""
        start_ns = self.now_ns()
        with record_function(STAGE_MARK + name):
            yield
            end_ns = self.now_ns()
        times[name] += (end_ns - start_ns) / 1e6

    def now_ns(self) -> int:
        """Waits until the device has finished its work, and reads the clock."""
        if self._ddp.device.type == "cuda":
            torch.cuda.synchronize(self._ddp.device)
        return time.perf_counter_ns()


@contextlib.contextmanager
def _computing_with(threads: int | None) -> Iterator[None]:
    """Sets the number of threads for the block; None changes nothing."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def step_count(kind_count: int, rounds: int) -> int:
    return kind_count * (_WARMUP_STEPS + rounds * (WARMUP_STEPS_PER_TURN + STEPS_PER_TURN))


def round_count(kind_count: int, observed_steps: int, affordable_steps: float) -> int:
    """Returns the rounds that fit into ``affordable_steps``: 1 to 4, or more if more steps were observed."""
    per_round = step_count(kind_count, 1) - step_count(kind_count, 0)
    wanted = max(_ROUNDS_WANTED_MIN, observed_steps // STEPS_PER_TURN)
    return max(1, min(wanted, int(affordable_steps / per_round)))


def _options(ddp: DistributedDataParallel) -> dict[str, Any]:
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


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    return list(getattr(ddp, "_comm_hooks", []))
