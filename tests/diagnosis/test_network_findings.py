"""Findings of the network check from tables of rates, rates from arrival times, which pairs are measured, and which
interface Gloo uses. All pure, on hand-made tables.
"""

import dataclasses
import sys

import pytest

from gradcast.diagnosis.network import hosts as network_hosts
from gradcast.diagnosis.network import interfaces, pair_rounds
from gradcast.diagnosis.network.findings import Alternative, NetworkHost, NetworkMeasurements, Pair, findings
from gradcast.diagnosis.network.interfaces import Chosen, Interface
from gradcast.diagnosis.network.tcp_rate import bits_per_s
from gradcast.errors import Error

G = 1e9
MS = 1e6


def host(index, **changes):
    return NetworkHost(**{"label": f"host{index}", "interface": "eth0", **changes})


def network(rates, *, several=1.0, gloo=0.9, latency_us=60.0, **changes):
    """``rates`` are those of one TCP stream by pair, in Gbit/s; several streams and Gloo are multiples of them."""
    pairs = [Pair(a, b, latency_us, rate * G, several * rate * G, gloo * rate * G) for (a, b), rate in rates.items()]
    hosts = changes.pop("hosts", [host(index) for index in range(1 + max(max(pair) for pair in rates))])
    return NetworkMeasurements(hosts, pairs, **changes)


def all_pairs(rate_of_host):
    """Every pair has the rate of its slower host."""
    count = len(rate_of_host)
    return {(a, b): min(rate_of_host[a], rate_of_host[b]) for a in range(count) for b in range(a + 1, count)}


def keys(measured):
    return [finding.key for finding in findings(measured)]


# --- Findings ---


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_good_network_is_limited_by_its_links_alone(count):
    (found,) = findings(network(all_pairs([10] * count)))
    assert found.key == "link_rate"
    assert "90% of raw TCP, 10 Gbit/s per host" in found.sentence


def test_the_links_rate_is_that_of_the_median_host():
    (found,) = findings(network(all_pairs([10, 10, 9, 9])))
    assert "9.5 Gbit/s per host" in found.sentence


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_host_is_named(slow):
    rates = [10.0, 10.0, 10.0]
    rates[slow] = 1.0
    found = [finding for finding in findings(network(all_pairs(rates))) if finding.key == "slow_host"]
    assert len(found) == 1
    assert f"host{slow} reaches 1 Gbit/s at best, the other hosts 10 Gbit/s" in found[0].sentence


def test_of_two_hosts_none_is_called_slow():
    assert keys(network({(0, 1): 1.0})) == ["link_rate"]


def ring(rates):
    """Each host with the next one, as with many hosts."""
    count = len(rates)
    return {tuple(sorted((a, (a + 1) % count))): min(rates[a], rates[(a + 1) % count]) for a in range(count)}


def test_a_good_host_between_two_slow_ones_is_not_called_slow():
    rates = [10.0] * 64
    rates[3] = rates[5] = 1.0
    found = findings(network(ring(rates)))
    assert [each.key for each in found] == ["slow_host", "slow_host", "unjudged_host"]
    assert found[0].sentence.startswith("host3 reaches")
    assert found[1].sentence.startswith("host5 reaches")
    assert found[2].sentence.startswith("host4: measured only with hosts that seem slow")


def test_hosts_that_differ_a_little_are_not_slow():
    assert keys(network(all_pairs([10, 10, 8]))) == ["link_rate"]


def test_a_slow_pair_of_good_hosts_is_named():
    rates = all_pairs([10, 10, 10, 10]) | {(1, 3): 4.0}
    (found,) = findings(network(rates))
    assert found.key == "slow_pair"
    assert "host1 and host3 reach 4 Gbit/s with each other, but 10 Gbit/s with others" in found.sentence


def test_pairs_of_a_slow_host_are_not_told_again():
    assert keys(network(all_pairs([10, 10, 10, 2]))) == ["slow_host"]


def test_several_streams_that_are_faster_ask_for_several_connections():
    (found,) = findings(network(all_pairs([5, 5, 5]), several=1.9))
    assert found.key == "one_connection"
    assert "One TCP connection reaches 5 Gbit/s, 4 reach 9.5 Gbit/s, and Gloo has 1" in found.sentence
    assert "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0" in found.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"several": 1.2},
        {"several": 1.9, "hosts": [host(index, connections=4) for index in range(3)]},
        {"several": 1.9, "backend": "nccl"},
    ],
)
def test_no_connections_are_asked_for_without_a_reason(changes):
    assert "one_connection" not in keys(network(all_pairs([5, 5, 5]), **changes))


