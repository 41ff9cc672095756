"""Status server on rank 0 for stall and failure reports.

Ranks in trouble report the iteration that they are in, and learn which others have reported, and their iterations. An
entry comes with a report of a failure, and one rank fetches the entries, one by one. So an answer has a few bytes for
each rank, and making it costs the same however many ranks there are.

The process group's store cannot serve for this: a request to it has no time limit if its host is stopped or cut off.
Here each request is a connection of its own, which ends after a fixed time, whatever the other side does. When the
server starts, every rank tries whether it can reach it.

A request is the training's token, of fixed length, then a head of fixed length, then the entry. Nothing is read of a
connection whose token is wrong, and the server parses no entry: it keeps bytes, and the ranks parse them. An answer is
its size, then the iterations by rank, or the entry.

Thread safety: ``StatusServer`` has a thread of its own; ``ask`` may be called from any thread.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from gradcast.training.ranks.group import Group

_Answer = TypeVar("_Answer")

_TIMEOUT_S = 2.0  # of a connection, from its beginning to its end
_ACCEPTING_S = 0.05
TOKEN_BYTES = 16
_KINDS = ("stall", "failure")
_ENTRY = len(_KINDS)  # instead of a kind: the request for a rank's entry
HEAD = struct.Struct("!BIqI")  # number of the kind, rank, iteration, bytes of the entry
_SIZE = struct.Struct("!I")
_ITERATION = struct.Struct("!q")
_NOT_REPORTED = -1
# An entry of the stall watchdog is a tenth of it at most.
_ENTRY_BYTES_MAX = 64 << 10
_REPLY_BYTES_MAX = 1 << 20
_BACKLOG = 1024
# Connections that have not shown the token, beside one of each rank. The oldest is closed for one more.
_STRANGERS_MAX = 64


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """The server's address. ``token``: required in each request."""

    host: str
    port: int
    token: bytes


