"""How far the ranks' clocks are apart, by messages there and back."""

import time

import torch
import torch.distributed as dist

from gradcast.traces import ClockOffset, Ping, clock_offset
from gradcast.training.group import Group

_PINGS = 12


def offsets(group: Group) -> list[ClockOffset]:
    """Of each rank's clock (time.perf_counter_ns) to rank 0's; on rank 0 alone, elsewhere nothing. Collective."""
    found = [ClockOffset(0.0, 0.0, time.perf_counter_ns())] if group.rank == 0 else []
    for rank in range(1, group.world_size):
        if group.rank == 0:
            found.append(clock_offset(_asked(group, rank)))
        elif group.rank == rank:
            _answer(group)
    return found


def _asked(group: Group, rank: int) -> list[Ping]:
    peer = dist.get_global_rank(group.own, rank)
    answer = torch.zeros(1, dtype=torch.int64, device="cpu")
    found = []
    for _ in range(_PINGS):
        sent_ns = time.perf_counter_ns()
        dist.send(answer, peer, group=group.own)
        dist.recv(answer, peer, group=group.own)
        found.append(Ping(sent_ns, int(answer.item()), time.perf_counter_ns()))
    return found


def _answer(group: Group) -> None:
    peer = dist.get_global_rank(group.own, 0)
    for _ in range(_PINGS):
        dist.recv(torch.zeros(1, dtype=torch.int64, device="cpu"), peer, group=group.own)
        dist.send(torch.tensor([time.perf_counter_ns()], device="cpu"), peer, group=group.own)