def test_gloo_below_tcp_is_told_and_then_the_link_is_not_the_limit():
    (found,) = findings(network(all_pairs([40, 40]), gloo=0.3))
    assert found.key == "gloo_below_tcp"
    assert "Gloo reaches 30% of raw TCP (12 Gbit/s of 40 Gbit/s between host0 and host1)" in found.sentence
    assert "GLOO_SOCKET_IFNAME=eth0,eth0" in found.sentence


@pytest.mark.parametrize("share", [0.65, 0.7, 0.79])
def test_between_good_and_bad_the_link_is_most_of_the_limit(share):
    (found,) = findings(network(all_pairs([10, 10]), gloo=share))
    assert found.key == "link_and_gloo"
    assert f"Gloo reaches {share:.0%} of raw TCP, 10 Gbit/s per host" in found.sentence


@pytest.mark.parametrize("gloo", [0.3, 0.7, 0.9])
def test_what_gloo_reaches_is_not_told_as_another_backends(gloo):
    (found,) = findings(network(all_pairs([10, 10]), gloo=gloo, backend="nccl"))
    assert found.key == "other_backend"
    assert "travel over nccl, but this check measures Gloo on the CPU" in found.sentence
    on_one_host = network(all_pairs([10, 10]), gloo=gloo, backend="nccl", one_host=True)
    assert keys(on_one_host) == ["other_backend"]


def test_interfaces_that_were_not_measured_are_named():
    hosts = [host(index, connections=2, unmeasured=("ib0",)) for index in range(2)]
    found = findings(network(all_pairs([10, 10]), hosts=hosts))
    assert [each.key for each in found] == ["link_rate", "unmeasured_interface"]
    assert "over eth0 only; Gloo also uses ib0" in found[1].sentence


@pytest.mark.parametrize(("rate", "expected"), [(9.4, ["slow_interface"]), (1.2, ["link_rate"])])
def test_a_faster_interface_is_found_by_its_measured_rate(rate, expected):
    measured = network(all_pairs([0.94, 0.94]), alternatives=[Alternative("ib0", rate * G, 0.94 * G)])
    assert keys(measured) == expected
    if expected == ["slow_interface"]:
        assert "set GLOO_SOCKET_IFNAME=ib0 on all hosts" in findings(measured)[0].sentence
        assert "NCCL_SOCKET_IFNAME=ib0" in findings(dataclasses.replace(measured, backend="nccl"))[0].sentence


def test_a_virtual_interface_is_told_only_where_there_is_another():
    virtual = host(0, interface="docker0", physical=False)
    assert keys(network({(0, 1): 5.0}, hosts=[virtual, host(1)])) == ["link_rate"]
    virtual = dataclasses.replace(virtual, physical_others=("eth0",))
    (found,) = findings(network({(0, 1): 5.0}, hosts=[virtual, host(1)]))
    assert found.key == "virtual_interface"
    assert "set GLOO_SOCKET_IFNAME=eth0" in found.sentence


@pytest.mark.parametrize(
    ("speed", "expected"), [(25_000, ["below_nominal"]), (10_000, ["link_rate"]), (None, ["link_rate"])]
)
def test_a_rate_far_below_the_cards_is_told(speed, expected):
    hosts = [host(index, speed_mbit_per_s=speed) for index in range(2)]
    measured = network({(0, 1): 9.4}, hosts=hosts)
    assert keys(measured) == expected
    if speed == 25_000:
        assert "eth0 of host0 is a 25 Gbit/s link" in findings(measured)[0].sentence


@pytest.mark.parametrize(
    ("speeds", "rate", "named"),
    [
        ((100_000, 10_000), 9.4, None),  # the slower card is full
        ((10_000, 100_000), 9.4, None),
        ((100_000, 25_000), 9.4, "eth0 of host1 is a 25 Gbit/s link"),
        ((25_000, 100_000), 9.4, "eth0 of host0 is a 25 Gbit/s link"),
        ((25_000, None), 9.4, None),  # the other one may be slower
    ],
)
def test_a_pair_is_held_against_its_slower_card(speeds, rate, named):
    hosts = [host(index, speed_mbit_per_s=speed) for index, speed in enumerate(speeds)]
    (found,) = findings(network({(0, 1): rate}, hosts=hosts))
    assert found.key == ("link_rate" if named is None else "below_nominal")
    assert (named or "") in found.sentence


