"""A board on rank 0 on which ranks in trouble write what they see, and read what the others have written.

Not the process group's store: asking it cannot be bounded in time when its host is stopped or cut off. Here every rank
opens a connection for one question, with a timeout for each step of it. Whether the board can be reached at all is
tried when it is made.

Thread safety: ``Board`` has a thread of its own; ``ask`` may be called from any.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import threading
import weakref
from typing import Any

from gradcast.training.ranks.group import Group

_TIMEOUT_S = 2.0
_LONGEST_BYTES = 16 << 20
_BACKLOG = 1024


@dataclasses.dataclass(frozen=True)
class Address:
    """Where the board is, and what a writer has to show."""

    host: str
    port: int
    token: str


class StatusServer:
    """Entries by kind and rank; the last one of a rank counts. Ends with ``close()``, or when nobody holds it."""

    def __init__(self) -> None:
        server = socket.create_server(("", 0), backlog=_BACKLOG)
        token = secrets.token_hex(16)
        self.address = Address(_own_host(), server.getsockname()[1], token)
        self._thread = threading.Thread(target=_serve, args=(server, token), name="gradcast-board", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _close, server)

    def close(self) -> None:
        self._end()
        self._thread.join()


def _close(server: socket.socket) -> None:
    # Wakes the thread that waits in accept().
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def _serve(server: socket.socket, token: str) -> None:
    """The thread. It does not keep the board alive."""
    boards: dict[str, dict[int, Any]] = {}
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_TIMEOUT_S)
            question = json.loads(_received(connection))
            if secrets.compare_digest(question["token"], token):
                entries = boards.setdefault(question["kind"], {})
                entries[question["rank"]] = question["entry"]
                connection.sendall(json.dumps(list(entries.items())).encode())


def open_board(group: Group) -> tuple[StatusServer | None, Address | None]:
    """Rank 0's board and, where this rank can reach it, its address. Collective."""
    board = None
    if group.rank == 0:
        with contextlib.suppress(OSError):
            board = StatusServer()
    address = group.from_first(None if board is None else board.address)
    if address is not None and ask(address, "hello", group.rank, None) is None:
        address = None
    return board, address


def ask(address: Address, kind: str, rank: int, entry: Any) -> dict[int, Any] | None:
    """Writes this rank's entry, None to take it back; returns everybody's. None where the board does not answer."""
    question = {"token": address.token, "kind": kind, "rank": rank, "entry": entry}
    try:
        with socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(json.dumps(question).encode())
            connection.shutdown(socket.SHUT_WR)
            entries = json.loads(_received(connection))
    except (OSError, ValueError):
        return None
    return {rank: said for rank, said in entries if said is not None}


def _received(connection: socket.socket) -> bytes:
    """Everything up to the end that the other side makes."""
    parts: list[bytes] = []
    size = 0
    while part := connection.recv(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _LONGEST_BYTES:
            raise ValueError("too long")
    return b"".join(parts)


def _own_host() -> str:
    """This host's address in the network that the job uses."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, target = socket.getaddrinfo(host, 1, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]
