"""What the kernel counts of connections: of real ones on loopback, and which ranks they join."""

import contextlib
import os
import socket
import time
from unittest import mock

import pytest

pytest.importorskip("training.needs")
from gradcast.training.measure import tcp_counters
from gradcast.training.measure.tcp_counters import Carried

BYTES = 300_000


@contextlib.contextmanager
def connection(host="127.0.0.1"):
    """Both ends, which do not block, as Gloo's."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        one = socket.create_connection(server.getsockname()[:2])
        other, _ = server.accept()
    with one, other:
        for each in (one, other):
            each.setblocking(False)
        yield one, other


def ends(one):
    return one.getsockname()[:2], one.getpeername()[:2]


def send(one, other, size):
    """Until the other end has acknowledged everything."""
    unsent, missing = size, size
    before = tcp_counters.read()[ends(one)].sent_bytes
    deadline_s = time.monotonic() + 10
    while (missing or tcp_counters.read()[ends(one)].sent_bytes < before + size) and time.monotonic() < deadline_s:
        with contextlib.suppress(BlockingIOError):
            unsent -= one.send(bytes(min(unsent, 1 << 16))) if unsent else 0
        with contextlib.suppress(BlockingIOError):
            missing -= len(other.recv(1 << 20)) if missing else 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_a_connection_has_sent(host):
    with connection(host) as (one, other):
        send(one, other, 1000)
        before = tcp_counters.read()
        send(one, other, BYTES)
        now = tcp_counters.since(before)
        assert now[ends(one)].sent_bytes == now[ends(other)].received_bytes == BYTES
        assert now[ends(one)].sending_s >= 0
        assert now[ends(one)].received_bytes == now[ends(other)].sent_bytes == 0
        assert not one.getblocking()
        assert not other.getblocking()


def test_what_does_not_tell_is_left_out():
    with connection() as (one, other), socket.socketpair()[0] as unix, socket.socket() as alone:
        before = tcp_counters.read()
        for each in (unix, alone):
            each.setblocking(False)
        other.setblocking(True)
        found = tcp_counters.read()
        assert other.getblocking()
        assert ends(one) in found
        assert ends(other) not in found
        assert found.keys() <= before.keys()
        one.close()
        assert ends(other) not in tcp_counters.since(before)


def test_a_socket_that_cannot_be_opened_leaves_nothing_open():
    with connection() as (one, _), mock.patch.object(tcp_counters.os, "dup", wraps=os.dup) as dup:
        open_before = set(os.listdir("/proc/self/fd"))
        with mock.patch.object(tcp_counters.socket, "socket", side_effect=OSError):
            assert tcp_counters.read() == {}
        assert dup.called
        assert set(os.listdir("/proc/self/fd")) == open_before
        assert ends(one) in tcp_counters.read()


def test_only_the_busiest_connections_are_told_of():
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connection()) for _ in range(20)]
        one, other = stack.enter_context(connection())
        before = tcp_counters.read()
        assert len(before) >= 42
        send(one, other, BYTES)
        send(*idle[0], BYTES // 100)
        found = tcp_counters.since(before)
        assert len(found) == 32
        assert list(found)[-2:] in ([ends(one), ends(other)], [ends(other), ends(one)])


def test_connections_are_between_the_ranks_that_have_their_ends():
    a, b, c, store = (("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.2", 3), ("10.0.0.9", 9))
    sent = [Carried(number, 0, number / 10) for number in range(5)]
    ranks = [{(a, b): sent[0], (a, store): sent[1]}, {(b, a): sent[2]}, {(c, store): sent[3]}]
    assert tcp_counters.between_ranks(ranks) == [(0, 1, sent[0]), (1, 0, sent[2])]