def test_a_high_latency_is_told_with_what_it_adds_to_an_operation():
    (found,) = findings(network(all_pairs([1, 1, 1]), latency_us=5000))
    assert found.key == "high_latency"
    assert "5 ms one way" in found.sentence
    assert "4 such hops, 20 ms" in found.sentence


def test_what_could_not_be_measured_is_told_and_the_rest_is_judged():
    good = network(all_pairs([10, 10, 1]))
    pairs = [pair if (pair.a, pair.b) != (0, 1) else Pair(0, 1, fault="no answer") for pair in good.pairs]
    found = {finding.key: finding.sentence for finding in findings(dataclasses.replace(good, pairs=pairs))}
    assert "1 of 3 pairs could not be measured over TCP (no answer)" in found["unmeasured"]
    nothing = NetworkMeasurements(good.hosts, [Pair(a, b, fault="no answer") for a, b in ((0, 1), (0, 2), (1, 2))])
    assert keys(nothing) == ["unmeasured"]


def test_between_ranks_of_one_host_there_is_no_network_to_judge():
    assert findings(network({(0, 1): 40.0}, gloo=0.1, one_host=True)) == []


# --- Rates ---


def arrivals(rate_bytes_per_s, seconds, size, start=0.0):
    count = round(rate_bytes_per_s * seconds / size)
    return [(start + (index + 1) * size / rate_bytes_per_s, size) for index in range(count)]


def test_the_rate_of_even_arrivals():
    assert bits_per_s([arrivals(1e6, 0.3, 1000)], 0.3) == pytest.approx(8e6, rel=0.01)


def test_streams_add_up():
    streams = [arrivals(1e6, 0.3, 1000), arrivals(3e6, 0.3, 1000)]
    assert bits_per_s(streams, 0.3) == pytest.approx(32e6, rel=0.01)


def test_a_slow_start_and_a_slow_end_do_not_count():
    slow = arrivals(1e5, 0.05, 1000)
    fast = arrivals(1e7, 0.3, 1000, start=0.05)
    tail = arrivals(1e5, 0.02, 1000, start=0.35)
    assert bits_per_s([[*slow, *fast, *tail]], 0.37) == pytest.approx(8e7, rel=0.01)


def test_what_was_lost_and_comes_long_after_the_end_does_not_count():
    late = arrivals(1e6, 0.005, 1000, start=0.5)
    assert bits_per_s([[*arrivals(1e6, 0.1, 1000), *late]], 0.1) == pytest.approx(8e6, rel=0.01)


@pytest.mark.parametrize("records", [[], [(1.0, 100)]])
def test_too_little_is_no_rate(records):
    assert bits_per_s([records], 1.0) == 0


def test_few_pieces_count_all():
    assert bits_per_s([[(0.0, 500), (0.1, 500), (0.2, 500)]], 0.2) == pytest.approx(8 * 1000 / 0.2)


# --- From samples to what is told ---


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


def test_a_pair_is_as_fast_as_its_slower_direction():
    pairs = pytest.importorskip("gradcast.diagnosis.network.pairs", exc_type=ImportError)
    from gradcast.diagnosis.network.tcp import ReceivedRates

    pair = pairs._pair(ReceivedRates(1 * G, 8 * G), ReceivedRates(2 * G, 4 * G, latency_us=30.0), 3, 5)
    assert pair == Pair(3, 5, latency_us=30.0, tcp_bits_per_s=1 * G, streams_bits_per_s=4 * G)
    directions = [line(50, 1.0, starts=2), line(70, 4.0, starts=2)]
    for given in (directions, directions[::-1]):
        found = pairs.with_gloo(pair, given)
        assert (found.alpha_us, found.beta_ns_per_byte) == (pytest.approx(70), pytest.approx(4.0))
        assert found.gloo_bits_per_s == pytest.approx(8 * G * (1 << 20) / (140e3 + 4.0 * (1 << 20)))


