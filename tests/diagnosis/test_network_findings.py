"""Findings of the network check from tables of rates, rates from arrival times, which pairs are measured, and which
interface Gloo uses. All pure, on hand-made tables.
"""

import dataclasses
import itertools
import sys

import pytest

from gradcast.diagnosis.network import hosts as network_hosts
from gradcast.diagnosis.network import interfaces
from gradcast.diagnosis.network.findings import NetworkMeasurements, Pair, findings
from gradcast.diagnosis.network.hosts import HostInterfaces
from gradcast.diagnosis.network.interfaces import Chosen, Interface
from gradcast.diagnosis.network.tcp import ReceivedRates, bits_per_s
from gradcast.errors import Error
from gradcast.host_traffic import Hosts

G = 1e9
MS = 1e6


def host(index, interface="eth0", *, others=(), connections=1, unmeasured=(), **properties):
    """``others`` are physical interfaces besides the chosen one, ``properties`` those of the chosen one."""
    known = [Interface(interface, ("10.0.0.1",), **properties), *(Interface(name, ("10.1.0.1",)) for name in others)]
    chosen = Chosen(interface, "10.0.0.1", connections, unmeasured)
    return HostInterfaces((f"host{index}", ""), chosen, tuple(known), name=f"host{index}")


def network(rates, *, several=1.0, gloo=0.9, latency_us=60.0, **changes):
    """``rates`` are those of one TCP stream by pair, in Gbit/s; several streams and Gloo are multiples of them."""
    pairs = [Pair(a, b, latency_us, rate, several * rate, gloo * rate) for (a, b), rate in rates.items()]
    hosts = changes.pop("hosts", [host(index) for index in range(1 + max(max(pair) for pair in rates))])
    return NetworkMeasurements(dict(enumerate(hosts)), pairs, **changes)


def all_pairs(rate_of_host):
    """Every pair has the rate of its slower host."""
    count = len(rate_of_host)
    return {(a, b): min(rate_of_host[a], rate_of_host[b]) for a in range(count) for b in range(a + 1, count)}


def ring(rates):
    """Each host with the next one, as with many hosts."""
    count = len(rates)
    return {tuple(sorted((a, (a + 1) % count))): min(rates[a], rates[(a + 1) % count]) for a in range(count)}


def pair_of(*changes, rate=9.4, **more):
    """Two hosts with changes of their own."""
    return network({(0, 1): rate}, hosts=[host(index, **each) for index, each in enumerate(changes)], **more)


def with_faults(measured, *faulty):
    pairs = [Pair(each.a, each.b, fault="no answer") if (each.a, each.b) in faulty else each for each in measured.pairs]
    return dataclasses.replace(measured, pairs=pairs)


# --- Findings ---

THREE = all_pairs([5, 5, 5])
DOCKER = {"interface": "docker0", "physical": False}
OTHER = "are sent over nccl, but this check measures Gloo on the CPU"
LINK = "90% of raw TCP, 10 Gbit/s per host"
SLOW_AND_FAULTY = network(all_pairs([10, 10, 1]))


