"""The network check on real sockets and real workers: it measures the links' rates, names the slow host, and ends if a
peer does not respond.

Tests with several hosts need root and Linux, and are skipped elsewhere; the others run on loopback. The only times that
are checked are rates that the lab shapes.
"""

import contextlib
import functools
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from conftest import lab_network
from gradcast.diagnosis.network import interfaces, tcp
from gradcast.errors import Error
from gradcast.lab import run_workers

TOKEN = b"0123456789abcdef"
WAIT_S = 60
SECONDS = 0.2


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request):
    try:
        made = tcp.Listener(request.param)
    except Error as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    yield made
    made.close()


class InThread(threading.Thread):
    """Runs a function in a thread; ``result()`` returns what it returned, or its Error."""

    def __init__(self, function, *arguments, **keywords):
        super().__init__(daemon=True)
        self._call = functools.partial(function, *arguments, **keywords)
        self.start()

    def run(self):
        try:
            self._found = self._call()
        except Error as error:
            self._found = error

    def result(self):
        self.join(WAIT_S)
        assert not self.is_alive(), "it hangs"
        return self._found


# --- Raw TCP ---


def test_both_sides_find_rates_and_one_the_latency(listener):
    answering = InThread(tcp.answer, listener, TOKEN, streams=3, whom="rank 1")
    measured = tcp.measure(listener.address, TOKEN, streams=3, seconds=SECONDS, whom="rank 0")
    answered = answering.result()
    assert measured.latency_us > 0
    assert answered.latency_us is None
    for found in (measured, answered):
        assert found.one_bits_per_s > 0
        assert found.several_bits_per_s > 0


def test_the_latency_is_half_a_round_trip_in_microseconds(listener, monkeypatch):
    def late_echo(connection):
        while data := connection.recv(1):
            time.sleep(0.02)
            connection.sendall(data)

    monkeypatch.setattr(tcp, "echo", late_echo)
    InThread(tcp.answer, listener, TOKEN, streams=1, whom="rank 1")
    measured = tcp.measure(listener.address, TOKEN, streams=1, seconds=0.05, whom="rank 0")
    assert 10e3 <= measured.latency_us < 1e6


def test_who_sends_waits_until_all_has_been_received():
    sending_end, receiving_end = socket.socketpair()
    sending = InThread(tcp.send_for, [sending_end], 0.05, "rank 1")
    while receiving_end.recv(1 << 20):
        pass
    sending.join(0.3)
    assert sending.is_alive()
    receiving_end.close()
    sending.result()
    sending_end.close()


def test_a_link_local_address_is_reached_through_its_interface(monkeypatch):
    known = [(each.name, address) for each in interfaces.interfaces() for address in each.addresses]
    name, address = next((each for each in known if interfaces.is_link_local(each[1])), (None, None))
    if name is None:
        pytest.skip("no interface of this machine has a link-local address")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    with contextlib.closing(tcp.Listener(address)) as made:
        answering = InThread(tcp.answer_one_way, made, TOKEN, "rank 1")
        tcp.measure_one_way(made.address, TOKEN, 0.05, "rank 0")
        assert answering.result() > 0


def test_connections_of_others_are_not_measured_and_do_not_take_all_the_time(listener, monkeypatch):
    """Two say nothing, one is a stranger's, and one is of a pair that was given up."""
    monkeypatch.setattr(tcp, "TIMEOUT_S", 3.0)
    late, next_one = (tcp.pair_token(TOKEN, (0, other)) for other in (1, 2))
    with contextlib.ExitStack() as stack:
        _, _, stranger = (stack.enter_context(socket.create_connection(listener.address)) for _ in range(3))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: anybody.example\r\n\r\n")
        stack.enter_context(tcp.connected(listener.address, late, 1, SECONDS, "rank 0"))
        answering = InThread(tcp.answer_one_way, listener, next_one, "rank 2")
        tcp.measure_one_way(listener.address, next_one, SECONDS, "rank 0")
        assert answering.result() > 0


