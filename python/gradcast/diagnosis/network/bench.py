"""Times all-reduces by size on the path of training's blocks, and fits the link as training's warm-up does.

Engine, transport and process group are those of a training, as are the times of a block and the fit
(training/measure/network_cost.py). Each iteration sends two blocks one right after the other, as a plan does: of an
idle network training's fit corrects the start. What is missing is compute, which the warm-up has beside the blocks.
"""

import dataclasses
import itertools
import json
import os
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.measure import network_cost
from gradcast.training.measure.network_cost import Sample
from gradcast.training.measure.stopwatch import Stopwatch
from gradcast.training.ranks import hosts
from gradcast.training.ranks.group import Group, transport_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_BLOCKS = 2
# As gradcast-bench. Python checks for Ctrl-C between two slices.
_PATIENCE_NS, _SLICE_NS = 60_000_000_000, 100_000_000
_PIECE_ELEMENTS = 1 << 20
_SIZES_MIN = 3  # of a line
_STEPS_MAX = 50  # of a size that the fit takes


@dataclasses.dataclass(frozen=True)
class Sweep:
    dtype: str = "fp32"
    bytes_min: int = 1 << 10
    bytes_max: int = 64 << 20
    factor: float = 2.0
    iterations: int = 20
    warmup: int = 5

    @property
    def sizes_bytes(self) -> list[int]:
        """Whole elements, each size once."""
        each = DTYPES[self.dtype].itemsize
        sizes: dict[int, None] = {}
        size = float(self.bytes_min)
        while size <= self.bytes_max * (1 + 1e-9):
            sizes[each * max(1, round(size / each))] = None
            size *= self.factor
        return list(sizes)


