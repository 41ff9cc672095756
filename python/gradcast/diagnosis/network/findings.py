"""Findings of the network check: what limits the network, and which setting to change. Pure."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from gradcast.diagnosis.network.hosts import HostInterfaces
from gradcast.units import format_bandwidth, format_time

STREAMS = 4  # that "several" means
# Measurements of a quarter of a second vary by a few per cent; acting on a finding should gain more than that. Several
# streams gain a quarter only if one is held back: by its window, or by a limit per connection, as clouds have it.
SEVERAL_STREAMS_GAIN = 1.25
# Gloo sums, copies, and announces each message first. On a good network it reaches 80 to 95 % of raw TCP.
GLOO_SHARE_LOW = 0.65
GLOO_SHARE_GOOD = 0.8
# Link speeds come in steps (1, 2.5, 10, 25 Gbit/s), so a slower link has half the speed or less. Other traffic takes a
# little here and there.
SLOW_SHARE = 0.75
FASTER_INTERFACE_GAIN = 1.5
# TCP reaches 94 % of an Ethernet's nominal speed. If it reaches only half, something else is the limit.
NOMINAL_SHARE = 0.5
# One way. Between hosts of one data centre it is 20 to 150 us, of one region up to 1 ms. An all-reduce of n hosts has
# 2 (n - 1) hops one after the other, so with 1 ms every block of four hosts starts with 6 ms.
LATENCY_HIGH_US = 1000.0


@dataclasses.dataclass(frozen=True)
class Finding:
    key: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Pair:
    """The measurements between two hosts; the field names are those of doctor.json.

    ``a`` and ``b`` are ranks, one of each host. A rate is that of the slower direction; None if it could not be
    measured, and then ``fault`` says why. ``alpha_us`` and ``beta_ns_per_byte`` are the cost of a message over Gloo.
    """

    a: int
    b: int
    latency_us: float | None = None
    tcp_gbit_per_s: float | None = None
    tcp_streams_gbit_per_s: float | None = None
    gloo_gbit_per_s: float | None = None
    alpha_us: float | None = None
    beta_ns_per_byte: float | None = None
    fault: str | None = None

    @property
    def best_tcp_gbit_per_s(self) -> float | None:
        return max((rate for rate in (self.tcp_gbit_per_s, self.tcp_streams_gbit_per_s) if rate), default=None)


@dataclasses.dataclass(frozen=True)
class NetworkMeasurements:
    """The check's measurements. ``hosts`` are those of the pairs, by rank.

    With one host there is a pair of its ranks, which is not judged, because no network is between them. ``backend``
    carries the training's gradients. ``alternatives`` are other interfaces, with their Gbit/s between the hosts of the
    first pair. ``narrow_saves``: fewer bytes leave a host with bf16 on the wire than with fp32.
    """

    hosts: Mapping[int, HostInterfaces]
    pairs: Sequence[Pair]
    backend: str = "gloo"
    one_host: bool = False
    alternatives: Mapping[str, float] = dataclasses.field(default_factory=dict)
    narrow_saves: bool = True

    @property
    def first(self) -> HostInterfaces:
        return self.hosts[self.pairs[0].a]

    @property
    def is_gloo(self) -> bool:
        return self.backend == "gloo"

    @property
    def variable(self) -> str:
        return "GLOO_SOCKET_IFNAME" if self.is_gloo else "NCCL_SOCKET_IFNAME"

    def names(self, pair: Pair) -> str:
        return f"{self.hosts[pair.a].label} and {self.hosts[pair.b].label}"

    @property
    def best_by_host(self) -> dict[int, float]:
        """The rate of each host in its best pair: only a slow link of its own slows all of its pairs."""
        best: dict[int, float] = {}
        for pair in self.pairs:
            if rate := pair.best_tcp_gbit_per_s:
                for host in (pair.a, pair.b):
                    best[host] = max(best.get(host, 0.0), rate)
        return best


def findings(measured: NetworkMeasurements) -> list[Finding]:
    """Returns the findings, the most serious first. Without any, one says how far the link is the limit."""
    if measured.one_host:
        return list(_other_backend(measured))
    rules = (_unmeasured, _interface, _slow_hosts, _slow_pairs, _one_connection, _gloo, _nominal, _latency)
    found = [finding for rule in rules for finding in rule(measured)]
    return [*(found or _link_rate(measured)), *_unmeasured_interfaces(measured), *_other_backend(measured)]


def _unmeasured(measured: NetworkMeasurements) -> Iterator[Finding]:
    faults = [pair.fault for pair in measured.pairs if pair.fault]
    if faults:
        yield Finding(
            "unmeasured",
            f"{len(faults)} of {len(measured.pairs)} pairs could not be measured over TCP ({faults[0]}). A firewall "
            "that lets only some ports through causes this; open all ports between the hosts, which Gloo needs as well",
        )


def _interface(measured: NetworkMeasurements) -> Iterator[Finding]:
    chosen = measured.pairs[0].tcp_gbit_per_s or 0.0
    better, rate = max(measured.alternatives.items(), key=lambda each: each[1], default=(None, 0.0))
    virtual = next(
        (each for each in measured.hosts.values() if not each.interface.physical and each.physical_others), None
    )
    if better is not None and rate >= FASTER_INTERFACE_GAIN * chosen:
        yield Finding(
            "slow_interface",
            f"The chosen interface {measured.first.chosen.interface} reaches {_rate(chosen)}; {better} also "
            f"connects the hosts and reaches {_rate(rate)}: set {measured.variable}={better} on all hosts",
        )
    elif virtual is not None:
        yield Finding(
            "virtual_interface",
            f"{virtual.label} uses {virtual.chosen.interface}, a virtual interface (container, bridge or tunnel), "
            f"although it has {' and '.join(virtual.physical_others)}. Software handles its packets, which costs a "
            "core and speed. If the hosts reach each other over the physical interface, set "
            f"{measured.variable}={virtual.physical_others[0]}",
        )


def _slow_hosts(measured: NetworkMeasurements) -> Iterator[Finding]:
    """Confirms a suspect by a pair with a good host, since a pair with a slow host is slow on both sides."""
    best, suspects = measured.best_by_host, _suspects(measured)
    slow = {
        host
        for pair in measured.pairs
        for host, other in ((pair.a, pair.b), (pair.b, pair.a))
        if pair.best_tcp_gbit_per_s and host in suspects and other not in suspects
    }
    for host in sorted(slow):
        yield Finding(
            "slow_host",
            f"{measured.hosts[host].label} reaches {_rate(best[host])} at best, the other hosts "
            f"{_rate(_usual(best))}: every all-reduce waits for it. Check its link (`ethtool "
            f"{measured.hosts[host].chosen.interface}`: speed, duplex, errors), its switch port and other traffic on "
            "them, or train without this host",
        )
    if suspects - slow:
        yield Finding(
            "unjudged_host",
            f"{' and '.join(measured.hosts[host].label for host in sorted(suspects - slow))}: measured only with hosts "
            "that seem slow themselves, so this check cannot tell which of them is slow. Check again without the slow "
            "hosts",
        )


def _slow_pairs(measured: NetworkMeasurements) -> Iterator[Finding]:
    best, suspects = measured.best_by_host, _suspects(measured)
    for pair in measured.pairs:
        rate = pair.best_tcp_gbit_per_s
        if rate is None or suspects & {pair.a, pair.b}:
            continue
        usual = min(best[pair.a], best[pair.b])
        if rate < SLOW_SHARE * usual:
            yield Finding(
                "slow_pair",
                f"{measured.names(pair)} reach {_rate(rate)} with each other, but {_rate(usual)} "
                "with others: the path between them is slow (a switch or route that only they share, or other traffic "
                "on it). Number the ranks so that these hosts are not neighbours: a ring sends between neighbours only",
            )


def _one_connection(measured: NetworkMeasurements) -> Iterator[Finding]:
    rates = [(pair.tcp_gbit_per_s, pair.tcp_streams_gbit_per_s) for pair in measured.pairs]
    known = [(one, several) for one, several in rates if one and several]
    host, count = measured.first, STREAMS
    if not known or not measured.is_gloo or host.chosen.connections >= count:
        return
    one, several = map(statistics.median, zip(*known, strict=True))
    if several >= SEVERAL_STREAMS_GAIN * one:
        names = ",".join([host.chosen.interface] * count)
        yield Finding(
            "one_connection",
            f"One TCP connection reaches {_rate(one)}, {count} reach {_rate(several)}, and Gloo has "
            f"{host.chosen.connections} between two ranks: set GLOO_SOCKET_IFNAME={names}, "
            f"which gives it {count}. Each operation uses one connection, so more help only with several operations in "
            f"flight: DDP's buckets, or gradcast.Options(plan=gradcast.Planning(in_flight={count})). If the TCP window "
            "is the limit, larger net.ipv4.tcp_rmem and tcp_wmem help each connection",
        )


def _gloo(measured: NetworkMeasurements) -> Iterator[Finding]:
    share, pair = _gloo_share(measured)
    if pair is not None and share < GLOO_SHARE_LOW:
        interface = measured.first.chosen.interface
        yield Finding(
            "gloo_below_tcp",
            f"Gloo reaches {share:.0%} of raw TCP ({_rate(pair.gloo_gbit_per_s or 0.0)} of "
            f"{_rate(pair.tcp_gbit_per_s or 0.0)} between {measured.names(pair)}): the limit is not the "
            "link but Gloo's one thread per interface. Leave a core for it (lower OMP_NUM_THREADS), name the interface "
            f"twice (GLOO_SOCKET_IFNAME={interface},{interface}) to get a second thread, and use nccl for tensors on "
            "GPUs",
        )


def _nominal(measured: NetworkMeasurements) -> Iterator[Finding]:
    """Compares each pair with the slower of its two cards, and each host by its best pair."""
    best: dict[int, tuple[float, Pair]] = {}
    for pair in measured.pairs:
        nominal = _slower_card(measured, pair).interface.speed_mbit_per_s
        if nominal and (rate := pair.best_tcp_gbit_per_s):
            for host in (pair.a, pair.b):
                best[host] = max(best.get(host, (0.0, pair)), (rate / (1e-3 * nominal), pair), key=lambda each: each[0])
    share, pair = min(best.values(), key=lambda each: each[0], default=(1.0, None))
    if pair is not None and share < NOMINAL_SHARE:
        slower = _slower_card(measured, pair)
        name = slower.chosen.interface
        yield Finding(
            "below_nominal",
            f"{name} of {slower.label} is a {_rate(1e-3 * (slower.interface.speed_mbit_per_s or 0))} link, but TCP "
            f"reaches {_rate(pair.best_tcp_gbit_per_s or 0.0)} between {measured.names(pair)}: a slower "
            "link on the path, other traffic, a limit of the cloud's machine type, or the CPU is the limit. Compare "
            f"with `iperf3 -P 8`; large frames (`ip link set {name} mtu 9000`, on all hosts and switches) "
            "relieve the CPU",
        )


def _slower_card(measured: NetworkMeasurements, pair: Pair) -> HostInterfaces:
    """Returns the host with the slower card; one of unknown speed may be the slower one."""
    return min((measured.hosts[pair.a], measured.hosts[pair.b]), key=lambda each: each.interface.speed_mbit_per_s or 0)


def _latency(measured: NetworkMeasurements) -> Iterator[Finding]:
    latencies = [pair.latency_us for pair in measured.pairs if pair.latency_us is not None]
    usual = statistics.median(latencies) if latencies else 0.0
    if usual >= LATENCY_HIGH_US:
        hops = 2 * (len(measured.hosts) - 1)
        yield Finding(
            "high_latency",
            f"A message takes {format_time(usual * 1e3)} one way; hosts of one data centre have 0.02 to 0.15 ms. An "
            f"all-reduce of {len(measured.hosts)} hosts has {hops} such hops, {format_time(hops * usual * 1e3)} before "
            "any bytes count. Use hosts of one zone. Otherwise use few large blocks (a larger bucket_cap_mb for DDP; "
            "gradcast takes latency into account) and gradient accumulation",
        )


def _link_rate(measured: NetworkMeasurements) -> Iterator[Finding]:
    share, pair = _gloo_share(measured)
    if pair is None:
        return
    rate = _rate(statistics.median(measured.best_by_host.values()))
    fewer = "gradcast.Options(wire='bf16'), gradient accumulation" if measured.narrow_saves else "gradient accumulation"
    if share < GLOO_SHARE_GOOD:
        yield Finding(
            "link_and_gloo",
            f"Gloo reaches {share:.0%} of raw TCP, {rate} per host; it spends the rest on summing, copying and "
            f"announcing. The link is most of the limit, so fewer bytes help most ({fewer}). A core for Gloo's "
            "thread (a lower OMP_NUM_THREADS) may help a little",
        )
    else:
        yield Finding(
            "link_rate",
            f"The link's bandwidth is the limit: Gloo reaches {min(share, 1.0):.0%} of raw TCP, {rate} per host. No "
            f"setting changes that. Send fewer bytes ({fewer}), or use a faster network",
        )


def _unmeasured_interfaces(measured: NetworkMeasurements) -> Iterator[Finding]:
    host = next((each for each in measured.hosts.values() if each.chosen.others), None)
    if host is not None:
        yield Finding(
            "unmeasured_interface",
            f"TCP was measured over {host.chosen.interface} only; Gloo also uses {' and '.join(host.chosen.others)} in "
            "turn, because GLOO_SOCKET_IFNAME names them",
        )


def _other_backend(measured: NetworkMeasurements) -> Iterator[Finding]:
    if not measured.is_gloo:
        yield Finding(
            "other_backend",
            f"The training's gradients are sent over {measured.backend}, but this check measures Gloo on the CPU, "
            "including the all-reduce. Raw TCP shows what the network carries, but not what "
            f"{measured.backend} makes of it",
        )


def _gloo_share(measured: NetworkMeasurements) -> tuple[float, Pair | None]:
    """Returns the median share of raw TCP that Gloo reaches, and the pair that has it; no pair for another backend."""
    shares = [
        (pair.gloo_gbit_per_s / pair.tcp_gbit_per_s, index)
        for index, pair in enumerate(measured.pairs)
        if pair.gloo_gbit_per_s and pair.tcp_gbit_per_s and measured.is_gloo
    ]
    if not shares:
        return 0.0, None
    share, index = statistics.median_low(shares)
    return share, measured.pairs[index]


def _usual(best: Mapping[int, float]) -> float:
    return statistics.median_high(best.values()) if best else 0.0


def _suspects(measured: NetworkMeasurements) -> set[int]:
    """Returns the hosts that seem slow; none of two hosts, where the slow one is unknown."""
    best = measured.best_by_host
    return {host for host, rate in best.items() if len(best) > 2 and rate < SLOW_SHARE * _usual(best)}


def _rate(gbit_per_s: float) -> str:
    return format_bandwidth(1e9 * gbit_per_s)