def test_a_stranger_that_sends_a_byte_now_and_then_is_left(listener, monkeypatch):
    monkeypatch.setattr(tcp, "TIMEOUT_S", 2.0)
    ended = threading.Event()

    def drip(connection):
        with contextlib.suppress(OSError):
            while not ended.wait(0.2):
                connection.sendall(b"x")

    with socket.create_connection(listener.address) as stranger:
        dripping = InThread(drip, stranger)
        answering = InThread(tcp.answer_one_way, listener, TOKEN, "rank 2")
        tcp.measure_one_way(listener.address, TOKEN, SECONDS, "rank 0")
        assert answering.result() > 0
        ended.set()
        dripping.result()


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (lambda end: tcp.answer(end, TOKEN, streams=2, whom="rank 7"), "waited 0.3 s for connections"),
        # The kernel accepts, and nobody answers.
        (lambda end: tcp.measure(end.address, TOKEN, streams=2, seconds=SECONDS, whom="rank 7"), "small messages"),
    ],
)
def test_who_never_comes_or_says_nothing_is_named(listener, monkeypatch, measure, words):
    monkeypatch.setattr(tcp, "TIMEOUT_S", 0.3)
    with pytest.raises(Error, match=f"raw TCP with rank 7: {words}: no response"):
        measure(listener)


def test_who_does_not_listen_is_named(listener):
    host, port = listener.address
    listener.close()
    with pytest.raises(Error, match=rf"raw TCP with rank 7: cannot connect to {host}, port {port}"):
        tcp.measure((host, port), TOKEN, streams=2, seconds=SECONDS, whom="rank 7")


def test_who_goes_in_the_middle_is_named(listener, monkeypatch):
    monkeypatch.setattr(tcp, "TIMEOUT_S", 2.0)

    def answer_and_go():
        with listener.accepted(TOKEN, 1, "rank 1") as (connections, _):
            tcp.echo(connections[0])
        with listener.accepted(TOKEN, 1, "rank 1") as (connections, _):
            connections[0].recv(1000)  # closed with data unread: a reset

    going = InThread(answer_and_go)
    with pytest.raises(Error, match=r"raw TCP with rank 7: sending"):
        tcp.measure(listener.address, TOKEN, streams=2, seconds=1.0, whom="rank 7")
    going.result()


def test_an_address_that_is_not_this_hosts_is_refused():
    with pytest.raises(Error, match=r"cannot listen on 192\.0\.2\.77"):
        tcp.Listener("192.0.2.77")


# --- The command without workers ---


def test_without_workers_the_command_says_how_to_start_it(run, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = run("network")
    assert result.code == 2
    assert "there are no workers to measure between" in result.err
    assert "torchrun" in result.err


# --- The whole check ---


def printed(arguments, worker_count, network=None):
    """Returns what rank 0 prints."""
    pytest.importorskip("torch")
    with tempfile.TemporaryFile("w+") as file:
        run_workers(arguments, worker_count, timeout_s=WAIT_S, network=network, output=file)
        file.seek(0)
        return file.read()


def checked(worker_count, *, network=None, seconds=2):
    arguments = ["-m", "gradcast", "network", "--json", "--duration", f"{seconds}s"]
    return json.loads(printed(arguments, worker_count, network))


@pytest.mark.slow
def test_on_one_host_there_are_numbers_and_no_findings():
    found = checked(3)
    assert found["interfaces"] == ["lo"] * 3
    assert found["findings"] == []
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["streams"]) == (0, 1, 4)
    for key in ("latency_ms", "tcp_gbit_per_s", "tcp_streams_gbit_per_s", "gloo_gbit_per_s", "beta_ns_per_byte"):
        assert pair[key] > 0
    assert pair["alpha_ms"] >= 0
    assert found["alternatives"] == []
    collective = found["collective"]
    sizes = [sample["bytes"] for sample in collective["samples"]]
    assert sizes == [1024 * 4**power for power in range(len(sizes))]
    assert len(sizes) >= 4
    assert collective["op"] == "all_reduce"
    assert collective["alpha_ms"] >= 0
    assert collective["fit_error"] >= 0


