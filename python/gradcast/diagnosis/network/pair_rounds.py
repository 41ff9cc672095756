"""Which pairs of hosts are measured, and which of them at the same time.

Pure. Pairs of one round share no host, so no two of them share a link.
"""

Pair = tuple[int, int]

# All pairs of 8 hosts are 28, in 7 rounds. All pairs of 64 would be 2016, in 63.
ALL_PAIRS_HOSTS_MAX = 8
# Pairs of the first host with this many others, besides the ring: a distant pair differs from neighbours in one rack.
_SAMPLE = 6


def rounds(host_count: int) -> list[list[Pair]]:
    """Returns the rounds. With three hosts or more, every host is in at least two pairs. The lower host comes first
    in each pair.
    """
    if host_count < 2:
        return []
    if host_count <= ALL_PAIRS_HOSTS_MAX:
        return _tournament(host_count)
    return [*_ring(host_count), *([pair] for pair in _sample(host_count))]


def _tournament(host_count: int) -> list[list[Pair]]:
    """Pairs each host with each other once (the circle method of round-robin tournaments)."""
    circle = list(range(host_count + host_count % 2))  # an odd number gets a dummy; its partner pauses
    found = []
    for _ in range(len(circle) - 1):
        meeting = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        found.append(sorted((min(pair), max(pair)) for pair in meeting if max(pair) < host_count))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _ring(host_count: int) -> list[list[Pair]]:
    even = [(host, host + 1) for host in range(0, host_count - 1, 2)]
    odd = [(host, host + 1) for host in range(1, host_count - 1, 2)]
    last = (0, host_count - 1)
    # With an odd number of hosts, the pair that closes the ring shares a host with either round.
    return [even, odd, [last]] if host_count % 2 else [even, [last, *odd]]


def _sample(host_count: int) -> list[Pair]:
    step = (host_count - 3) / (_SAMPLE + 1)
    others = {round(1 + step * (index + 1)) for index in range(_SAMPLE)}
    return [(0, other) for other in sorted(others) if 1 < other < host_count - 1]
