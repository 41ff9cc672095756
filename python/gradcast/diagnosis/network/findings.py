"""From what the network check has measured to findings: what limits the network, and which setting to change.

Pure. Thread safety: pure; any thread.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from gradcast.units import format_bandwidth, format_time

# Measurements of a quarter of a second differ by a few per cent from one to the next; whoever acts on a finding should
# gain more than that. Several streams gain a quarter only where one is held back: by its window, or by a limit per
# connection, as clouds have it.
SEVERAL_STREAMS_GAIN = 1.25
# Gloo adds and copies, and announces each message first: on a good network it reaches 80 to 95 % of raw TCP.
GLOO_SHARE_LOW = 0.65
GLOO_SHARE_GOOD = 0.8
# Links come in steps (1, 2.5, 10, 25 Gbit/s): what belongs to a lower one has half the speed, or less; traffic of
# others takes a little here and there.
SLOW_SHARE = 0.75
FASTER_INTERFACE_GAIN = 1.5
# TCP reaches 94 % of an Ethernet's nominal speed. At half of it something else is the limit.
NOMINAL_SHARE = 0.5
# One way. Hosts in one data centre are 20 to 150 us apart, hosts of one region up to 1 ms; an all-reduce of n hosts has
# 2 (n - 1) hops one after the other, so that with 1 ms every block of four hosts starts with 6 ms.
LATENCY_HIGH_US = 1000.0


@dataclasses.dataclass(frozen=True)
class Finding:
    key: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Host:
    """``label`` names it in sentences. ``speed_mbit_per_s``: the chosen interface's nominal speed, None where unknown.
    ``physical_others``: interfaces of hardware that are up and have an address. ``connections``: Gloo's, to each
    other rank. ``unmeasured``: interfaces that Gloo uses besides the chosen one."""

    label: str
    interface: str
    speed_mbit_per_s: int | None = None
    physical: bool = True
    physical_others: tuple[str, ...] = ()
    connections: int = 1
    unmeasured: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Pair:
    """``a`` and ``b``: indices of hosts. A rate is that of the slower direction, in bits per second; None where it
    could not be measured, and ``fault`` says why. ``alpha_us``, ``beta_ns_per_byte``: what a message over Gloo takes,
    by its size."""

    a: int
    b: int
    latency_us: float | None = None
    tcp_bits_per_s: float | None = None
    streams_bits_per_s: float | None = None
    gloo_bits_per_s: float | None = None
    alpha_us: float | None = None
    beta_ns_per_byte: float | None = None
    fault: str | None = None

    @property
    def best_tcp_bits_per_s(self) -> float | None:
        return max((rate for rate in (self.tcp_bits_per_s, self.streams_bits_per_s) if rate), default=None)


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another interface, tried between the first two hosts, beside what the chosen one reached there."""

    interface: str
    bits_per_s: float
    chosen_bits_per_s: float


@dataclasses.dataclass(frozen=True)
class Measured:
    """``hosts``: those of the pairs. One host alone has a pair of its ranks, which is not judged: nothing between them
    is a network. ``backend``: which carries the training's gradients. ``streams``: how many "several" are."""

    hosts: Sequence[Host]
    pairs: Sequence[Pair]
    backend: str = "gloo"
    streams: int = 4
    one_host: bool = False
    alternatives: Sequence[Alternative] = ()


def findings(measured: Measured) -> list[Finding]:
    """The most serious first, and last what the numbers do not tell. Where nothing else is found, how far the link is
    the limit."""
    if measured.one_host:
        return _other_backend(measured)
    found = [*_unmeasured(measured), *_interface(measured), *_slow_hosts(measured), *_unjudged_hosts(measured)]
    found += [*_slow_pairs(measured), *_one_connection(measured), *_gloo(measured), *_nominal(measured)]
    found += _latency(measured)
    return [*(found or _link_rate(measured)), *_unmeasured_interfaces(measured), *_other_backend(measured)]