def card(mbit_per_s):
    return {"speed_mbit_per_s": mbit_per_s}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        # A good network is limited by its links alone.
        *[(network(all_pairs([10] * count)), [("link_rate", LINK)]) for count in (2, 3, 8)],
        (network(all_pairs([10, 10, 9, 9])), [("link_rate", "9.5 Gbit/s per host")]),
        (network(all_pairs([10, 10]), narrow_saves=False), [("link_rate", "Send fewer bytes (gradient accumulation)")]),
        (network({(0, 1): 1.0}), [("link_rate", "")]),  # of two hosts none is called slow
        (network(all_pairs([10, 10, 8])), [("link_rate", "")]),
        # A slow host is named, and its pairs are not told again.
        (network(all_pairs([1, 10, 10])), [("slow_host", "host0 reaches 1 Gbit/s at best, the other hosts 10 Gbit/s")]),
        (network(all_pairs([10, 10, 1])), [("slow_host", "host2 reaches 1 Gbit/s")]),
        (network(all_pairs([10, 10, 10, 2])), [("slow_host", "host3 reaches 2 Gbit/s")]),
        # A good host between two slow ones is not called slow.
        (
            network(ring([1.0 if index in (3, 5) else 10.0 for index in range(64)])),
            [
                ("slow_host", "host3 reaches"), ("slow_host", "host5 reaches"),
                ("unjudged_host", "host4: measured only with hosts that seem slow"),
            ],
        ),
        (
            network(all_pairs([10, 10, 10, 10]) | {(1, 3): 4.0}),
            [("slow_pair", "host1 and host3 reach 4 Gbit/s with each other, but 10 Gbit/s with others")],
        ),
        # Several streams that are faster ask for several connections, if there is a reason.
        (
            network(THREE, several=1.9),
            [("one_connection", "connection reaches 5 Gbit/s, 4 reach 9.5 Gbit/s, and Gloo has 1 between two ranks: "
              "set GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0,")],
        ),
        (network(THREE, several=1.2), [("link_rate", "")]),
        (network(THREE, several=1.9, hosts=[host(index, connections=4) for index in range(3)]), [("link_rate", "")]),
        (network(THREE, several=1.9, backend="nccl"), [("other_backend", "")]),
        # What Gloo makes of the link.
        (
            network(all_pairs([40, 40]), gloo=0.3),
            [("gloo_below_tcp", "Gloo reaches 30% of raw TCP (12 Gbit/s of 40 Gbit/s between host0 and host1)")],
        ),
        *[
            (network(all_pairs([10, 10]), gloo=share),
             [("link_and_gloo", f"Gloo reaches {share:.0%} of raw TCP, 10 Gbit/s per host")])
            for share in (0.65, 0.7, 0.79)
        ],
        *[
            (network(all_pairs([10, 10]), gloo=share, backend="nccl", one_host=one_host), [("other_backend", OTHER)])
            for share in (0.3, 0.7, 0.9) for one_host in (False, True)
        ],
        (network({(0, 1): 40.0}, gloo=0.1, one_host=True), []),  # no network to judge
        # Interfaces.
        (
            pair_of(*[{"connections": 2, "unmeasured": ("ib0",)}] * 2, rate=10),
            [("link_rate", LINK), ("unmeasured_interface", "over eth0 only; Gloo also uses ib0")],
        ),
        (
            network(all_pairs([0.94] * 3), alternatives={"ib0": 9.4}),
            [("slow_interface", "set GLOO_SOCKET_IFNAME=ib0 on all hosts")],
        ),
        (
            network(all_pairs([0.94] * 3), alternatives={"ib0": 9.4}, backend="nccl"),
            [("slow_interface", "NCCL_SOCKET_IFNAME=ib0"), ("other_backend", OTHER)],
        ),
        (network(all_pairs([0.94] * 3), alternatives={"ib0": 1.2}), [("link_rate", "")]),
        (pair_of(DOCKER, {}), [("link_rate", "")]),
        (
            pair_of(DOCKER | {"others": ("eth0",)}, {}),
            [("virtual_interface", "set GLOO_SOCKET_IFNAME=eth0")],
        ),
        # A pair is held against its slower card.
        (pair_of(card(25_000), card(25_000)), [("below_nominal", "eth0 of host0 is a 25 Gbit/s link")]),
        (pair_of(card(100_000), card(25_000)), [("below_nominal", "eth0 of host1 is a 25 Gbit/s link")]),
        (pair_of(card(25_000), card(100_000)), [("below_nominal", "eth0 of host0 is a 25 Gbit/s link")]),
        (pair_of(card(100_000), card(10_000)), [("link_rate", "")]),
        (pair_of(card(10_000), card(100_000)), [("link_rate", "")]),
        (pair_of(card(25_000), card(None)), [("link_rate", "")]),  # the other one may be slower
        (pair_of(card(None), card(None)), [("link_rate", "")]),
        (
            network(all_pairs([1, 1, 1]), latency_us=5000),
            [("high_latency", "all-reduce of 3 hosts has 4 such hops, 20 ms")],
        ),
        # What could not be measured is told, and the rest is judged.
        (
            with_faults(SLOW_AND_FAULTY, (0, 1)),
            [("unmeasured", "1 of 3 pairs could not be measured over TCP (no answer)")],
        ),
        (with_faults(SLOW_AND_FAULTY, (0, 1), (0, 2), (1, 2)), [("unmeasured", "3 of 3 pairs")]),
    ],
)  # fmt: skip
def test_the_findings(measured, expected):
    found = findings(measured)
    assert [each.key for each in found] == [key for key, _ in expected]
    for each, (_, words) in zip(found, expected, strict=True):
        assert words in each.sentence.replace(" (10.0.0.1)", "")  # the address of every host here


