"""Traffic of this process's TCP connections, counted by Linux: it shows a slow link without sending anything."""

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

# Both ends of a connection, this process's first; an end is address and port.
Ends = tuple[tuple[Any, ...], tuple[Any, ...]]
# Of struct tcp_info (linux/tcp.h), since Linux 4.10, with their offsets: bytes_acked and bytes_received; busy_time and
# rwnd_limited, in microseconds.
_BYTES, _TIMES = 120, 168
_TWO = struct.Struct("=QQ")
_SIZE = 256
# The most connections that are reported: gradients are sent over few.
_BUSIEST = 32


class Carried(NamedTuple):
    """Bytes acknowledged by the other end, and received; and the time in which some were under way to the other end and
    it had room for them."""

    sent_bytes: int
    received_bytes: int
    sending_s: float


def read() -> dict[Ends, Carried]:
    """Returns the traffic of each connection since it was made. Gloo's and NCCL's do not block; others are omitted."""
    found: dict[Ends, Carried] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            # Constructing a socket may set O_NONBLOCK, shared with the original descriptor; here it stays as it is.
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and not os.get_blocking(int(name)):
                with _duplicate(int(name)) as each:
                    ends = each.getsockname()[:2], each.getpeername()[:2]
                    found[ends] = _carried(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE))
        except (OSError, struct.error):  # closed meanwhile, not connected, not TCP, an old kernel
            continue
    return found


def _duplicate(descriptor: int) -> socket.socket:
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except BaseException:
        os.close(own)
        raise


def since(before: dict[Ends, Carried]) -> dict[Ends, Carried]:
    """Returns the traffic of the busiest connections since ``before``."""
    now = read()
    found = {
        ends: Carried._make(after - earlier for after, earlier in zip(now[ends], before[ends], strict=True))
        for ends in before.keys() & now.keys()
    }
    busiest = sorted(found, key=lambda ends: max(found[ends].sent_bytes, found[ends].received_bytes))[-_BUSIEST:]
    return {ends: found[ends] for ends in busiest}


def between_ranks(ranks: Sequence[dict[Ends, Carried]]) -> list[tuple[int, int, Carried]]:
    """Returns sender, receiver and traffic of each connection between two ranks. Pure. ``ranks``: by rank."""
    rank_of = {ends: rank for rank, connections in enumerate(ranks) for ends in connections}
    return [
        (rank, rank_of[peer, own], carried)
        for rank, connections in enumerate(ranks)
        for (own, peer), carried in connections.items()
        if (peer, own) in rank_of
    ]


def _carried(info: bytes) -> Carried:
    busy_us, no_room_us = _TWO.unpack_from(info, _TIMES)
    return Carried._make((*_TWO.unpack_from(info, _BYTES), (busy_us - no_room_us) / 1e6))