def _unmeasured(measured: Measured) -> list[Finding]:
    faults = [pair.fault for pair in measured.pairs if pair.fault]
    if not faults:
        return []
    sentence = (
        f"{len(faults)} of {len(measured.pairs)} pairs could not be measured over TCP ({faults[0]}); a firewall that "
        "lets only some ports through does this, and Gloo, too, needs all ports between the hosts"
    )
    return [Finding("unmeasured", sentence)]


def _interface(measured: Measured) -> list[Finding]:
    return _slow_interface(measured) or _virtual_interface(measured)


def _slow_interface(measured: Measured) -> list[Finding]:
    better = max(measured.alternatives, key=lambda each: each.bits_per_s, default=None)
    if better is None or better.bits_per_s < FASTER_INTERFACE_GAIN * better.chosen_bits_per_s:
        return []
    sentence = (
        f"{measured.hosts[0].interface} is used and reaches {format_bandwidth(better.chosen_bits_per_s)}; "
        f"{better.interface} connects the hosts as well and reaches {format_bandwidth(better.bits_per_s)}: set "
        f"{_variable(measured)}={better.interface} on all hosts"
    )
    return [Finding("slow_interface", sentence)]


def _virtual_interface(measured: Measured) -> list[Finding]:
    host = next((each for each in measured.hosts if not each.physical and each.physical_others), None)
    if host is None:
        return []
    sentence = (
        f"{host.label} uses {host.interface}, a virtual interface (of containers, a bridge or a tunnel), though it has "
        f"{' and '.join(host.physical_others)}: software handles its packets, which costs a core and speed. If the "
        f"hosts reach each other there, set {_variable(measured)}={host.physical_others[0]}"
    )
    return [Finding("virtual_interface", sentence)]


def _slow_hosts(measured: Measured) -> list[Finding]:
    best = _best_by_host(measured)
    usual = _usual(best)
    return [
        Finding(
            "slow_host",
            f"{measured.hosts[host].label} reaches {format_bandwidth(best[host])} at best, the other hosts "
            f"{format_bandwidth(usual)}: every all-reduce waits for it. Look at its link (`ethtool "
            f"{measured.hosts[host].interface}`: speed, duplex, errors), at its switch port and at what else uses "
            "them, or train without it",
        )
        for host in sorted(_slow(measured, best))
    ]


def _unjudged_hosts(measured: Measured) -> list[Finding]:
    best = _best_by_host(measured)
    hosts = [measured.hosts[host].label for host in sorted(_suspects(best) - _slow(measured, best))]
    if not hosts:
        return []
    sentence = (
        f"{' and '.join(hosts)}: measured only with hosts that seem slow themselves, so that nobody can tell what "
        "belongs to which. Check again without the slow ones"
    )
    return [Finding("unjudged_host", sentence)]


def _slow_pairs(measured: Measured) -> list[Finding]:
    """Of hosts that are not slow themselves."""
    best = _best_by_host(measured)
    suspects = _suspects(best)
    found = []
    for pair in measured.pairs:
        rate = pair.best_tcp_bits_per_s
        if rate is None or suspects & {pair.a, pair.b}:
            continue
        usual = min(best[pair.a], best[pair.b])
        if rate < SLOW_SHARE * usual:
            found.append(_slow_pair(measured, pair, rate, usual))
    return found


def _slow_pair(measured: Measured, pair: Pair, rate: float, usual: float) -> Finding:
    return Finding(
        "slow_pair",
        f"{measured.hosts[pair.a].label} and {measured.hosts[pair.b].label} reach {format_bandwidth(rate)} with each "
        f"other, but {format_bandwidth(usual)} with others: the way between them is slow (a switch or a route that "
        "they alone share, or its traffic). Number the ranks so that they are no neighbours: a ring sends between "
        "neighbours only",
    )