def test_a_message_takes_what_the_largest_ones_took():
    """Neither smaller messages, which a token bucket lets through at once, nor a disturbed one affect the result."""
    pairs = pytest.importorskip("gradcast.diagnosis.network.pairs", exc_type=ImportError)

    took_ms = {1024: (5.7, 0.15, 0.15), 22_390: (5.1, 4.5, 4.5), 179_123: (48.5, 48.6, 48.5)}
    samples = [(size, 1e6 * ms) for size, times in took_ms.items() for ms in times]
    found = pairs.with_gloo(Pair(0, 1), [samples, samples])
    assert found.beta_ns_per_byte == pytest.approx((48.5e6 - 0.15e6) / (179_123 - 1024))
    assert found.gloo_bits_per_s == pytest.approx(8e9 * 179_123 / 48.5e6)
    assert found.alpha_us == 0, "the small ones took no longer than their bytes"


def test_a_pair_without_a_rate_says_why():
    pairs = pytest.importorskip("gradcast.diagnosis.network.pairs", exc_type=ImportError)
    from gradcast.diagnosis.network.tcp import ReceivedRates

    pair = pairs._pair(ReceivedRates(0.0, 4 * G), ReceivedRates(2 * G, 4 * G, latency_us=30.0), 0, 1)
    assert pair.tcp_bits_per_s is None
    assert pair.streams_bits_per_s == 4 * G
    assert pair.fault == "too few bytes arrived to compute a rate"
    assert pairs._pair("refused", "no answer", 0, 1).fault == "no answer"
    assert pairs._pair("refused", ReceivedRates(0.0, 0.0), 0, 1).fault == "refused"


@pytest.mark.parametrize(
    ("latency_us", "rate", "seconds"), [(50, 1 * G, 0.05), (5000, 1 * G, 0.3), (100_000, 0.1 * G, 2.0)]
)
def test_a_message_is_as_long_as_tcp_needs_at_the_latency(latency_us, rate, seconds):
    pairs = pytest.importorskip("gradcast.diagnosis.network.pairs", exc_type=ImportError)
    assert pairs.gloo_bytes(Pair(0, 1, latency_us, rate)) == pytest.approx(seconds * rate / 8)


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
    found = check._Network(TwoRanks(), places, ["a", "b"], b"token", lambda _: None)
    assert check._rate_over(found, (0, 1), "eth1") is None


# --- Rounds ---


@pytest.mark.parametrize("count", range(2, 9))
def test_up_to_eight_hosts_all_pairs_meet_once(count):
    met = [pair for pairs in pair_rounds.rounds(count) for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]


@pytest.mark.parametrize("count", [2, 3, 7, 8, 9, 10, 63, 64, 65, 500])
def test_no_round_has_a_host_twice_and_no_pair_comes_twice(count):
    rounds = pair_rounds.rounds(count)
    for pairs in rounds:
        hosts = [each for pair in pairs for each in pair]
        assert len(hosts) == len(set(hosts))
        assert all(0 <= a < b < count for a, b in pairs)
    met = [pair for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))


@pytest.mark.parametrize("count", [9, 10, 64, 65, 500])
def test_many_hosts_have_a_ring_and_a_sample_in_few_rounds(count):
    rounds = pair_rounds.rounds(count)
    met = {pair for pairs in rounds for pair in pairs}
    assert {(index, index + 1) for index in range(count - 1)} | {(0, count - 1)} <= met
    assert len(rounds) <= 9
    assert max(b - a for a, b in met if (a, b) != (0, count - 1)) > 1


# --- Interfaces ---


KNOWN = [
    Interface("lo", ("127.0.0.1", "::1"), loopback=True),
    Interface("eth0", ("10.0.0.1",)),
    Interface("ib0", ("10.1.0.1",)),
]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("ib0", Chosen("ib0", "10.1.0.1")),
        ("eth0,eth0", Chosen("eth0", "10.0.0.1", 2)),
        ("eth0,ib0,eth0", Chosen("eth0", "10.0.0.1", 3, ("ib0",))),
        ("lo", Chosen("lo", "127.0.0.1")),
    ],
)
def test_the_variable_chooses(variable, expected):
    assert interfaces.chosen(KNOWN, {"GLOO_SOCKET_IFNAME": variable}) == expected


