"""How far another rank's clock is from this one's, from messages back and forth. Pure.

Nothing is assumed about how long a message takes, except that it takes some time each way: the other clock was read
between sending and receiving. The shorter the round trip, the smaller this uncertainty. So the shortest one counts and
the others are dropped, as NTP does; an average would include queueing delays.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Ping(NamedTuple):
    """One exchange. The asking rank's clock gives ``sent_ns`` and ``received_ns``, the answering rank's
    ``answered_ns``.
    """

    sent_ns: int
    answered_ns: int
    received_ns: int


class ClockOffset(NamedTuple):
    """``offset_ns`` is how far the answering clock is ahead at ``at_ns`` on that clock.

    The error is at most ``error_ns``, however unequal the two ways were.
    """

    offset_ns: float
    error_ns: float
    at_ns: int


class Clock(NamedTuple):
    """Maps a rank's own clock to rank 0's. ``drift`` is the ns that it gains on rank 0's per ns of its own."""

    offset_ns: float = 0.0
    drift: float = 0.0
    at_ns: int = 0

    def aligned(self, own_ns: int) -> int:
        """Converts a time of the rank's own clock to rank 0's clock."""
        return round(own_ns - self.offset_ns - self.drift * (own_ns - self.at_ns))


def clock_offset(pings: Sequence[Ping]) -> ClockOffset:
    """Returns the offset of the answering rank to rank 0, which began the exchanges. Ten suffice on a quiet network."""
    best = min(pings, key=lambda ping: ping.received_ns - ping.sent_ns)
    # Subtract first: a time in ns has more digits than a double.
    after_ns = best.answered_ns - best.sent_ns
    round_ns = best.received_ns - best.sent_ns
    return ClockOffset(after_ns - round_ns / 2, round_ns / 2, best.answered_ns)


def clock_between(first: ClockOffset, second: ClockOffset) -> Clock:
    """Returns a clock from comparisons before and after a run; it is assumed to drift evenly in between.

    If the two offsets differ by less than their errors, the difference is noise, not drift: the more accurate one
    counts.
    """
    passed_ns = second.at_ns - first.at_ns
    gained_ns = second.offset_ns - first.offset_ns
    if passed_ns <= 0 or abs(gained_ns) <= first.error_ns + second.error_ns:
        better = min(first, second, key=lambda offset: offset.error_ns)
        return Clock(better.offset_ns, 0.0, better.at_ns)
    return Clock(first.offset_ns, gained_ns / passed_ns, first.at_ns)