def measured(group: Group, sweep: Sweep, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Returns the results in the format of ``gradcast-bench --json``, the same on every rank. Collective.

    ``group``: made as for a training on its device. ``tell`` gets each row of the sweep at once.
    """
    with group.together("measuring all-reduces"):
        places = group.gather((hosts.own_place(), _own_rank(group)))
        group.hosts, _ = hosts.agreed([place for place, _ in places])
        bench = Bench(group, sweep)
        try:
            group.meet()  # a rank without the memory sends no block
            rows, steps = [], []
            for size_bytes in sweep.sizes_bytes:
                row, own_steps = bench.measured(size_bytes)
                tell(row)
                rows.append(row)
                steps += own_steps
            pack_ns_per_byte = statistics.median(group.gather(bench.pack_ns_per_byte()))
        finally:
            bench.shutdown()
    results = {
        "version": 1,
        "kind": "gradcast-bench",
        "gradcast": _core.__version__,
        "transport": f"{group.backend} of torch",
        "world_size": group.world_size,
        "ranks": [rank for _, rank in places],
        "sweep": rows,
    }
    if len(rows) >= _SIZES_MIN:
        results |= fitted([sample for step in steps for sample in step], pack_ns_per_byte)
    return results


def _own_rank(group: Group) -> dict[str, Any]:
    on_cpu = group.device is None or group.device.type == "cpu"
    libraries = f"torch {torch.__version__}"
    if not on_cpu:
        libraries += ", NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "host": socket.gethostname(),
        "device": "" if on_cpu else torch.cuda.get_device_name(group.device),
        "libraries": libraries,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))},
    }


def fitted(samples: Sequence[Sample], pack_ns_per_byte: float) -> dict[str, Any]:
    link = network_cost.fit_link(samples, pack_ns_per_byte)
    errors = [abs(sample.time_ns / link.all_reduce.cost_ns(sample.size_bytes) - 1) for sample in samples]
    facts = {"relative_error_median": statistics.median(errors), "relative_error_max": max(errors)}
    return {"fit": {"all_reduce": facts}, "link": json.loads(link.to_json())}


class Bench:
    """One buffer, of which every size takes the beginning, and the engine that sends it."""

    def __init__(self, group: Group, sweep: Sweep) -> None:
        self._group, self._sweep = group, sweep
        self._dtype = DTYPES[sweep.dtype]
        most_bytes = _BLOCKS * max(sweep.sizes_bytes)
        try:
            self._flat = torch.zeros(most_bytes // self._dtype.itemsize, dtype=self._dtype, device=group.device)
        except RuntimeError:
            raise Error(
                f"rank {group.rank} has no memory for {_BLOCKS} blocks of {max(sweep.sizes_bytes)} bytes; give a "
                "smaller --bytes-max"
            ) from None
        self._transport = transport_of(group, [self._flat], "fp32")
        self._engine = _core.Engine(self._transport, timeline_iterations=1)

    def shutdown(self) -> None:
        self._engine.shutdown()
        self._transport = None

    def pack_ns_per_byte(self) -> float:
        return Stopwatch(self._flat.device, 0).pack_ns_per_byte([self._flat])

    def measured(self, size_bytes: int) -> tuple[dict[str, Any], list[list[Sample]]]:
        """A row of the sweep, and the samples of steps of all ranks together."""
        plan = self._follow(size_bytes)
        wrong = self._wrong_count(size_bytes)
        for _ in range(self._sweep.warmup):
            self._iterate(size_bytes)
        own = []
        for _ in range(self._sweep.iterations):
            own.append(network_cost.samples_of_rank(plan, self._iterate(size_bytes)))
        gathered = self._group.gather((own, wrong))
        row = _row(self._sweep.dtype, size_bytes, [ranks for ranks, _ in gathered], sum(each for _, each in gathered))
        steps = list(zip(*(ranks for ranks, _ in gathered), strict=True))
        return row, [network_cost.combined(step) for step in steps[:: -(-len(steps) // _STEPS_MAX)]]

    def _follow(self, size_bytes: int) -> _core.Plan:
        tensors = [
            _core.Tensor(
                name=f"block {index}",
                bytes=size_bytes,
                ready_ns=0,
                need_ns=0,
                element_bytes=self._dtype.itemsize,
            )
            for index in range(_BLOCKS)
        ]
        profile = _core.Profile(name="bench", forward_ns=0, backward_ns=0, tensors=tensors)
        ranges = [(index * size_bytes, (index + 1) * size_bytes) for index in range(_BLOCKS)]
        plan = _core.Plan(blocks=[_core.Block(ranges=[each]) for each in ranges])
        self._engine.follow(profile, plan)
        self._transport.expect([(0, [each]) for each in ranges])
        return plan

    def _iterate(self, size_bytes: int) -> Sequence[_core.BlockRecord]:
        self._engine.begin()
        for index in range(_BLOCKS):
            self._transport.on_written(0, index * size_bytes, (index + 1) * size_bytes)
            self._engine.on_ready(index)
        for _ in range(0, _PATIENCE_NS, _SLICE_NS):
            if self._engine.wait_all(_SLICE_NS):
                return self._engine.timeline()[-1].blocks
        raise Error(
            f"an all-reduce of {size_bytes} bytes has not ended after 60 s on rank {self._group.rank}: "
            f"{self._engine.waiting_for()}",
            "communication",
        )

    def _wrong_count(self, size_bytes: int) -> int:
        """Elements that are not the exact sum, of an operation on small whole numbers."""
        numbers = Numbers(self._group.rank, self._group.world_size)
        flat = self._flat[: _BLOCKS * size_bytes // self._dtype.itemsize]
        numbers.write(flat)
        self._iterate(size_bytes)
        return numbers.wrong_count(flat)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Numbers whose sums are exact in every type: at most 16 ranks give an element another number than 0, and sums stay
    below 256, up to which bf16 has all whole numbers."""

    rank: int
    world_size: int

    def write(self, flat: torch.Tensor) -> None:
        """Writes this rank's numbers."""
        for places, piece in _pieces(flat):
            piece.copy_(self.given(places))

    def wrong_count(self, flat: torch.Tensor) -> int:
        """Elements that are not the sum of all ranks' numbers."""
        return sum(int((piece != self.sums(places)).sum()) for places, piece in _pieces(flat))

    @property
    def _groups(self) -> int:
        return -(-self.world_size // 16)

    def given(self, places: torch.Tensor) -> torch.Tensor:
        numbers = 1 + places % 7 + self.rank // self._groups
        return torch.where(places % self._groups == self.rank % self._groups, numbers, 0)

    def sums(self, places: torch.Tensor) -> torch.Tensor:
        counts = (self.world_size - places % self._groups + self._groups - 1) // self._groups
        return counts * (1 + places % 7) + counts * (counts - 1) // 2


def _pieces(flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The places of elements and the elements themselves, part by part."""
    for first in range(0, flat.numel(), _PIECE_ELEMENTS):
        piece = flat[first : first + _PIECE_ELEMENTS]
        yield torch.arange(first, first + piece.numel(), device=piece.device), piece


def _row(dtype: str, size_bytes: int, ranks: Sequence[Sequence[Sequence[Sample]]], errors: int) -> dict[str, Any]:
    """``ranks``: samples by rank, step and block."""
    times = [sorted(sample.time_ns for sample in itertools.chain.from_iterable(steps)) for steps in ranks]
    time_ns = statistics.mean(statistics.mean(each) for each in times)
    share = (len(ranks) - 1) / len(ranks)
    return {
        "op": "all_reduce",
        "dtype": str(DTYPES[dtype]).removeprefix("torch."),
        "in_place": True,
        "size_bytes": size_bytes,
        "time_ns": time_ns,
        "low_ns": min(each[0] for each in times),
        "high_ns": max(each[-1] for each in times),
        **{f"p{percent}_ns": max(_percentile(each, percent) for each in times) for percent in (50, 90, 99)},
        "algbw_gb_per_s": size_bytes / time_ns,
        "busbw_gb_per_s": 2 * share * size_bytes / time_ns,
        "errors": errors,
    }


def _percentile(ascending: Sequence[float], percent: int) -> float:
    return ascending[(len(ascending) * percent + 99) // 100 - 1]