# --- Rates ---


def arrivals(rate_bytes_per_s, seconds, size, start=0.0):
    count = round(rate_bytes_per_s * seconds / size)
    return [(start + (index + 1) * size / rate_bytes_per_s, size) for index in range(count)]


SLOW_START = [*arrivals(1e5, 0.05, 1000), *arrivals(1e7, 0.3, 1000, start=0.05), *arrivals(1e5, 0.02, 1000, start=0.35)]
LATE = [*arrivals(1e6, 0.1, 1000), *arrivals(1e6, 0.005, 1000, start=0.5)]  # lost, and comes long after the end


@pytest.mark.parametrize(
    ("streams", "seconds", "expected"),
    [
        ([arrivals(1e6, 0.3, 1000)], 0.3, 8e6),
        ([arrivals(1e6, 0.3, 1000), arrivals(3e6, 0.3, 1000)], 0.3, 32e6),
        ([SLOW_START], 0.37, 8e7),
        ([LATE], 0.1, 8e6),
        ([[]], 1.0, 0),  # too little is no rate
        ([[(1.0, 100)]], 1.0, 0),
        ([[(0.0, 500), (0.1, 500), (0.2, 500)]], 0.2, 8 * 1000 / 0.2),  # few pieces count all
    ],
)
def test_the_rate_of_what_arrived(streams, seconds, expected):
    assert bits_per_s(streams, seconds) == pytest.approx(expected, rel=0.01)


# --- From samples to what is told ---


@pytest.fixture
def pairs():
    return pytest.importorskip("gradcast.diagnosis.network.pairs", exc_type=ImportError)


def line(alpha_us, beta_ns_per_byte, sizes=(1 << 10, 1 << 17, 1 << 20), starts=1):
    """Bytes and ns of messages; each sample pays ``starts`` start-ups."""
    return [(size, 1e3 * starts * alpha_us + beta_ns_per_byte * size) for size in sizes for _ in range(3)]


def test_the_collectives_line_has_its_units():
    collective = pytest.importorskip("gradcast.diagnosis.network.collective", exc_type=ImportError)
    found = collective.fitted(line(200, 2.0), 4)
    assert found["alpha_us"] == pytest.approx(200)
    assert found["beta_ns_per_byte"] == pytest.approx(2.0)
    assert found["bus_gbit_per_s"] == pytest.approx(8 * 1.5 / 2.0)
    assert found["samples"][-1] == {"bytes": 1 << 20, "ms": pytest.approx(0.2 + 2.0 * (1 << 20) / 1e6)}
    assert found["fit_error"] == pytest.approx(0, abs=1e-6)


def test_an_all_reduce_took_what_the_last_rank_to_join_saw(monkeypatch):
    collective = pytest.importorskip("gradcast.diagnosis.network.collective", exc_type=ImportError)

    class TwoRanks:
        own = None

        def gather(self, value):
            return [value, [0.5 * each for each in value]]

    monkeypatch.setattr(collective, "_times_s", lambda group, size: [4.0, 2.0])
    assert collective.samples(TwoRanks(), 0.0)[:2] == [(1024, 2.0 * G), (1024, 1.0 * G)]


def test_a_pair_is_as_fast_as_its_slower_direction(pairs):
    pair = pairs.pair_of(ReceivedRates(1 * G, 8 * G), ReceivedRates(2 * G, 4 * G, latency_us=30.0), 3, 5)
    assert pair == Pair(3, 5, latency_us=30.0, tcp_gbit_per_s=1, tcp_streams_gbit_per_s=4)
    directions = [line(50, 1.0, starts=2), line(70, 4.0, starts=2)]
    for given in (directions, directions[::-1]):
        found = pairs.with_gloo(pair, given)
        assert (found.alpha_us, found.beta_ns_per_byte) == (pytest.approx(70), pytest.approx(4.0))
        assert found.gloo_gbit_per_s == pytest.approx(8 * (1 << 20) / (140e3 + 4.0 * (1 << 20)))


