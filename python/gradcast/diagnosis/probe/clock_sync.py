"""Measures the offsets between the ranks' clocks with messages back and forth.

The other clock was read at some time between sending and receiving. So the shortest round trip is the most accurate one
and alone counts, as in NTP; an average would include queueing delays.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradcast.diagnosis.trace.merged import Clock
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group

_PINGS = 12


class Ping(NamedTuple):
    """One exchange: times of the asking rank's clock, and ``answered_ns`` of the answering one's."""

    sent_ns: int
    answered_ns: int
    received_ns: int


class ClockOffset(NamedTuple):
    """The lead of the answering clock at ``at_ns`` on that clock, within ``error_ns``."""

    offset_ns: float
    error_ns: float
    at_ns: int


def offsets(group: Group) -> list[ClockOffset]:
    """Returns each clock's offset (time.perf_counter_ns) to rank 0's; an empty list on other ranks. Collective."""
    found = [ClockOffset(0.0, 0.0, time.perf_counter_ns())] if group.rank == 0 else []
    for rank in range(1, group.world_size):
        if group.rank == 0:
            found.append(clock_offset(_exchange_pings(group, rank)))
        elif group.rank == rank:
            _answer_pings(group)
    return found


def _exchange_pings(group: Group, rank: int) -> list[Ping]:
    c10d, answer = extension.load(), torch.zeros(1, dtype=torch.int64, device="cpu")
    found = []
    for _ in range(_PINGS):
        sent_ns = time.perf_counter_ns()
        c10d.send(group.own, answer, rank, group.timeout_s)
        c10d.receive(group.own, answer, rank, group.timeout_s)
        found.append(Ping(sent_ns, int(answer.item()), time.perf_counter_ns()))
    return found


def _answer_pings(group: Group) -> None:
    c10d, question = extension.load(), torch.zeros(1, dtype=torch.int64, device="cpu")
    for _ in range(_PINGS):
        c10d.receive(group.own, question, 0, group.timeout_s)
        c10d.send(group.own, torch.tensor([time.perf_counter_ns()], device="cpu"), 0, group.timeout_s)


def clock_offset(pings: Sequence[Ping]) -> ClockOffset:
    """Returns the offset of the answering rank to rank 0, which began the exchanges. Ten suffice on a quiet network."""
    best = min(pings, key=lambda ping: ping.received_ns - ping.sent_ns)
    # Subtract first: a time in ns has more digits than a double.
    after_ns = best.answered_ns - best.sent_ns
    round_ns = best.received_ns - best.sent_ns
    return ClockOffset(after_ns - round_ns / 2, round_ns / 2, best.answered_ns)


def clock_between(first: ClockOffset, second: ClockOffset) -> Clock:
    """Returns a clock from comparisons before and after a run; it drifts if they differ by more than their errors."""
    passed_ns = second.at_ns - first.at_ns
    gained_ns = second.offset_ns - first.offset_ns
    if passed_ns <= 0 or abs(gained_ns) <= first.error_ns + second.error_ns:
        better = min(first, second, key=lambda offset: offset.error_ns)
        return Clock(better.offset_ns, 0.0, better.at_ns)
    return Clock(first.offset_ns, gained_ns / passed_ns, first.at_ns)