class StatusServer:
    """Keeps the last iteration of each rank, by kind, and its entry. REQUIRES: ``close()`` is called in the end."""

    def __init__(self, world_size: int) -> None:
        """Listens on this host's address in the network of the training only. Raises OSError."""
        host, token = _own_host(), secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = ServerAddress(host, listening.getsockname()[1], token)
        self._loop = asyncio.SelectorEventLoop()
        self._ended = self._loop.create_future()
        arguments = (self._loop, self._ended, listening, _Desk(token, world_size))
        self._thread = threading.Thread(target=_serve, args=arguments, name="gradcast-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._ended.cancel)
        self._thread.join()


class _Desk:
    """The server's connections and reports, for its thread alone. ``open``: all connections."""

    def __init__(self, token: bytes, world_size: int) -> None:
        self._token, self._world_size = token, world_size
        self._iterations = [bytearray(_ITERATION.pack(_NOT_REPORTED) * world_size) for _ in _KINDS]  # as answered
        self._entries: dict[int, bytes] = {}
        self.open: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # that have not shown the token, the oldest first

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self.open.add(task)
        self._strangers[task] = None
        if len(self._strangers) > self._world_size + _STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        try:
            await asyncio.wait_for(self._answer(task, reader, writer), _TIMEOUT_S)
        except Exception:
            pass  # whatever a stranger sends or does not send, the server goes on
        finally:
            self.open.discard(task)
            self._strangers.pop(task, None)
            writer.transport.abort()

    async def _answer(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
            return
        self._strangers.pop(task, None)
        kind, rank, iteration, size = HEAD.unpack(await reader.readexactly(HEAD.size))
        if kind > _ENTRY or rank >= self._world_size or size > _ENTRY_BYTES_MAX:
            return
        body = self._take(kind, rank, iteration, await reader.readexactly(size))
        writer.write(_SIZE.pack(len(body)) + body)
        writer.close()
        await writer.wait_closed()

    def _take(self, kind: int, rank: int, iteration: int, entry: bytes) -> bytes:
        if kind == _ENTRY:
            return self._entries.get(rank, b"")
        _ITERATION.pack_into(self._iterations[kind], rank * _ITERATION.size, iteration)
        if entry:
            self._entries[rank] = entry
        return bytes(self._iterations[kind])


def _serve(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None], listening: socket.socket, desk: _Desk) -> None:
    """The server's thread."""
    with contextlib.closing(loop), listening:
        loop.run_until_complete(_serve_until(ended, listening, desk))


async def _serve_until(ended: asyncio.Future[None], listening: socket.socket, desk: _Desk) -> None:
    server = await asyncio.start_server(desk.answer, sock=listening, backlog=_BACKLOG)
    with contextlib.suppress(asyncio.CancelledError):
        await ended
    await asyncio.sleep(_ACCEPTING_S)  # else a connection that was just accepted stays open
    server.close()
    left = list(desk.open)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def start_status_server(group: Group) -> tuple[StatusServer | None, ServerAddress | None]:
    """The server on rank 0, and its address on every rank that can reach it. Collective."""
    server: StatusServer | None = None
    found: ServerAddress | str | None = None
    if group.rank == 0:
        try:
            server = StatusServer(group.world_size)
            found = server.address
        except OSError as error:
            found = str(error)
    try:
        found = group.from_first(found)
        address = found if isinstance(found, ServerAddress) else None
        is_reached = address is not None and ask(address, "stall", group.rank, None) is not None
        without = [rank for rank, each in enumerate(group.gather(is_reached)) if not each]
    except BaseException:
        if server is not None:
            server.close()
        raise
    if without:
        why = f"which does not start: {found}" if address is None else f"at {address.host}, port {address.port}"
        group.warning(
            "%s cannot reach rank 0's status server (%s), so messages there will not say which ranks are waited for",
            group.names_of(without),
            why,
        )
    return server, address if is_reached else None


def ask(
    address: ServerAddress, kind: str, rank: int, iteration: int | None, entry: Any = None
) -> dict[int, int] | None:
    """Reports this rank's iteration, and returns by rank those that ranks have reported.

    ``kind``: "stall" or "failure". ``iteration``: None takes the last report back. ``entry``: values that JSON knows,
    for ``entry_of``; None keeps the last one. Returns None if the server does not answer in time.
    """
    text = b"" if entry is None else json.dumps(entry, ensure_ascii=False).encode(errors="replace")
    number = _NOT_REPORTED if iteration is None else iteration
    return _answer(address, HEAD.pack(_KINDS.index(kind), rank, number, len(text)) + text, _reported)


def entry_of(address: ServerAddress, rank: int) -> Any:
    """Returns the last entry of this rank; None if there is none, or if the server does not answer in time."""
    return _answer(address, HEAD.pack(_ENTRY, rank, 0, 0), json.loads)


def _answer(address: ServerAddress, request: bytes, read: Callable[[bytes], _Answer]) -> _Answer | None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    try:
        with socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(address.token + request)
            reply = _received(connection, deadline_s)
            is_whole = _SIZE.unpack_from(reply) == (len(reply) - _SIZE.size,)
            return read(reply[_SIZE.size :]) if is_whole else None
    except (OSError, ValueError, struct.error):
        return None


def _reported(iterations: bytes) -> dict[int, int]:
    by_rank = enumerate(each for (each,) in _ITERATION.iter_unpack(iterations))
    return {rank: each for rank, each in by_rank if each != _NOT_REPORTED}


def _received(connection: socket.socket, deadline_s: float) -> bytes:
    """Returns all bytes until the server has finished writing."""
    data = bytearray()
    while len(data) <= _REPLY_BYTES_MAX:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(1 << 16)
        if not part:
            return bytes(data)
        data += part
    raise ValueError("the answer is too long")


def _own_host() -> str:
    """This host's address, IPv4 or IPv6, in the network that the job uses. Raises OSError."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    failure = None
    found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    # IPv4 first: of IPv6 hosts may have addresses, and no route.
    for family, _, _, _, target in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")
