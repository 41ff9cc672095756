"""Raw TCP between two ranks: the network without Gloo.

One rank listens and the other connects. The order of the measurements decides who sends. Every wait has a timeout,
and an error names the rank that this rank waited for. Connections send the pair's token first, so that strangers'
connections, and those of a pair that was given up but still waits to be accepted, are not measured.

Thread safety: each call uses threads of its own and joins them; a ``Listener`` is for one thread.
"""

import contextlib
import dataclasses
import hmac
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from gradcast.diagnosis.network.interfaces import chosen, interfaces, is_link_local
from gradcast.errors import Error

# Timeout of one wait. A host that responds does so within milliseconds; TCP's first two retransmissions take 3 s.
TIMEOUT_S = 8.0
TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sd")
_CHUNK_BYTES = 256 << 10
# Over all streams of a measurement: a quarter of a second at 100 Gbit/s.
_BYTES_MAX = 3 << 30
# Limit of unsent bytes in the kernel: enough for any link, and drained soon on a slow one.
_UNSENT_BYTES = 64 << 10
_ROUND_TRIPS = 30
_ROUND_TRIPS_S = 0.2
# TCP doubles its window in each round trip, so a distant host needs a longer measurement.
_ROUND_TRIPS_PER_MEASUREMENT = 30
_MEASUREMENT_S_MAX = 2.0
# Which part of the sending time counts. Before it TCP is still probing for bandwidth; after it some of several streams
# have ended.
_COUNTED_FROM, _COUNTED_TO = 0.4, 0.9

# The time in seconds, and how many bytes have arrived since the record before.
Record = tuple[float, int]
ListenAddress = tuple[str, int]  # host and port


@dataclasses.dataclass(frozen=True)
class ReceivedRates:
    """Rates at which one side received. ``latency_us`` is one way; only the connecting side measures it."""

    one_bits_per_s: float
    several_bits_per_s: float
    latency_us: float | None = None


def pair_token(session: bytes, pair: tuple[int, int]) -> bytes:
    """Returns the token of a pair. ``session`` is a secret of the training.

    A pair is measured once over a listener, and both sides take its connections in the same order, so connections of
    other measurements have other tokens.
    """
    return hmac.digest(session, repr(pair).encode(), "sha256")[:TOKEN_BYTES]


