"""The status server against strangers who reach its port, by raw sockets: none ends it, holds it up, or is listened to
without the training's token."""

import contextlib
import json
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from training.attached import Attached
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks
from training.threads import threads_named

pytest.importorskip("training.needs")
from gradcast.training.ranks import stall_watchdog, status_server
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.stall_watchdog import StallWatchdog
from gradcast.training.ranks.status_server import ServerAddress, StatusServer, ask, entry_of

LIMIT_S = 20.0  # of what a test waits for


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    made = StatusServer(2)
    yield made
    made.close()


def connected(address: ServerAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=LIMIT_S)


def until_closed(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            said += part
    return said


def head(kind=0, rank=0, iteration=7, size=0) -> bytes:
    return status_server.HEAD.pack(kind, rank, iteration, size)


def test_reports_are_kept_by_kind_and_rank(server):
    """And taken back."""
    asked = [("stall", 1, 5), ("stall", 0, 2**40), ("failure", 0, 0), ("stall", 1, None), ("stall", 0, 6)]
    answers = [ask(server.address, *each) for each in asked]
    assert answers == [{1: 5}, {0: 2**40, 1: 5}, {0: 0}, {0: 2**40}, {0: 6}]


def test_an_entry_is_kept_until_there_is_another(server):
    assert entry_of(server.address, 1) is None
    for entry, kept in (({"at": "ü"}, {"at": "ü"}), (None, {"at": "ü"}), ([2], [2])):
        assert ask(server.address, "failure", 1, 5, entry) == {1: 5}
        assert entry_of(server.address, 1) == kept
    assert entry_of(server.address, 0) is None


def test_it_listens_on_the_advertised_address_only(server):
    """All of 127.0.0.0/8 leads to this host."""
    assert server.address.host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address.port), timeout=LIMIT_S)


def test_a_host_with_ipv6_only(monkeypatch):
    """Rank 0 was said to have ended."""
    if not socket.has_ipv6 or not has_ipv6_loopback():
        pytest.skip("this host has no ::1")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    with contextlib.closing(StatusServer(2)) as server:
        assert server.address.host == "::1"
        assert ask(server.address, "stall", 1, 3) == {1: 3}


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


FROM_STRANGERS = {
    "nested JSON": b"[" * 200_000,
    "an empty object": b"{}",
    "a token of JSON": b'{"token": "x", "kind": "stall", "rank": 0, "entry": 1}',
    "another token": bytes(16) + head(size=1) + b"1",
    "nothing": b"",
    "a part of a token": b"abc",
    "the head alone": head(),
}
WITH_TOKEN = {
    "another kind": head(kind=3),
    "another rank": head(rank=2),
    "a large entry": head(size=(64 << 10) + 1),
    "a huge entry": head(size=(1 << 32) - 1),
    "less than it says": head(size=10) + b"1",
    "no head": b"",
}


@pytest.mark.parametrize(
    "sent",
    [*((False, name) for name in FROM_STRANGERS), *((True, name) for name in WITH_TOKEN)],
    ids=lambda sent: sent[1],
)
def test_what_is_no_request_changes_nothing(server, sent):
    knows_token, name = sent
    assert ask(server.address, "stall", 1, 3) == {1: 3}
    with connected(server.address) as connection:
        message = server.address.token + WITH_TOKEN[name] if knows_token else FROM_STRANGERS[name]
        with contextlib.suppress(OSError):  # closed: a broken pipe, a reset, or no longer connected
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
        assert until_closed(connection) == b""
    assert ask(server.address, "stall", 0, None) == {1: 3}


def test_a_connection_is_closed_before_16_mb_of_it_are_read(server):
    """They held rank 0's training thread for a second."""
    with connected(server.address) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"{},[" * (4 << 20))


def test_a_byte_now_and_then_does_not_keep_a_connection_open(server, monkeypatch):
    monkeypatch.setattr(status_server, "_TIMEOUT_S", 0.3)
    sent, closed = 0, threading.Event()
    with connected(server.address) as connection:
        connection.settimeout(0.5)
        while sent < status_server.TOKEN_BYTES and not closed.is_set():
            with contextlib.suppress(TimeoutError):
                connection.sendall(b"x")
                sent += 1
                if connection.recv(1) == b"":
                    closed.set()
    assert closed.is_set()
    assert sent < status_server.TOKEN_BYTES