def test_an_interface_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(Error, match="eth7 has no address here; choose one of lo, eth0, ib0"):
        interfaces.chosen(KNOWN, {"GLOO_SOCKET_IFNAME": "eth7"})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("10.0.0.1", Chosen("eth0", "10.0.0.1")),
        (None, Chosen("lo", "127.0.0.1")),
        ("10.0.0.9", Chosen("INTERFACE", "10.0.0.9")),  # never an address: remedies put it into a variable
    ],
)
def test_without_it_the_hostname_does_and_else_loopback(monkeypatch, found, expected):
    monkeypatch.setattr(interfaces, "_hostname_address", lambda: found)
    assert interfaces.chosen(KNOWN, {}) == expected


def test_where_the_system_tells_no_addresses_the_variable_is_taken_as_it_is(monkeypatch):
    monkeypatch.setattr(interfaces, "_hostname_address", lambda: "10.0.0.1")
    known = [Interface("en0"), Interface("en1")]
    assert interfaces.chosen(known, {"GLOO_SOCKET_IFNAME": "en1"}) == Chosen("en1", "10.0.0.1")


def make_interface(system, name, *, files=(), folders=()):
    (system / name).mkdir(parents=True)
    for file, text in files:
        (system / name / file).write_text(text)
    for folder in folders:
        (system / name / folder).mkdir()


def test_what_the_system_says_of_an_interface(tmp_path):
    make_interface(tmp_path, "eth0", files=[("speed", "25000\n"), ("operstate", "up\n")], folders=["device"])
    make_interface(tmp_path, "eth1", files=[("speed", "-1\n"), ("operstate", "down\n")], folders=["device"])
    make_interface(tmp_path, "veth1", files=[("speed", "10000\n")])
    make_interface(tmp_path, "vlan7", files=[("speed", "25000\n")], folders=["lower_bond0"])
    make_interface(tmp_path, "bond0", folders=["lower_eth0"])
    make_interface(tmp_path, "docker0", folders=["lower_veth1"])
    make_interface(tmp_path, "flannel", files=[("uevent", "DEVTYPE=vxlan\n")], folders=["lower_eth0"])
    told = {
        name: interfaces.described(name, ["10.0.0.1"], tmp_path) for name in [path.name for path in tmp_path.iterdir()]
    }
    assert {name: each.physical for name, each in told.items()} == {
        "eth0": True, "eth1": True, "veth1": False, "vlan7": True, "bond0": True, "docker0": False, "flannel": False,
    }  # fmt: skip
    assert {name for name, each in told.items() if not each.up} == {"eth1"}
    speeds = {name: each.speed_mbit_per_s for name, each in told.items() if each.speed_mbit_per_s is not None}
    assert speeds == {"eth0": 25_000, "vlan7": 25_000}


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
    assert network_hosts.ranks_by_host(names) == [[0, 2], [1], [3]]


def with_interfaces(number, *others):
    """Addresses end with the host's number."""
    known = [dataclasses.replace(each, addresses=(f"{each.addresses[0][:-1]}{number}",)) for each in others]
    return place(f"host{number}", f"node{number}", [*KNOWN[:2], *known])


def test_only_interfaces_that_all_hosts_have_are_tried_the_fastest_first():
    fast = Interface("ib0", ("10.1.0.1",), speed_mbit_per_s=100_000)
    slow = Interface("eth1", ("10.2.0.1",), speed_mbit_per_s=1000)
    down = Interface("eth2", ("10.3.0.1",), up=False)
    first, second = (with_interfaces(number, slow, fast, down) for number in (1, 2))
    assert network_hosts.common_alternatives([first, second], 5) == ["ib0", "eth1"]
    assert network_hosts.common_alternatives([first, second], 1) == ["ib0"]
    assert network_hosts.common_alternatives([first, with_interfaces(2, slow)], 5) == ["eth1"]


def test_an_address_that_every_host_has_leads_nowhere():
    docker = Interface("docker0", ("172.17.0.1",))
    hosts = [place(f"host{number}", "node", [*KNOWN[:2], docker]) for number in range(2)]
    assert network_hosts.common_alternatives(hosts, 5) == []


def test_a_link_local_address_leads_nowhere():
    wire = Interface("eth1", ("fe80::1", "fe80::2"))
    both = Interface("eth2", ("fe80::1", "fd00::1"))
    first, second = (with_interfaces(number, wire, both) for number in (1, 2))
    assert network_hosts.common_alternatives([first, second], 5) == []
    known = place("x", "node", [*KNOWN[:2], wire, both])
    assert [(each.name, each.addresses) for each in known.others()] == [("eth2", ("fd00::1",))]