class Listener:
    """Accepts the connections of pairs, one pair after the other. REQUIRES: ``close()`` is called in the end."""

    def __init__(self, host: str, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        try:
            # Resolved first, because only that understands a scope.
            family, *_, address = socket.getaddrinfo(_with_scope(host), 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(address, family=family, backlog=64)
        except OSError as error:
            raise Error(f"cannot listen on {host}: {error.strerror or error}", "communication") from None
        self.address: ListenAddress = (host, self._socket.getsockname()[1])

    @contextlib.contextmanager
    def accepted(self, token: bytes, count: int, whom: str) -> Iterator[tuple[Sequence[socket.socket], float]]:
        """Accepts ``count`` connections that send ``token``. Yields them and the seconds that the others measure."""
        timeout_s = self._timeout_s or TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        connections: list[socket.socket] = []
        seconds = 0.0
        with _closed(connections):
            with _naming(whom, f"waited {timeout_s:g} s for connections"):
                while len(connections) < count:
                    self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                    connections.append(self._socket.accept()[0])
                    # At most half of the remaining time: a stranger cannot use up all of it.
                    within_s = (deadline - time.monotonic()) / 2
                    if (wanted_s := _read_hello(connections[-1], token, within_s)) is None:
                        connections.pop().close()
                    else:
                        seconds = wanted_s
                        _prepared(connections[-1])
            yield connections, seconds

    def close(self) -> None:
        self._socket.close()


def _read_hello(connection: socket.socket, token: bytes, within_s: float) -> float | None:
    """Returns the seconds that the other side measures; None if the connection is not of this measurement."""
    try:
        shown, seconds = _HELLO.unpack(_exactly(connection, _HELLO.size, time.monotonic() + within_s))
    except (OSError, struct.error):
        return None
    return min(seconds, _MEASUREMENT_S_MAX) if hmac.compare_digest(shown, token) else None


def long_enough_s(seconds: float, round_trip_s: float) -> float:
    return min(max(seconds, _ROUND_TRIPS_PER_MEASUREMENT * round_trip_s), _MEASUREMENT_S_MAX)


def measure(address: ListenAddress, token: bytes, *, streams: int, seconds: float, whom: str) -> ReceivedRates:
    """Measures a pair from the connecting side; the other side calls ``answer``. Raises Error.

    Each of four measurements takes about ``seconds``, or longer on a network with a high latency.
    """
    with connected(address, token, 1, 0.0, whom) as connections, _naming(whom, "small messages"):
        round_trip_s = _round_trip_s(connections[0])
    seconds = long_enough_s(seconds, round_trip_s)
    received = []
    for count in (1, streams):
        with connected(address, token, count, seconds, whom) as connections:
            send_for(connections, seconds, whom)
        with connected(address, token, count, seconds, whom) as connections:
            received.append(_received_bits_per_s(connections, seconds, whom))
    return ReceivedRates(received[0], received[1], round_trip_s / 2 * 1e6)


def answer(listener: Listener, token: bytes, *, streams: int, whom: str) -> ReceivedRates:
    """Measures a pair from the listening side. Raises Error."""
    with listener.accepted(token, 1, whom) as (connections, _), _naming(whom, "small messages"):
        echo(connections[0])
    received = []
    for count in (1, streams):
        with listener.accepted(token, count, whom) as (connections, seconds):
            received.append(_received_bits_per_s(connections, seconds, whom))
        with listener.accepted(token, count, whom) as (connections, seconds):
            send_for(connections, seconds, whom)
    return ReceivedRates(received[0], received[1])


def measure_one_way(
    address: ListenAddress, token: bytes, seconds: float, whom: str, timeout_s: float | None = None
) -> None:
    """Sends over one stream; ``answer_one_way`` returns the rate. ``timeout_s`` is that of the connection."""
    with connected(address, token, 1, seconds, whom, timeout_s) as connections:
        send_for(connections, seconds, whom)


def answer_one_way(listener: Listener, token: bytes, whom: str) -> float:
    with listener.accepted(token, 1, whom) as (connections, seconds):
        return _received_bits_per_s(connections, seconds, whom)


# --- Connections ---


def _with_scope(host: str) -> str:
    """Appends the interface to a link-local address; its name may differ between hosts."""
    return f"{host}%{chosen(interfaces()).interface}" if is_link_local(host) else host


def _prepared(connection: socket.socket) -> socket.socket:
    connection.settimeout(TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return connection


@contextlib.contextmanager
def connected(
    address: ListenAddress, token: bytes, count: int, seconds: float, whom: str, timeout_s: float | None = None
) -> Iterator[Sequence[socket.socket]]:
    connections: list[socket.socket] = []
    with _closed(connections):
        host, port = address
        with _naming(whom, f"cannot connect to {host}, port {port}"):
            for _ in range(count):
                connections.append(socket.create_connection((_with_scope(host), port), timeout_s or TIMEOUT_S))
                _prepared(connections[-1]).sendall(_HELLO.pack(token, seconds))
        yield connections


@contextlib.contextmanager
def _closed(connections: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for connection in connections:
            connection.close()


@contextlib.contextmanager
def _naming(whom: str, what: str) -> Iterator[None]:
    """Turns OSErrors into an Error that names the rank this rank waited for."""
    try:
        yield
    except OSError as error:
        reason = "no response" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise Error(f"raw TCP with {whom}: {what}: {reason}", "communication") from None


# --- What goes over them ---


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Reads ``size`` bytes, or fewer if the other side closes the connection. ``deadline``: for all of them."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connection.recv(size - len(data))):
            break
        data += part
    return data


def _round_trip_s(connection: socket.socket) -> float:
    """Returns the median round trip; the first one wakes the other side and does not count."""
    times = []
    start = time.perf_counter()
    for _ in range(_ROUND_TRIPS):
        before = time.perf_counter()
        connection.sendall(b"?")
        if not connection.recv(1):
            raise ConnectionResetError("the other side closed the connection")
        times.append(time.perf_counter() - before)
        if time.perf_counter() - start > _ROUND_TRIPS_S and len(times) > 2:
            break
    return statistics.median(times[1:])


def echo(connection: socket.socket) -> None:
    while data := connection.recv(1):
        connection.sendall(data)


def send_for(connections: Sequence[socket.socket], seconds: float, whom: str) -> None:
    """Sends for ``seconds``, then waits until all has arrived: the next measurement needs an idle network."""
    share_bytes = _BYTES_MAX // len(connections)

    def send(connection: socket.socket) -> None:
        data = memoryview(bytes(_CHUNK_BYTES))
        left = share_bytes
        deadline = time.perf_counter() + seconds  # counted from here, because on a busy machine a thread may start late
        while left > 0 and time.perf_counter() < deadline:
            left -= connection.send(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)

    with _naming(whom, "sending"):
        _on_each(connections, send)


def _received_bits_per_s(connections: Sequence[socket.socket], seconds: float, whom: str) -> float:
    deadline = time.perf_counter() + seconds + TIMEOUT_S

    def receive(connection: socket.socket) -> list[Record]:
        buffer = bytearray(_CHUNK_BYTES)
        records = []
        while (size := connection.recv_into(buffer)) and time.perf_counter() < deadline:
            records.append((time.perf_counter(), size))
        return records

    with _naming(whom, "receiving"):
        return bits_per_s(_on_each(connections, receive), seconds)


def bits_per_s(streams: Sequence[Sequence[Record]], seconds: float) -> float:
    """Returns the rate of all streams together; 0 if too little arrived. Bytes after ``seconds`` do not count. Pure."""
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


def _on_each(connections: Sequence[socket.socket], work: Callable) -> list:
    """Runs one thread per stream: the kernel copies without the GIL, on one core per thread."""
    with ThreadPoolExecutor(len(connections), thread_name_prefix="gradcast-tcp") as threads:
        return list(threads.map(work, connections))
