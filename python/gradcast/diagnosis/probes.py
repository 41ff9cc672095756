"""Steps that are not the user's: the same passes again, with less of what an ordinary step does.

They run between two ordinary steps, on the tapes of the last ones, while a snapshot holds the training's state. Who
sends gradients are further DistributedDataParallel wrappers around the same module, with the user's options and other
groups of ranks: all of them ("cluster"), those of this node ("node"), this rank by itself ("alone"), for which DDP does
everything but send. The user's own wrapper takes no part: it reduces only after a forward pass of its own.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis import tape
from gradcast.diagnosis.tape import Tape

_MIB = 1 << 20
# Of a kind, before any counts: DDP lays out its buckets anew after the first; and of each turn, in which caches and
# TCP's windows are those that another kind has left.
_SETTLING_STEPS = 2
_LEFT_OUT_PER_TURN = 1
_STEPS_PER_TURN = 3


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
        return DistributedDataParallel(self._ddp.module, **(_options(self._ddp) | {"process_group": group} | changes))

    def run(self, wrappers: dict[str, Any], rounds: int, told: Callable[[str], None]) -> dict[str, dict[str, list]]:
        """ms by name of the wrapper and stage. The wrappers take turns, so that whatever else the machine does falls on
        all of them."""
        for name, wrapper in wrappers.items():
            told(f"steps {name}")
            self.steps(wrapper, _SETTLING_STEPS)
        found: dict[str, dict[str, list]] = {name: {} for name in wrappers}
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            for name, wrapper in wrappers.items():
                for times in self.steps(wrapper, _LEFT_OUT_PER_TURN + _STEPS_PER_TURN)[_LEFT_OUT_PER_TURN:]:
                    for stage, ms in times.items():
                        found[name].setdefault(stage, []).append(ms)
        return found

    def steps(self, model: Any, count: int) -> list[dict[str, float]]:
        """ms by stage. The ranks begin together."""
        dist.barrier(group=self._everybody)
        return [self.step(model) for _ in range(count)]

    def step(self, model: Any) -> dict[str, float]:
        stamps = [self._now_ns()]
        times = {"forward": 0.0, "backward": 0.0}
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for each in next(self._tapes).used:
            with tape.synchronizing(model, each):
                start = self._now_ns()
                outputs = tape.forward(model, each)
                middle = self._now_ns()
                tape.backward(each, outputs)
                end = self._now_ns()
            times["forward"] += (middle - start) / 1e6
            times["backward"] += (end - middle) / 1e6
        stamps.append(self._now_ns())
        for optimizer in self._optimizers:
            optimizer.step()
        stamps.append(self._now_ns())
        return times | {"update": (stamps[2] - stamps[1]) / 1e6, "step": (stamps[2] - stamps[0]) / 1e6}

    def _now_ns(self) -> int:
        if self._ddp.device.type == "cuda":
            torch.cuda.synchronize(self._ddp.device)
        return time.perf_counter_ns()


def step_count(kind_count: int, rounds: int) -> int:
    """How many steps ``run`` takes."""
    return kind_count * (_SETTLING_STEPS + rounds * (_LEFT_OUT_PER_TURN + _STEPS_PER_TURN))


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
    with _Stamps(module, owners, found):
        prober.steps(model, steps)
    return {name: ms / steps for name, ms in found.items()}


class _Stamps:
    """Hooks on modules and parameters that add up times."""

    def __init__(self, module: torch.nn.Module, owners: dict[str, str], found: dict[str, float]) -> None:
        self._found = found
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
            started.append(time.perf_counter_ns())

        def end(*_: Any) -> None:
            self._last_ns = time.perf_counter_ns()
            if started:  # not where the begin was in a pass that failed
                self._found[name] += (self._last_ns - started.pop()) / 1e6

        self._handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _ready_hook(self, name: str) -> Callable[[Any], None]:
        def ready(_: Any) -> None:
            now_ns = time.perf_counter_ns()
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
    }
    caps = getattr(ddp, "bucket_bytes_cap_list", [])
    if caps:
        options["bucket_cap_mb_list"] = [cap / _MIB for cap in caps]
    elif not ddp.bucket_bytes_cap_default:
        options["bucket_cap_mb"] = ddp.bucket_bytes_cap / _MIB
    return options


def own_hooks(ddp: DistributedDataParallel) -> Iterator[tuple[Any, Any]]:
    """The communication hooks that the user has registered: (state, function)."""
    for function, state in getattr(ddp, "_comm_hooks", []):
        yield state, function
