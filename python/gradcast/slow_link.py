"""Finds the host with the slow link from the traffic of the connections between hosts. Pure.

A ring is as fast as its slowest link, so an operation takes equally long on all ranks. The rate of a connection while
it had something to send differs: it is the rate of its link.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

# Connections that carry less than this share of what the busiest one does are not those that operations wait for.
_CARRIES_GRADIENTS = 0.1
# Slow links are slower than all others by this part of what operations have lost, and by this factor at least. How fast
# the others look tells nothing: where the receiver waits for a slow link, they get little time to send.
_EXPLAINS, _CLEARLY_SLOWER = 0.5, 1.1


class Flow(NamedTuple):
    """Traffic from one host to another: bytes, and the time in which they were in flight."""

    sender: int
    receiver: int
    sent_bytes: float
    sending_s: float


def slow_hosts(flows: Iterable[Flow], host_count: int, slowdown: float) -> tuple[int, ...] | None:
    """Returns the two hosts of the slow link, or the one host with several; () if none stands out, None if unknown.

    ``slowdown``: measured over expected time of operations.
    """
    if host_count == 2:
        return 0, 1
    sent: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for flow in flows:
        if flow.sender != flow.receiver and flow.sending_s > 0:
            total = sent[flow.sender, flow.receiver]
            total[0] += flow.sent_bytes
            total[1] += flow.sending_s
    if not sent:
        return None
    enough = _CARRIES_GRADIENTS * max(sent_bytes for sent_bytes, _ in sent.values())
    rates = sorted((size / time_s, pair) for pair, (size, time_s) in sent.items() if size >= enough)
    gap = max(_CLEARLY_SLOWER, 1 + _EXPLAINS * (slowdown - 1))
    for count, ((slower, _), (faster, _)) in enumerate(itertools.pairwise(rates), 1):
        if faster >= gap * slower:
            return tuple(sorted(set.intersection(*({*pair} for _, pair in rates[:count]))))
    return ()
