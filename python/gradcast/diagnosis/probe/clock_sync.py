"""Measures how far the ranks' clocks are apart, with messages back and forth."""

import time

import torch

from gradcast.diagnosis.trace.clocks import ClockOffset, Ping, clock_offset
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group

_PINGS = 12


def offsets(group: Group) -> list[ClockOffset]:
    """Returns the offset of each rank's clock (time.perf_counter_ns) to rank 0's, on rank 0; elsewhere an empty
    list. Collective.
    """
    found = [ClockOffset(0.0, 0.0, time.perf_counter_ns())] if group.rank == 0 else []
    for rank in range(1, group.world_size):
        if group.rank == 0:
            found.append(clock_offset(_exchange_pings(group, rank)))
        elif group.rank == rank:
            _answer_pings(group)
    return found


def _exchange_pings(group: Group, rank: int) -> list[Ping]:
    c10d, limit_s = extension.load(), group.timeout_s
    answer = torch.zeros(1, dtype=torch.int64, device="cpu")
    found = []
    for _ in range(_PINGS):
        sent_ns = time.perf_counter_ns()
        c10d.send(group.own, answer, rank, limit_s)
        c10d.receive(group.own, answer, rank, limit_s)
        found.append(Ping(sent_ns, int(answer.item()), time.perf_counter_ns()))
    return found


def _answer_pings(group: Group) -> None:
    c10d, limit_s = extension.load(), group.timeout_s
    for _ in range(_PINGS):
        c10d.receive(group.own, torch.zeros(1, dtype=torch.int64, device="cpu"), 0, limit_s)
        c10d.send(group.own, torch.tensor([time.perf_counter_ns()], device="cpu"), 0, limit_s)
