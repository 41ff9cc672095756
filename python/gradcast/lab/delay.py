"""Latency on a host's link: ``python -m gradcast.lab.delay PORT TAP LATENCY_S``, on the lab's switch.

Forwards pieces from the switch's end of the link to the bridge, through a TAP device, after the latency, and back.
(Many kernels lack tc's netem, which does this in the kernel.) Prints a line when the TAP device exists.

A piece has up to 64 kB, as hosts give them to their links, with its virtio_net_hdr for the kernel. Single packets would
take more than one core.
"""

import collections
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

from gradcast.lab.cores import wake_promptly

_PIECE_BYTES_MAX = 1 << 17
_QUEUE_BYTES = 16 << 20
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x1, 0x2, 0x4
# linux/if_packet.h, linux/if_ether.h
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_ETH_P_ALL = 0x0003
# The link is cut off (Network.set_link), the header cannot describe the piece, or a queue is full.
_LOST = (errno.ENETDOWN, errno.EINVAL, errno.ENOBUFS)
# asm-generic/socket.h; Python does not define them.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


class Delayed:
    """One direction: forwards pieces ``latency_s`` after their arrival."""

    def __init__(self, take: Callable[[], bytes], give: Callable[[bytes], object], latency_s: float) -> None:
        self._take, self._give, self._latency_s = take, give, latency_s
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()

    def arrived(self, now_s: float) -> None:
        while True:
            try:
                piece = self._take()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _LOST:
                    raise
                return
            self._waiting.append((now_s + self._latency_s, piece))

    def pass_on(self, now_s: float) -> float | None:
        """Forwards the pieces whose time has come. Returns the time of the next piece, None without one."""
        while self._waiting and self._waiting[0][0] <= now_s:
            with contextlib.suppress(OSError):  # a link that is down or full loses the piece
                self._give(self._waiting.popleft()[1])
        return self._waiting[0][0] if self._waiting else None


def main(port: str, tap_name: str, latency_s: float) -> None:
    wake_promptly()
    tap, link = _tap(tap_name), _link(port)
    print("ready", flush=True)
    directions = {
        link.fileno(): Delayed(
            lambda: link.recv(_PIECE_BYTES_MAX, socket.MSG_DONTWAIT), lambda piece: os.write(tap, piece), latency_s
        ),
        tap: Delayed(
            lambda: os.read(tap, _PIECE_BYTES_MAX), lambda piece: link.send(piece, socket.MSG_DONTWAIT), latency_s
        ),
    }
    due_s: float | None = None
    while True:
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        readable, _, _ = select.select(list(directions), [], [], timeout_s)
        now_s = time.monotonic()
        for each in readable:
            directions[each].arrived(now_s)
        next_s = [each.pass_on(time.monotonic()) for each in directions.values()]
        due_s = min((each for each in next_s if each is not None), default=None)


def _tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return tap


def _link(port: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    link.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    link.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    # FORCE lets root exceed the system's limit: as much as the link itself may queue.
    for option in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        link.setsockopt(socket.SOL_SOCKET, option, _QUEUE_BYTES)
    link.bind((port, _ETH_P_ALL))
    return link


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
