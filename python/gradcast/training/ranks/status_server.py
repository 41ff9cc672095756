"""Status server on rank 0 for stall and failure reports.

Ranks in trouble write their reports, and read those of the others. The process group's store cannot serve for this: a
request to it has no time limit if its host is stopped or cut off. Here each request is a connection of its own, which
ends after a fixed time, whatever the other side does. When the server starts, every rank tries whether it can reach it.

A request is the training's token, of fixed length, then a head of fixed length, then the entry. Nothing is read of a
connection whose token is wrong, and the server parses no entry: it keeps bytes, and the ranks parse them.

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
from typing import Any, cast

from gradcast.training.ranks.group import Group, ranks_named

_TIMEOUT_S = 2.0  # of a connection, from its beginning to its end
_ACCEPTING_S = 0.05
TOKEN_BYTES = 16
_KINDS = ("hello", "stall", "failure")
HEAD = struct.Struct("!BII")  # number of the kind, rank, bytes of the entry
# An answer is a number of entries, and each of them behind a head.
_COUNT = struct.Struct("!I")
_ENTRY_HEAD = struct.Struct("!II")  # rank, bytes
# An entry of the stall watchdog is a tenth of it at most.
_ENTRY_BYTES_MAX = 64 << 10
_REPLY_BYTES_MAX = 16 << 20
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
    """Keeps the last entry of each rank, by kind. REQUIRES: ``close()`` is called in the end."""

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
    """The server's connections and entries, for its thread alone."""

    def __init__(self, token: bytes, world_size: int) -> None:
        self._token, self._world_size = token, world_size
        self._entries: list[dict[int, bytes]] = [{} for _ in _KINDS]
        # Connections, the oldest first; whether they have shown the token.
        self.open: dict[asyncio.Task[None], bool] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self.open[task] = False
        strangers = [each for each, is_known in self.open.items() if not is_known]
        if len(strangers) > self._world_size + _STRANGERS_MAX:
            strangers[0].cancel()
        try:
            await asyncio.wait_for(self._answer(task, reader, writer), _TIMEOUT_S)
        except Exception:
            pass  # whatever a stranger sends or does not send, the server goes on
        finally:
            del self.open[task]
            writer.transport.abort()

    async def _answer(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
            return
        self.open[task] = True
        kind, rank, size = HEAD.unpack(await reader.readexactly(HEAD.size))
        if kind >= len(_KINDS) or rank >= self._world_size or size > _ENTRY_BYTES_MAX:
            return
        entry, entries = await reader.readexactly(size), self._entries[kind]
        if entry:
            entries[rank] = entry
        else:
            entries.pop(rank, None)
        parts = (_ENTRY_HEAD.pack(each, len(text)) + text for each, text in entries.items())
        writer.write(_COUNT.pack(len(entries)) + b"".join(parts))
        writer.close()
        await writer.wait_closed()


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
        is_reached = address is not None and ask(address, "hello", group.rank, None) is not None
        without = [rank for rank, each in enumerate(group.gather(is_reached)) if not each]
    except BaseException:
        if server is not None:
            server.close()
        raise
    if without:
        why = f"which does not start: {found}" if address is None else f"at {address.host}, port {address.port}"
        group.warning(
            "%s cannot reach rank 0's status server (%s), so messages there will not say which ranks are waited for",
            ranks_named(without),
            why,
        )
    return server, address if is_reached else None


def ask(address: ServerAddress, kind: str, rank: int, entry: Any) -> dict[int, Any] | None:
    """Writes this rank's entry and returns the entries of all ranks.

    ``kind``: "hello", "stall" or "failure". ``entry``: values that JSON knows; None takes the last one back. Returns
    None if the server does not answer in time.
    """
    text = b"" if entry is None else json.dumps(entry, ensure_ascii=False).encode(errors="replace")
    deadline_s = time.monotonic() + _TIMEOUT_S
    try:
        with socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(address.token + HEAD.pack(_KINDS.index(kind), rank, len(text)) + text)
            return _entries(_received(connection, deadline_s))
    except (OSError, ValueError, struct.error):
        return None


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


def _entries(reply: bytes) -> dict[int, Any]:
    """Raises ValueError or struct.error if the reply is not complete."""
    entries, at = {}, _COUNT.size
    for _ in range(*_COUNT.unpack_from(reply)):
        rank, size = _ENTRY_HEAD.unpack_from(reply, at)
        at += _ENTRY_HEAD.size
        entries[rank] = json.loads(reply[at : at + size])
        at += size
    return entries


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
