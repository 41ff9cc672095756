"""How far another rank's clock is from this one's, told by messages there and back. Pure.

Nothing is assumed about how long a message takes, only that it takes some time each way: the other clock was read
somewhere between sending and receiving. The quicker the exchange, the narrower that is, so the quickest one counts and
the others are thrown away, as NTP does. Averaging them would add what queues have added.
"""

from collections.abc import Sequence
from typing import NamedTuple

from gradcast.errors import Error


class Ping(NamedTuple):
    """One exchange. ``sent_ns`` and ``received_ns``: of the clock of who asks; ``answered_ns``: of who answers."""

    sent_ns: int
    answered_ns: int
    received_ns: int


class ClockOffset(NamedTuple):
    """``offset_ns``: what the answering clock is ahead. ``error_ns``: it is off by no more, however unequal both ways
    were. ``at_ns``: when that was, on the answering clock."""

    offset_ns: float
    error_ns: float
    at_ns: int


class Clock(NamedTuple):
    """From a rank's own clock to rank 0's. ``drift``: ns by which it gains on rank 0's per ns of its own."""

    offset_ns: float = 0.0
    drift: float = 0.0
    at_ns: int = 0

    def aligned(self, own_ns: int) -> int:
        """The same instant on rank 0's clock."""
        return round(own_ns - self.offset_ns - self.drift * (own_ns - self.at_ns))


def clock_offset(pings: Sequence[Ping | tuple[int, int, int]]) -> ClockOffset:
    """From exchanges that rank 0 began, this rank's offset to rank 0. Ten are enough where the network is quiet."""
    exchanges = [Ping(*ping) for ping in pings]
    if not exchanges:
        raise Error("there is no exchange to tell the clocks' offset from; send at least one", "invalid_use")
    if any(ping.received_ns < ping.sent_ns for ping in exchanges):
        raise Error("an exchange was received before it was sent: both times have to be of one clock", "invalid_use")
    best = min(exchanges, key=lambda ping: ping.received_ns - ping.sent_ns)
    # Differences first: a clock in ns has more digits than a double.
    after_ns = best.answered_ns - best.sent_ns
    round_ns = best.received_ns - best.sent_ns
    return ClockOffset(after_ns - round_ns / 2, round_ns / 2, best.answered_ns)


def clock_between(first: ClockOffset, second: ClockOffset) -> Clock:
    """A clock that was compared before and after a run: in between it is taken to drift evenly.

    Where the two offsets differ by less than their errors, that is no drift but noise: the better one counts.
    """
    passed_ns = second.at_ns - first.at_ns
    gained_ns = second.offset_ns - first.offset_ns
    if passed_ns <= 0 or abs(gained_ns) <= first.error_ns + second.error_ns:
        better = min(first, second, key=lambda offset: offset.error_ns)
        return Clock(better.offset_ns, 0.0, better.at_ns)
    return Clock(first.offset_ns, gained_ns / passed_ns, first.at_ns)
