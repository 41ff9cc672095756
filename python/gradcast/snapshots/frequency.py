"""The number of steps between snapshots, from the cost of one. Pure."""

import bisect
import dataclasses
import math
import statistics
from collections import deque


def steps_between(write_s: float, cost_s: float, step_s: float, overhead: float) -> int:
    """The fewest steps from one snapshot to the next for which each is written a step before the next one begins, and
    the training is slowed by at most ``overhead``, a share of its time. In that step nothing is copied or written; the
    others are compared with it.

    ``write_s``: from the step's end until the snapshot is complete. ``cost_s``: the additional time of all steps until
    then. ``step_s``: a step without snapshots.
    """
    return max(1 + steps_of_write(write_s, step_s), math.ceil(cost_s / (overhead * step_s)))


def steps_of_write(write_s: float, step_s: float) -> int:
    return math.ceil(write_s / step_s)


def sentence(every: int, write_s: float, cost_s: float, step_s: float, network_s: float | None = None) -> str:
    """A sentence about the cost of snapshots, and the loss at a sudden end. ``network_s``: see cost_over_network_s."""
    lost = every + steps_of_write(write_s, step_s) + 1
    share = "" if network_s is None else f" ({network_s / (every * step_s):.1%} predicted for the network)"
    return f"a snapshot every {every} steps costs {cost_s / (every * step_s):.1%}{share}; at most {lost} steps are lost"


class StepTimes:
    """The additional time of steps in which a snapshot is copied or written.

    Thread safety: one thread adds, another one may ask.
    """

    def __init__(self) -> None:
        self._quiet_s: deque[float] = deque(maxlen=100)  # durations of steps without a snapshot
        self._slowed_s: list[float] = []  # durations of the steps in which the last snapshot is copied and written
        self._is_touched = False  # whether the open step is one of them
        self._whole_s: float | None = None  # by how much longer those of a snapshot have taken, all together

    def touch(self) -> None:
        """Notes that a snapshot is copied in the open step."""
        self._is_touched = True

    def add(self, duration_s: float, *, is_busy: bool) -> None:
        """Adds a step. ``is_busy``: the next one begins with a snapshot that is not complete."""
        (self._slowed_s if is_busy or self._is_touched else self._quiet_s).append(duration_s)
        self._is_touched = is_busy
        if self._slowed_s and not is_busy and self._quiet_s:
            self._whole_s = sum(self._slowed_s) - len(self._slowed_s) * statistics.median(self._quiet_s)
            self._slowed_s.clear()

    def cost_s(self, stall_s: float) -> tuple[float, float | None]:
        """Returns a snapshot's cost, at least ``stall_s``, and the time of a step without one, None if there was none.

        The writer calls it when it has just completed one, while a step is open. So the cost is that of the snapshot
        before; of the first one, that of its steps so far, with their mean for the open step.
        """
        quiet, slowed, cost_s = list(self._quiet_s), list(self._slowed_s), self._whole_s
        if not quiet:
            return stall_s, None
        quiet_s = statistics.median(quiet)
        if cost_s is None and slowed:
            cost_s = (len(slowed) + 1) * (statistics.mean(slowed) - quiet_s)
        return max(stall_s, cost_s or 0.0), quiet_s


class Costs:
    """Costs of the last snapshots, each with the times of its write and of a step without one, in seconds.

    The first snapshot also makes the buffers and plans the files. Its cost is reported with the second
    (StepTimes.cost_s), so from the third on neither counts.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[float, float, float]] = deque(maxlen=5)  # write, cost, step
        self._count = 0

    def add(self, write_s: float, cost_s: float, step_s: float) -> None:
        self._count += 1
        if self._count <= 3:
            self._last.clear()
        self._last.append((write_s, cost_s, step_s))

    def medians_s(self) -> tuple[float, float, float] | None:
        """Returns the medians; None before the first snapshot."""
        if not self._last:
            return None
        write_s, cost_s, step_s = map(statistics.median, zip(*self._last, strict=True))
        return write_s, cost_s, step_s


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """The predicted step of a plan, in seconds since backward began.

    ``busy_s``: begin and end of each period in which blocks are in flight, in order. ``reads_s``: for each gradient,
    the times when it arrives and when forward reads its parameter, in the order of the reads. ``byte_s``: time of a
    byte that leaves a host. ``ranks``: the number that share its link.
    """

    step_s: float
    busy_s: tuple[tuple[float, float], ...]
    reads_s: tuple[tuple[float, float], ...]
    byte_s: float
    ranks: int


def cost_over_network_s(planned: PlannedStep, size_bytes: int, piece_bytes: int, longest_wait_s: float) -> float:
    """The additional time of all steps in which each rank writes so many bytes over the training's network.

    Pieces follow one another while the network is idle. The last one of an idle window is late: the blocks behind it
    share the link with its rest, and arrive that much later. While blocks are in flight, a piece waits for
    ``longest_wait_s``.
    """
    if planned.byte_s == 0.0:  # as measured with small blocks, whose latency is all
        return 0.0
    piece_s = piece_bytes * planned.byte_s * planned.ranks
    ends_s = [end_s for _, end_s in planned.busy_s]
    befores_s = [ends_s[-1] - planned.step_s, *ends_s[:-1]]
    written, late_s = 0.0, []
    for (begin_s, end_s), before_s in zip(planned.busy_s, befores_s, strict=True):
        idle_s, travel_s = begin_s - before_s, end_s - begin_s
        pieces = math.ceil(idle_s / piece_s)
        impatient = travel_s / (longest_wait_s + piece_s) if travel_s > longest_wait_s else 0.0
        written += pieces + impatient
        late_s.append(min(pieces * piece_s - idle_s, travel_s) + impatient * piece_s)
    if written == 0.0:  # the network is never idle
        written = planned.step_s / (longest_wait_s + piece_s)
        late_s = [written * piece_s] * len(late_s)
    longer_s = 0.0
    for arrival_s, read_s in planned.reads_s:
        period = min(bisect.bisect_left(ends_s, arrival_s), len(ends_s) - 1)
        longer_s = max(read_s + longer_s, arrival_s + late_s[period]) - max(read_s, arrival_s)
    return size_bytes / (piece_bytes * written) * longer_s
