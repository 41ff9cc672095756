"""Step reports: the ranks piggyback six timings of their last step on the gradient all-reduce.

Each rank writes its timings into elements of its own and zeros into the other ranks'. So the sum that the all-reduce
makes brings the timings of all ranks to every rank, with the same bits, and needs no operation of its own.
"""

import dataclasses
import struct
from collections.abc import Sequence
from typing import Protocol

import torch

from gradcast import _core
from gradcast.training.compat.later_read import LaterRead

# The same for any number of workers, so that a plan fits all of them.
REPORT_ELEMENTS = 384
_TIMES = 6
# A time is stored in two elements: its leading eight bits, which every dtype holds exactly, and the rest.
_ELEMENTS_PER_RANK = 2 * _TIMES
# More ranks than this take turns.
_RANKS_PER_TURN = REPORT_ELEMENTS // _ELEMENTS_PER_RANK
_NS_PER_S = 1e9


# The stages of a step in order, from the start of its backward pass. "loop" is everything but the passes.
STAGES = ("backward", "loop", "forward")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One rank's timings of a step.

    ``facts``: what the monitor decides by. ``stages_ns``: by name of STAGES, including what a stage waits for.
    """

    facts: _core.RankFacts
    stages_ns: dict[str, float]


class _Buffers(Protocol):
    """The part of the gradient buffers that carries reports."""

    reports: torch.Tensor  # (REPORT_ELEMENTS,), of a gradient's dtype

    def findings(self) -> torch.Tensor: ...  # two elements: GradientBuffers.findings()


class StepReports:
    """Exchanges the reports of one rank with those of the others.

    Reports are known ``lag`` iterations late. If ranks take turns, some reports are of still earlier iterations.
    """

    def __init__(self, buffers: _Buffers, rank: int, world_size: int) -> None:
        self._buffers = buffers
        self._rank, self._world_size = rank, world_size
        self.turns = -(-world_size // _RANKS_PER_TURN)
        self._iteration = 0
        self._known: list[StepReport | None] = [None] * world_size
        self._on_device = buffers.reports.device.type != "cpu"
        self._sums = LaterRead()
        self.lag = 3 if self._on_device else 2
        # The last known iteration in which some rank's backward pass failed, or the ranks were in different ones.
        self.failed_iteration: int | None = None
        self.differing_iteration: int | None = None

    def exchange(self, own: StepReport | None) -> list[StepReport] | None:
        """Call this once at the start of each iteration. REQUIRES: nothing is in flight, or, on a device, the current
        stream is behind it.

        ``own``: the report of the last iteration, None if it tells nothing. Returns all ranks' reports in rank order,
        or None if not all are known.
        """
        self._read()
        self._write(own)
        self._iteration += 1
        return list(self._known) if all(self._known) else None

    def _read(self) -> None:
        written_at = self._iteration - 1
        sums = torch.cat([self._buffers.reports, self._buffers.findings()])
        known = self._sums.exchange(sums, written_at)
        if known is not None:
            self._decode(*known)

    def _decode(self, values: Sequence[float], written_at: int) -> None:
        failed, differing = values[REPORT_ELEMENTS:]
        if failed > 0:
            self.failed_iteration = written_at
        if differing > 0:
            self.differing_iteration = written_at
        first = self._turn(written_at) * _RANKS_PER_TURN
        for rank in range(first, min(first + _RANKS_PER_TURN, self._world_size)):
            start = (rank - first) * _ELEMENTS_PER_RANK
            times_ns = [_NS_PER_S * (values[at] + values[at + 1]) for at in range(start, start + _ELEMENTS_PER_RANK, 2)]
            if times_ns[0] > 0:
                facts = _core.RankFacts(step_ns=times_ns[0], busy_ns=times_ns[1], link_ns=times_ns[2])
                self._known[rank] = StepReport(facts, dict(zip(STAGES, times_ns[3:], strict=True)))
            elif self.turns == 1:  # if ranks take turns, the last report stays until the next turn
                self._known[rank] = None

    def _write(self, own: StepReport | None) -> None:
        reports = self._buffers.reports
        reports.zero_()
        turn, position = divmod(self._rank, _RANKS_PER_TURN)
        if own is None or turn != self._turn(self._iteration):
            return
        facts = own.facts
        times_ns = (facts.step_ns, facts.busy_ns, facts.link_ns, *(own.stages_ns[name] for name in STAGES))
        values = [half for time_ns in times_ns for half in _halves(time_ns / _NS_PER_S)]
        # Pinned, so that the host does not wait for the device here either.
        written = torch.tensor(values, dtype=reports.dtype, device="cpu", pin_memory=self._on_device)
        start = position * _ELEMENTS_PER_RANK
        reports[start : start + _ELEMENTS_PER_RANK].copy_(written, non_blocking=True)

    def _turn(self, iteration: int) -> int:
        return iteration % self.turns


def _halves(value: float) -> tuple[float, float]:
    """The leading bits, as many as a bfloat16 holds, and the rest."""
    (leading,) = struct.unpack(">f", struct.pack(">f", value)[:2] + b"\0\0")
    return leading, value - leading