def _one_connection(measured: Measured) -> list[Finding]:
    pairs = [pair for pair in measured.pairs if pair.tcp_bits_per_s and pair.streams_bits_per_s]
    host, count = measured.hosts[0], measured.streams
    if not pairs or not _is_gloo(measured) or host.connections >= count:
        return []
    one = statistics.median(pair.tcp_bits_per_s or 0.0 for pair in pairs)
    several = statistics.median(pair.streams_bits_per_s or 0.0 for pair in pairs)
    if several < SEVERAL_STREAMS_GAIN * one:
        return []
    sentence = (
        f"One TCP connection reaches {format_bandwidth(one)}, {count} reach {format_bandwidth(several)}, and Gloo has "
        f"{host.connections} between two ranks: set GLOO_SOCKET_IFNAME={','.join([host.interface] * count)}, which "
        f"gives it {count}. Each operation uses one of them, so they help where several are under way: DDP's buckets, "
        f"or gradcast.Options(in_flight={count}). Where a connection's window is the limit, larger net.ipv4.tcp_rmem "
        "and tcp_wmem help each of them"
    )
    return [Finding("one_connection", sentence)]


def _gloo(measured: Measured) -> list[Finding]:
    share, pair = _gloo_share(measured)
    if pair is None or not _is_gloo(measured) or share >= GLOO_SHARE_LOW:
        return []
    interface = measured.hosts[0].interface
    sentence = (
        f"Gloo reaches {min(share, 1.0):.0%} of raw TCP ({format_bandwidth(pair.gloo_bits_per_s or 0.0)} of "
        f"{format_bandwidth(pair.tcp_bits_per_s or 0.0)} between {measured.hosts[pair.a].label} and "
        f"{measured.hosts[pair.b].label}): not the link is the limit, but Gloo's one thread per interface. Leave it a "
        f"core (a smaller OMP_NUM_THREADS), name the interface twice (GLOO_SOCKET_IFNAME={interface},{interface}) for "
        "a second thread, and use nccl for tensors on GPUs"
    )
    return [Finding("gloo_below_tcp", sentence)]


def _nominal(measured: Measured) -> list[Finding]:
    """A pair is held against the slower of its two cards, and a host against its best pair."""
    best: dict[int, tuple[float, Pair]] = {}
    for pair in measured.pairs:
        nominal = _slower_card(measured, pair).speed_mbit_per_s
        if nominal and (rate := pair.best_tcp_bits_per_s):
            for host in (pair.a, pair.b):
                best[host] = max(best.get(host, (0.0, pair)), (rate / (1e6 * nominal), pair), key=lambda each: each[0])
    share, worst = min(best.values(), key=lambda each: each[0], default=(1.0, None))
    return [] if worst is None or share >= NOMINAL_SHARE else [_below_nominal(measured, worst)]


def _slower_card(measured: Measured, pair: Pair) -> Host:
    """One of unknown speed may be the slower one."""
    return min((measured.hosts[pair.a], measured.hosts[pair.b]), key=lambda each: each.speed_mbit_per_s or 0)


def _below_nominal(measured: Measured, pair: Pair) -> Finding:
    host = _slower_card(measured, pair)
    return Finding(
        "below_nominal",
        f"{host.interface} of {host.label} is a link of {format_bandwidth(1e6 * (host.speed_mbit_per_s or 0))}, and "
        f"TCP reaches {format_bandwidth(pair.best_tcp_bits_per_s or 0.0)} between {measured.hosts[pair.a].label} and "
        f"{measured.hosts[pair.b].label}: a slower link on the way, other traffic, a limit of the cloud's "
        "machine type, or the processor is the limit. Compare with `iperf3 -P 8`; large frames (`ip link set "
        f"{host.interface} mtu 9000`, on all hosts and switches) spare the processor",
    )


def _latency(measured: Measured) -> list[Finding]:
    latencies = [pair.latency_us for pair in measured.pairs if pair.latency_us is not None]
    usual = statistics.median(latencies) if latencies else 0.0
    if usual < LATENCY_HIGH_US:
        return []
    hops = 2 * (len(measured.hosts) - 1)
    sentence = (
        f"A message takes {format_time(usual * 1e3)} one way, where hosts of one data centre have 0.02 to 0.15 ms: an "
        f"all-reduce of {len(measured.hosts)} hosts has {hops} such hops, {format_time(hops * usual * 1e3)} before "
        "bytes count. Use hosts of one zone; where that cannot be, few large blocks (for DDP a larger bucket_cap_mb; "
        "gradcast plans with it) and accumulated gradients"
    )
    return [Finding("high_latency", sentence)]