@pytest.mark.parametrize("count", [1, 200])
def test_silent_connections_delay_nobody(server, count):
    """More of them than the server keeps open, too."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connected(server.address)).sendall(b"x")
        assert ask(server.address, "stall", 1, 3) == {1: 3}


def test_a_rank_that_does_not_read_its_answer_delays_nobody(server):
    """Its answer is larger than what the system keeps for it."""
    ask(server.address, "failure", 0, 5, "x" * 60_000)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            slow = stack.enter_context(connected(server.address))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.sendall(server.address.token + head(kind=2))
        assert ask(server.address, "stall", 1, 3) == {1: 3}


class BusyEngine:
    """The entry of a rank whose records of its last iterations take 10 KB."""

    def __init__(self, rank):
        self._rank = rank

    def counters(self):
        return SimpleNamespace(iterations=100 + self._rank % 2)

    def waiting_for(self):
        return "block 3 of 64 " + "x" * 2000

    def timeline(self):
        blocks = [SimpleNamespace(ready_ns=123_456, launch_ns=234_567, finish_ns=345_678)] * 64
        return 2 * [SimpleNamespace(iteration=100, plan_version=1, ready_ns=[1] * 64, blocks=blocks)]


def test_512_ranks_that_fail_at_once_all_hear_of_each_other(monkeypatch, tmp_path):
    """One answer had the entries of all ranks: 5 MB for each of 512, ten times a second."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(status_server, "_TIMEOUT_S", LIMIT_S)  # 512 threads of one process are slower than 512 ranks
    monkeypatch.setattr(stall_watchdog, "_LISTEN_S", 2 * LIMIT_S)
    count, said, answers = 512, {}, []
    received = status_server._received
    monkeypatch.setattr(status_server, "_received", lambda *given: answers.append(received(*given)) or answers[-1])

    def fail(rank):
        group = Group(rank, count)
        watch = StallWatchdog(group, gradcast.Options(watch=gradcast.Watch(dump_dir=str(tmp_path))), BusyEngine(rank))
        said[rank] = str(watch.explain(gradcast.Error("the cable is gone " * 200, "communication")))
        watch.close()

    with contextlib.closing(StatusServer(count)) as server:
        monkeypatch.setattr(stall_watchdog, "start_status_server", lambda _group: (None, server.address))
        threads = [threading.Thread(target=fail, args=[rank]) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * LIMIT_S)
    assert len(said) == count
    assert [rank for rank, text in said.items() if "does not respond" in text or "has never reached" in text] == []
    (path,) = tmp_path.iterdir()
    assert said[0].endswith(f"are in {path}")
    events = json.loads(path.read_text())["ranks"]
    assert len(events) == count
    assert min(len(json.dumps(each)) for each in events.values()) > 9_000
    assert max(map(len, answers)) < 20_000


def test_a_server_that_says_nothing_is_not_waited_for_long(monkeypatch):
    """Nor one that sends a byte now and then."""
    monkeypatch.setattr(status_server, "_TIMEOUT_S", 0.3)
    ended = threading.Event()

    def drip():
        with listening.accept()[0] as connection, contextlib.suppress(OSError):
            while not ended.wait(0.1):
                connection.sendall(b"\0")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        address = ServerAddress("127.0.0.1", listening.getsockname()[1], bytes(16))
        assert ask(address, "stall", 0, None) is None
        ended.set()
        thread.join(LIMIT_S)


@pytest.mark.parametrize("reply", [b"", b"\0\0\0", b"\0\0\0\x08" + bytes(7), b"\0\0\0\x07" + bytes(7), b"\xff" * 100])
def test_an_answer_that_is_cut_off_is_none(reply):
    def answer():
        with listening.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        assert ask(ServerAddress("127.0.0.1", listening.getsockname()[1], bytes(16)), "stall", 0, 5) is None
        thread.join(LIMIT_S)


def test_it_ends_whatever_is_connected(server):
    with connected(server.address) as connection:
        connection.sendall(server.address.token)
        server.close()
        assert threads_named("gradcast-status") == []
        assert until_closed(connection) == b""
    server.close()


@on_ranks(2)
def test_strangers_do_not_disturb_a_training(rank):
    """Rank 1 attacks while both train and report; afterwards the server is as it was."""
    attached = Attached(torch.nn.Linear(3, 3))
    watch = session_of(attached.handle).exchange.watch
    with contextlib.ExitStack() as stack:
        for number in range(4):
            for message in FROM_STRANGERS.values() if rank.index else ():
                connection = stack.enter_context(connected(watch.address))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(message)
            attached.step(torch.ones(2, 3))
            answer = ask(watch.address, "stall", rank.index, number)
            assert answer[rank.index] == number
    ask(watch.address, "stall", rank.index, None)
    rank.gather("done", None)
    answer = ask(watch.address, "stall", rank.index, None)
    rank.gather("asked", None)  # the server ends with rank 0's training
    return [] if answer == {} else [answer]


@on_ranks(2)
def test_ranks_that_cannot_reach_the_server_are_named(rank):
    """Once, when training begins; and no message says that rank 0 has ended."""
    log = mock.patch("gradcast.training.ranks.group._log.warning")
    with mock.patch.object(status_server, "_own_host", side_effect=OSError("no such network")), log as warning:
        attached = Attached(torch.nn.Linear(3, 3))
    said = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    watch = session_of(attached.handle).exchange.watch
    assert "has never reached" in watch._unknown("wait")
    expected = "ranks 0 and 1 cannot reach rank 0's status server (which does not start: no such network), so messages"
    return [] if rank.index or [text.startswith(expected) for text in said] == [True] else said
