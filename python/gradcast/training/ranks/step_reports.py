"""Step reports: the ranks send six timings of their last step with the gradients.

Each rank writes its timings into elements of its own and zeros into the other ranks'. So the sum that the all-reduce
makes brings the timings of all ranks to every rank, with the same bits, and needs no operation of its own.

There is room for 32 ranks. More take turns, and one round of all turns counts like one iteration of fewer ranks: each
report in it is used once.
"""

import dataclasses
import struct
from collections.abc import Callable, Sequence

import torch

from gradcast import _core

# The same for any number of workers, so that a plan fits all of them.
REPORT_ELEMENTS = 384
_TIMES = 6
# A time is stored in two elements: its leading eight bits, which every dtype holds exactly, and the rest.
_ELEMENTS_PER_RANK = 2 * _TIMES
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


class StepReports:
    """Exchanges the reports of one rank with those of the others.

    ``turns``: iterations of a round. ``lag``: reports are known so many iterations late. ``ends_round``: the last turn
    of a round has become known in this iteration.
    """

    def __init__(
        self, own: torch.Tensor, sums: Callable[[], Sequence[float] | None], rank: int, world_size: int, lag: int
    ) -> None:
        """``own``: what this rank sends next, REPORT_ELEMENTS elements in host memory. ``sums``: those that are known,
        of ``lag`` - 1 iterations before; None before the first."""
        self._own, self._sums = own, sums
        self._rank, self._world_size = rank, world_size
        self.turns = -(-world_size // _RANKS_PER_TURN)
        self._iteration = 0
        self.ends_round = False
        self._known: list[StepReport | None] = [None] * world_size  # of the last turns
        self._latest: StepReport | None = None  # of this rank since its last turn
        self.lag = lag

    def exchange(self, own: StepReport | None) -> list[StepReport] | None:
        """Call this once at the start of each iteration, before its message is sent.

        ``own``: the report of the last iteration, None if there is none. Returns all ranks' reports of a round that has
        ended, in rank order; None if it has not, or if not all are known.
        """
        known = self._sums()
        self.ends_round = known is not None and self._decode(known, self._iteration - self.lag + 1)
        self._write(own)
        self._iteration += 1
        reports = [each for each in self._known if each is not None]
        return reports if self.ends_round and len(reports) == len(self._known) else None

    def pause(self) -> None:
        """Sends no report until ``exchange`` is called again."""
        self._own.zero_()
        self._latest = None

    def _decode(self, values: Sequence[float], written_at: int) -> bool:
        """Returns whether this was the last turn of a round."""
        turn = self._turn(written_at)
        first = turn * _RANKS_PER_TURN
        for rank in range(first, min(first + _RANKS_PER_TURN, self._world_size)):
            start = (rank - first) * _ELEMENTS_PER_RANK
            times_ns = [_NS_PER_S * (values[at] + values[at + 1]) for at in range(start, start + _ELEMENTS_PER_RANK, 2)]
            facts = _core.RankFacts(step_ns=times_ns[0], busy_ns=times_ns[1], link_ns=times_ns[2])
            stages_ns = dict(zip(STAGES, times_ns[3:], strict=True))
            self._known[rank] = StepReport(facts, stages_ns) if times_ns[0] > 0 else None
        return turn == self.turns - 1

    def _write(self, own: StepReport | None) -> None:
        self._own.zero_()
        # Where the program often completes a step early, some turn would miss its report in each round.
        self._latest = own or self._latest
        turn, position = divmod(self._rank, _RANKS_PER_TURN)
        if self._latest is None or turn != self._turn(self._iteration):
            return
        facts, stages_ns = self._latest.facts, self._latest.stages_ns
        self._latest = None
        times_ns = (facts.step_ns, facts.busy_ns, facts.link_ns, *(stages_ns[name] for name in STAGES))
        values = [half for time_ns in times_ns for half in _halves(time_ns / _NS_PER_S)]
        start = position * _ELEMENTS_PER_RANK
        self._own[start : start + _ELEMENTS_PER_RANK] = torch.tensor(values, dtype=torch.float64)

    def _turn(self, iteration: int) -> int:
        return iteration % self.turns


def _halves(value: float) -> tuple[float, float]:
    """The leading bits, as many as a bfloat16 holds, and the rest."""
    (leading,) = struct.unpack(">f", struct.pack(">f", value)[:2] + b"\0\0")
    return leading, value - leading