def _link_rate(measured: Measured) -> list[Finding]:
    share, pair = _gloo_share(measured)
    if pair is None or not _is_gloo(measured):
        return []
    rate = format_bandwidth(statistics.median(_best_by_host(measured).values()))
    if share < GLOO_SHARE_GOOD:
        sentence = (
            f"Gloo reaches {share:.0%} of raw TCP, {rate} per host: the rest is what it adds, copies and announces. "
            "The link is most of the limit, so that fewer bytes help most (gradcast.Options(wire='bf16'), accumulated "
            "gradients); a core for Gloo's thread (a smaller OMP_NUM_THREADS) may give a little"
        )
        return [Finding("link_and_gloo", sentence)]
    sentence = (
        f"The link's rate is the limit: Gloo reaches {min(share, 1.0):.0%} of raw TCP, {rate} per host. No setting "
        "makes it faster; fewer bytes do (gradcast.Options(wire='bf16'), accumulated gradients), and so does a faster "
        "network"
    )
    return [Finding("link_rate", sentence)]


def _unmeasured_interfaces(measured: Measured) -> list[Finding]:
    host = next((each for each in measured.hosts if each.unmeasured), None)
    if host is None:
        return []
    sentence = (
        f"Of the interfaces that GLOO_SOCKET_IFNAME names, TCP was measured over {host.interface} alone; Gloo uses "
        f"{' and '.join(host.unmeasured)} as well, by turns"
    )
    return [Finding("unmeasured_interface", sentence)]


def _other_backend(measured: Measured) -> list[Finding]:
    if _is_gloo(measured):
        return []
    sentence = (
        f"The training's gradients travel over {measured.backend}; all that is called Gloo here, and the all-reduce, "
        f"is Gloo's over the CPU. Raw TCP tells what the network carries, and nothing here what {measured.backend} "
        "makes of it"
    )
    return [Finding("other_backend", sentence)]


def _gloo_share(measured: Measured) -> tuple[float, Pair | None]:
    """The median of what Gloo reaches of one raw stream, and the pair that it is of."""
    shares = [
        (pair.gloo_bits_per_s / pair.tcp_bits_per_s, index)
        for index, pair in enumerate(measured.pairs)
        if pair.gloo_bits_per_s and pair.tcp_bits_per_s
    ]
    if not shares:
        return 0.0, None
    share, index = statistics.median_low(shares)
    return share, measured.pairs[index]


def _best_by_host(measured: Measured) -> dict[int, float]:
    """What each host reaches in its best pair: only a host's own link makes all of its pairs slow."""
    best: dict[int, float] = {}
    for pair in measured.pairs:
        if rate := pair.best_tcp_bits_per_s:
            for host in (pair.a, pair.b):
                best[host] = max(best.get(host, 0.0), rate)
    return best


def _usual(best: Mapping[int, float]) -> float:
    return statistics.median_high(best.values()) if best else 0.0


def _suspects(best: Mapping[int, float]) -> set[int]:
    """Of two hosts nobody can tell which one it is."""
    return {host for host, rate in best.items() if len(best) > 2 and rate < SLOW_SHARE * _usual(best)}


def _slow(measured: Measured, best: Mapping[int, float]) -> set[int]:
    """Those that a host which is none shows to be slow: between two slow hosts a good one is slow, too."""
    suspects = _suspects(best)
    return {
        host
        for pair in measured.pairs
        for host, other in ((pair.a, pair.b), (pair.b, pair.a))
        if pair.best_tcp_bits_per_s and host in suspects and other not in suspects
    }


def _is_gloo(measured: Measured) -> bool:
    return measured.backend == "gloo"


def _variable(measured: Measured) -> str:
    return "GLOO_SOCKET_IFNAME" if _is_gloo(measured) else "NCCL_SOCKET_IFNAME"
