"""Which host has the slow link, from what the connections between hosts have carried. Pure.

A ring is as fast as its slowest link, so how long an operation takes is the same on all ranks. What a connection has
carried while it had something to send differs: that is what its link gives.
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
    """From one host to another: bytes, and the time in which they were on their way."""

    sender: int
    receiver: int
    sent_bytes: float
    sending_s: float


def slow_hosts(flows: Iterable[Flow], host_count: int, slowdown: float) -> tuple[int, ...] | None:
    """The two hosts whose link is slow, in order; one host, if several of its links are; () if no link or host stands
    out, None if nothing is known. ``slowdown``: how many times as long operations take as expected."""
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
