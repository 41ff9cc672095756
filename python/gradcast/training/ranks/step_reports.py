"""What the ranks tell each other of their last step: a few times each, which travel with the gradients.

Every rank writes into places of its own and zeros elsewhere, so that the sum of the gradients' all-reduce brings all of
them to everybody: no operation of their own, and the same bits on every rank.
"""

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gradcast import _core

# However many workers there are, so that a plan fits them all.
REPORT_ELEMENTS = 384
_TIMES = 6
# A time is two elements: its leading eight bits, which every dtype holds exactly, and the rest.
_ELEMENTS_PER_RANK = 2 * _TIMES
# More ranks than that take turns.
_RANKS_AT_ONCE = REPORT_ELEMENTS // _ELEMENTS_PER_RANK
_NS = 1e9


# Of a step, as it runs through them from the start of its backward pass. "loop": everything but the passes.
STAGES = ("backward", "loop", "forward")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Of one rank's step. ``facts``: what the monitor decides by. ``stages_ns``: by STAGES, with what they wait for."""

    facts: _core.RankFacts
    stages_ns: dict[str, float]


class _Buffers(Protocol):
    """The part of the gradient buffers that carries reports."""

    notes: torch.Tensor

    def somebody_failed(self) -> torch.Tensor: ...


class StepReports:
    """Of one rank. ``exchange`` once per iteration; what it returns is that of the iteration ``lag`` before the one
    that begins, and for ranks that take turns, of earlier ones."""

    def __init__(self, buffers: _Buffers, rank: int, world_size: int) -> None:
        self._buffers = buffers
        self._rank, self._world_size = rank, world_size
        self._turns = -(-world_size // _RANKS_AT_ONCE)
        self._iteration = 0
        self._known: list[StepReport | None] = [None] * world_size
        self._on_device = buffers.notes.device.type != "cpu"
        self._coming: Any = None  # from the device: host memory, the event after which it is there, its iteration
        self.lag = 3 if self._on_device else 2
        # The last iteration that is known of in which some rank's backward pass has failed.
        self.failed_iteration: int | None = None

    def exchange(self, own: StepReport | None) -> list[StepReport] | None:
        """Where an iteration begins. ``own``: of the last one, None if it tells nothing. Returns all ranks' notes in
        rank order, None where not all are known. REQUIRES: nothing of the buffers travels."""
        self._read()
        self._write(own)
        self._iteration += 1
        return list(self._known) if all(self._known) else None

    def _read(self) -> None:
        written = self._iteration - 1
        told = torch.cat([self._buffers.notes, self._buffers.somebody_failed()])
        if not self._on_device:
            self._take(told.tolist(), written)
            return
        # The host does not wait for the device: it takes what was sent on its way an iteration ago.
        coming, host = self._coming, torch.empty(len(told), dtype=told.dtype, device="cpu", pin_memory=True)
        host.copy_(told, non_blocking=True)
        self._coming = host, torch.cuda.current_stream(told.device).record_event(), written
        if coming is not None:
            coming[1].synchronize()
            self._take(coming[0].tolist(), coming[2])

    def _take(self, values: Sequence[float], written: int) -> None:
        if values[REPORT_ELEMENTS] > 0:
            self.failed_iteration = written
        first = self._turn(written) * _RANKS_AT_ONCE
        for rank in range(first, min(first + _RANKS_AT_ONCE, self._world_size)):
            start = (rank - first) * _ELEMENTS_PER_RANK
            times = [_NS * (values[at] + values[at + 1]) for at in range(start, start + _ELEMENTS_PER_RANK, 2)]
            if times[0] > 0:
                facts = _core.RankFacts(step_ns=times[0], busy_ns=times[1], link_ns=times[2])
                self._known[rank] = StepReport(facts, dict(zip(STAGES, times[3:], strict=True)))
            elif self._turns == 1:  # otherwise what it has told before stays for its next turn
                self._known[rank] = None

    def _write(self, own: StepReport | None) -> None:
        values = [0.0] * REPORT_ELEMENTS
        turn, place = divmod(self._rank, _RANKS_AT_ONCE)
        if own is not None and turn == self._turn(self._iteration):
            start = place * _ELEMENTS_PER_RANK
            facts = own.facts
            stages_ns = [own.stages_ns[name] for name in STAGES]
            times_ns = (facts.step_ns, facts.busy_ns, facts.link_ns, *stages_ns)
            for number, time_ns in enumerate(times_ns):
                values[start + 2 * number : start + 2 * number + 2] = _halves(time_ns / _NS)
        # Pinned, so that the host does not wait for the device here either.
        written = torch.tensor(values, dtype=self._buffers.notes.dtype, device="cpu", pin_memory=self._on_device)
        self._buffers.notes.copy_(written, non_blocking=True)

    def _turn(self, iteration: int) -> int:
        return iteration % self._turns


def _halves(value: float) -> tuple[float, float]:
    """The leading bits that a bfloat16 holds, and the rest."""
    (leading,) = struct.unpack(">f", struct.pack(">f", value)[:2] + b"\0\0")
    return leading, value - leading