def test_a_message_takes_what_the_largest_ones_took(pairs):
    """Neither smaller messages, which a token bucket lets through at once, nor a disturbed one affect the result."""
    took_ms = {1024: (5.7, 0.15, 0.15), 22_390: (5.1, 4.5, 4.5), 179_123: (48.5, 48.6, 48.5)}
    samples = [(size, 1e6 * ms) for size, times in took_ms.items() for ms in times]
    found = pairs.with_gloo(Pair(0, 1), [samples, samples])
    assert found.beta_ns_per_byte == pytest.approx((48.5e6 - 0.15e6) / (179_123 - 1024))
    assert found.gloo_gbit_per_s == pytest.approx(8 * 179_123 / 48.5e6)
    assert found.alpha_us == 0, "the small ones took no longer than their bytes"


def test_a_pair_without_a_rate_says_why(pairs):
    pair = pairs.pair_of(ReceivedRates(0.0, 4 * G), ReceivedRates(2 * G, 4 * G, latency_us=30.0), 0, 1)
    assert pair.tcp_gbit_per_s is None
    assert pair.tcp_streams_gbit_per_s == 4
    assert pair.fault == "too few bytes arrived to compute a rate"
    assert pairs.pair_of("refused", "no answer", 0, 1).fault == "no answer"
    assert pairs.pair_of("refused", ReceivedRates(0.0, 0.0), 0, 1).fault == "refused"


@pytest.mark.parametrize(("latency_us", "rate", "seconds"), [(50, 1, 0.05), (5000, 1, 0.3), (100_000, 0.1, 2.0)])
def test_a_message_is_as_long_as_tcp_needs_at_the_latency(pairs, latency_us, rate, seconds):
    assert pairs.gloo_bytes(Pair(0, 1, latency_us, rate)) == pytest.approx(seconds * rate * G / 8)


# --- Other interfaces ---


def test_an_interface_on_which_nobody_can_listen_is_none(monkeypatch):
    check = pytest.importorskip("gradcast.diagnosis.network.check", exc_type=ImportError)

    class TwoRanks:
        rank = 0

        def gather(self, value):
            return [value, value]

    def refuse(*_):
        raise Error("cannot listen", "communication")

    monkeypatch.setattr(check.tcp, "Listener", refuse)
    known = [*KNOWN[:2], Interface("eth1", ("10.2.0.1",))]
    places = [place("x", "a", known), place("y", "b", known)]
    found = check.Network(TwoRanks(), places, b"token", lambda _: None)
    assert check.rate_over(found, (0, 1), "eth1") is None


# --- Rounds ---


@pytest.mark.parametrize("count", [*range(2, 11), 63, 64, 65, 500])
def test_the_rounds_pair_all_hosts_or_many_in_a_ring_with_a_sample(count):
    rounds = network_hosts.rounds(count)
    for pairs in rounds:
        hosts = [each for pair in pairs for each in pair]
        assert len(hosts) == len(set(hosts)), "no round has a host twice"
        assert all(0 <= a < b < count for a, b in pairs)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    if count <= 8:
        assert sorted(met) == list(itertools.combinations(range(count), 2))
    else:
        assert {(index, index + 1) for index in range(count - 1)} | {(0, count - 1)} <= set(met)
        assert len(rounds) <= 9
        assert max(b - a for a, b in met if (a, b) != (0, count - 1)) > 1


# --- Interfaces ---


KNOWN = [
    Interface("lo", ("127.0.0.1", "::1"), loopback=True),
    Interface("eth0", ("10.0.0.1",)),
    Interface("ib0", ("10.1.0.1",)),
]


@pytest.mark.parametrize(
    ("variable", "hostname_address", "expected"),
    [
        ("ib0", None, Chosen("ib0", "10.1.0.1")),
        ("eth0,eth0", None, Chosen("eth0", "10.0.0.1", 2)),
        ("eth0,ib0,eth0", None, Chosen("eth0", "10.0.0.1", 3, ("ib0",))),
        ("lo", None, Chosen("lo", "127.0.0.1")),
        # Without the variable the hostname does, and else loopback.
        ("", "10.0.0.1", Chosen("eth0", "10.0.0.1")),
        ("", None, Chosen("lo", "127.0.0.1")),
        ("", "10.0.0.9", Chosen("INTERFACE", "10.0.0.9")),  # never an address: remedies put it into a variable
    ],
)
def test_the_interface_that_gloo_uses(monkeypatch, variable, hostname_address, expected):
    monkeypatch.setattr(interfaces, "_hostname_address", lambda: hostname_address)
    assert interfaces.chosen(KNOWN, {"GLOO_SOCKET_IFNAME": variable}) == expected


