"""From when bytes arrived to a rate."""

from collections.abc import Sequence

# When, in seconds, and how many bytes had arrived since the record before.
Record = tuple[float, int]

# Of the time in which the other side sent, the part that counts. Before it TCP finds out how much it may send; after
# it, of several streams some have ended.
_FROM, _TO = 0.4, 0.9


def bits_per_s(streams: Sequence[Sequence[Record]], seconds: float) -> float:
    """Of all streams together; 0 where too little has arrived to tell. ``seconds``: how long was sent. What arrives
    later had waited in queues, or was lost and sent again, and nothing else came meanwhile."""
    records = sorted(record for stream in streams for record in stream)
    if len(records) < 2:
        return 0.0
    start = records[0][0]
    end = min(records[-1][0], start + seconds)
    low, high = start + _FROM * (end - start), start + _TO * (end - start)
    counted = [record for record in records if low <= record[0] <= high]
    if len(counted) < 3:  # so few pieces that each of them counts
        counted = records
    passed = counted[-1][0] - counted[0][0]
    # What the first record says has arrived before it.
    return 8 * sum(size for _, size in counted[1:]) / passed if passed > 0 else 0.0