GONE = """
import os, time, torch, torch.distributed as dist
from gradcast.diagnosis.network import check
from gradcast.errors import Error
from gradcast.training.ranks.group import make_group
check._TIMEOUT_S = 2.0
dist.init_process_group("gloo")
group = make_group(None, torch.device("cpu"), None)
if os.environ["RANK"] == "2":
    dist.new_group(ranks=[0, 1, 2], backend="gloo", use_local_synchronization=True)  # as the check does; then no more
    time.sleep(6)
    os._exit(0)
try:
    check.check(group)
except Error as error:
    if os.environ["RANK"] == "0":
        print(error, flush=True)
    os._exit(0)
os._exit(1)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_take_part_is_named():
    said = printed(["-c", GONE], 3)
    assert said.startswith("network check: not all ranks have arrived; on rank 0: ")
    assert "Ranks 2 failed" in said


# --- In the lab ---


def made_network(*rates_bits_per_s):
    network = lab_network(len(rates_bits_per_s), rates_bits_per_s[0])
    for host, rate in enumerate(rates_bits_per_s):
        network.set_rate(host, rate)
    return network


@pytest.mark.slow
def test_rates_are_those_of_the_links_and_the_slow_host_is_found():
    rates = (100e6, 100e6, 30e6)
    with made_network(*rates) as network:
        found = checked(3, network=network, seconds=4)
    assert found["interfaces"] == ["eth0"] * 3
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    for pair in found["pairs"]:
        link = min(rates[pair["a"]], rates[pair["b"]]) / 1e9
        # Never more than the link carries; less where the cores have other things to do.
        for rate in ("tcp_gbit_per_s", "tcp_streams_gbit_per_s"):
            assert 0.5 * link < pair[rate] < 1.1 * link
        assert 0 < pair["gloo_gbit_per_s"] < 1.2 * link
        assert pair["beta_ns_per_byte"] > 8 / (1.2 * link)
    (slow,) = (finding for finding in found["findings"] if finding["key"] == "slow_host")
    assert "(10.77.0.3) reaches" in slow["sentence"]
    # The slowest link carries 4/3 of the bytes of an all-reduce.
    assert 0.4 * 30e-3 < found["collective"]["bus_gbit_per_s"] < 1.2 * 30e-3


def run_ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def add_interface(network, name, *addresses):
    """Connects the hosts by another, unthrottled link, on which each has the address of its place."""
    hosts = [network.command(host, [])[3] for host in range(len(addresses))]
    run_ip("link", "add", "name", name, "netns", hosts[0], "type", "veth", "peer", "name", name, "netns", hosts[1])
    for host, address in zip(hosts, addresses, strict=True):
        run_ip("-n", host, "address", "add", address, "dev", name, "nodad")
        run_ip("-n", host, "link", "set", name, "up")


ADDRESSES = (
    "from gradcast.diagnosis.network import interfaces; print([each.addresses for each in interfaces.interfaces()])"
)


@pytest.mark.slow
def test_a_faster_interface_is_found_if_it_connects_the_hosts_and_a_pair_has_the_rate_of_its_slower_direction():
    with made_network(100e6, 100e6) as network:
        network.limit_device(network.switch_name, "host1", 20e6)  # what it receives alone
        add_interface(network, "eth1", "10.78.0.1/24", "10.78.0.2/24")
        add_interface(network, "eth2", "10.79.0.1/24", "10.99.0.1/24")  # of different networks
        add_interface(network, "eth3", "fe80::1/64", "fe80::2/64")  # only link-local, which every interface has
        run_ip("-n", network.command(0, [])[3], "address", "add", "10.77.0.99/24", "dev", "eth0")
        command = network.command(0, [sys.executable, "-c", ADDRESSES])
        known = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = checked(2, network=network, seconds=2)
    assert "'10.77.0.1', '10.77.0.99'" in known, "all addresses of an interface are known"
    (pair,) = found["pairs"]
    for rate in ("tcp_gbit_per_s", "tcp_streams_gbit_per_s", "gloo_gbit_per_s"):
        assert 0 < pair[rate] < 1.2 * 20e-3
    (other,) = found["alternatives"]
    assert other["interface"] == "eth1"
    assert other["gbit_per_s"] > 1.5 * other["chosen_gbit_per_s"]
    assert other["chosen_gbit_per_s"] == pair["tcp_gbit_per_s"]
    finding = found["findings"][0]
    assert finding["key"] == "slow_interface"
    assert finding["sentence"].startswith("The chosen interface eth0 reaches")
    assert "set GLOO_SOCKET_IFNAME=eth1 on all hosts" in finding["sentence"]