def test_a_variable_that_names_no_interface_with_an_address(monkeypatch):
    with pytest.raises(Error, match="eth7 has no address here; choose one of lo, eth0, ib0"):
        interfaces.chosen(KNOWN, {"GLOO_SOCKET_IFNAME": "eth7"})
    # Where the system tells no addresses, it is taken as it is.
    monkeypatch.setattr(interfaces, "_hostname_address", lambda: "10.0.0.1")
    known = [Interface("en0"), Interface("en1")]
    assert interfaces.chosen(known, {"GLOO_SOCKET_IFNAME": "en1"}) == Chosen("en1", "10.0.0.1")


# What the system says: files with their text, and folders.
SYSTEM = {
    "eth0": {"speed": "25000\n", "operstate": "up\n", "device": None},
    "eth1": {"speed": "-1\n", "operstate": "down\n", "device": None},
    "veth1": {"speed": "10000\n"},
    "vlan7": {"speed": "25000\n", "lower_bond0": None},
    "bond0": {"lower_eth0": None},
    "docker0": {"lower_veth1": None},
    "flannel": {"uevent": "DEVTYPE=vxlan\n", "lower_eth0": None},
}


def test_what_the_system_says_of_an_interface(tmp_path):
    for name, parts in SYSTEM.items():
        (tmp_path / name).mkdir()
        for part, text in parts.items():
            (tmp_path / name / part).mkdir() if text is None else (tmp_path / name / part).write_text(text)
    told = [interfaces.described(name, ["10.0.0.1"], tmp_path) for name in SYSTEM]
    assert {each.name for each in told if each.physical} == {"eth0", "eth1", "vlan7", "bond0"}
    assert {each.name for each in told if not each.up} == {"eth1"}
    assert {each.name: each.speed_mbit_per_s for each in told if each.speed_mbit_per_s} == {
        "eth0": 25_000, "vlan7": 25_000,
    }  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of interfaces")
def test_this_hosts_loopback_is_found():
    (loopback,) = [each for each in interfaces.interfaces() if each.loopback]
    assert "127.0.0.1" in loopback.addresses


def place(identity, hostname, known=KNOWN, used="eth0"):
    address = next(each.addresses[0] for each in known if each.name == used)
    return network_hosts.HostInterfaces((hostname, identity), Chosen(used, address), tuple(known))


def test_hosts_of_one_name_are_told_apart():
    places = [place("x", "node"), place("y", "node"), place("x", "node"), place("z", "other")]
    names = network_hosts.names([each.host for each in places])
    assert names == ["node/0", "node/1", "node/0", "other"]
    assert Hosts.of(names) == Hosts((0, 1, 0, 2))
    assert Hosts.of(names).ranks == [[0, 2], [1], [3]]


def with_interfaces(number, *others):
    """Addresses end with the host's number."""
    known = [dataclasses.replace(each, addresses=(f"{each.addresses[0][:-1]}{number}",)) for each in others]
    return place(f"host{number}", f"node{number}", [*KNOWN[:2], *known])


def test_only_two_interfaces_that_all_hosts_have_are_tried_the_fastest_first():
    speeds = {"ib0": 100_000, "eth1": 1000, "eth3": 10}
    fast, slow, slower = (
        Interface(name, (f"10.{index}.0.1",), speed_mbit_per_s=speed)
        for index, (name, speed) in enumerate(speeds.items())
    )
    down = Interface("eth2", ("10.9.0.1",), up=False)
    first, second = (with_interfaces(number, slower, slow, fast, down) for number in (1, 2))
    assert network_hosts.common_alternatives([first, second]) == ["ib0", "eth1"]
    assert network_hosts.common_alternatives([first, with_interfaces(2, slow)]) == ["eth1"]


def test_an_address_that_every_host_has_or_that_is_link_local_leads_nowhere():
    docker = Interface("docker0", ("172.17.0.1",))
    hosts = [place(f"host{number}", "node", [*KNOWN[:2], docker]) for number in range(2)]
    assert network_hosts.common_alternatives(hosts) == []
    wire, both = Interface("eth1", ("fe80::1", "fe80::2")), Interface("eth2", ("fe80::1", "fd00::1"))
    first, second = (with_interfaces(number, wire, both) for number in (1, 2))
    assert network_hosts.common_alternatives([first, second]) == []
    known = place("x", "node", [*KNOWN[:2], wire, both])
    assert [(each.name, each.addresses) for each in known.others()] == [("eth2", ("fd00::1",))]
