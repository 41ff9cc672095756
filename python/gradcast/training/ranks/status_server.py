"""Status server on rank 0 for stall and failure reports.

Ranks in trouble write what they see, and read what the others have written. The process group's store cannot serve for
this: a request to it has no time limit if its host is stopped or cut off. Here each request is a connection of its own,
with a timeout for each part of it. When the server starts, every rank tries whether it can reach it.

Thread safety: ``StatusServer`` has a thread of its own; ``ask`` may be called from any thread.
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
_MESSAGE_BYTES_MAX = 16 << 20
_BACKLOG = 1024


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """``token``: what a request has to show."""

    host: str
    port: int
    token: str


class StatusServer:
    """Keeps the last entry of each rank, by kind. Ends with ``close()``, or when it is garbage-collected."""

    def __init__(self) -> None:
        server = socket.create_server(("", 0), backlog=_BACKLOG)
        token = secrets.token_hex(16)
        self.address = ServerAddress(_own_host(), server.getsockname()[1], token)
        self._thread = threading.Thread(target=_serve, args=(server, token), name="gradcast-status", daemon=True)
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
    """The server's thread. It holds no reference to the StatusServer, which would keep that alive."""
    entries_by_kind: dict[str, dict[int, Any]] = {}
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_TIMEOUT_S)
            request = json.loads(_received(connection))
            if secrets.compare_digest(request["token"], token):
                entries = entries_by_kind.setdefault(request["kind"], {})
                entries[request["rank"]] = request["entry"]
                connection.sendall(json.dumps(list(entries.items())).encode())


def start_status_server(group: Group) -> tuple[StatusServer | None, ServerAddress | None]:
    """The server on rank 0, and its address on every rank that can reach it. Collective."""
    server = None
    if group.rank == 0:
        with contextlib.suppress(OSError):
            server = StatusServer()
    address = group.from_first(None if server is None else server.address)
    if address is not None and ask(address, "hello", group.rank, None) is None:
        address = None
    return server, address


def ask(address: ServerAddress, kind: str, rank: int, entry: Any) -> dict[int, Any] | None:
    """Writes this rank's entry and returns the entries of all ranks.

    ``entry``: None takes the last one back. Returns None if the server does not answer.
    """
    request = {"token": address.token, "kind": kind, "rank": rank, "entry": entry}
    try:
        with socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            entries = json.loads(_received(connection))
    except (OSError, ValueError):
        return None
    return {rank: each for rank, each in entries if each is not None}


def _received(connection: socket.socket) -> bytes:
    """Everything until the other side has finished writing."""
    parts: list[bytes] = []
    size = 0
    while part := connection.recv(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MESSAGE_BYTES_MAX:
            raise ValueError("the message is too long")
    return b"".join(parts)


def _own_host() -> str:
    """This host's address in the network that the job uses."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, target = socket.getaddrinfo(host, 1, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0]
