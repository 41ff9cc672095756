"""Computes a rate from the times at which bytes arrived. Pure."""

from collections.abc import Sequence

# The time in seconds, and how many bytes have arrived since the record before.
Record = tuple[float, int]

# Which part of the sending time counts. Before it TCP is still probing for bandwidth; after it some of several streams
# have ended.
_COUNTED_FROM, _COUNTED_TO = 0.4, 0.9


def bits_per_s(streams: Sequence[Sequence[Record]], seconds: float) -> float:
    """Returns the rate of all streams together; 0 if too little arrived to tell.

    ``seconds`` is how long the other side sent. Bytes that arrive later were queued or retransmitted, and are not
    counted.
    """
    records = sorted(record for stream in streams for record in stream)
    if len(records) < 2:
        return 0.0
    start = records[0][0]
    end = min(records[-1][0], start + seconds)
    low, high = start + _COUNTED_FROM * (end - start), start + _COUNTED_TO * (end - start)
    counted = [record for record in records if low <= record[0] <= high]
    if len(counted) < 3:  # too few records, so all count
        counted = records
    passed = counted[-1][0] - counted[0][0]
    # The bytes of the first record arrived before its time.
    return 8 * sum(size for _, size in counted[1:]) / passed if passed > 0 else 0.0
