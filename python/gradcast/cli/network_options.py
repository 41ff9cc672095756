"""Options that choose networks: bandwidth and latency, published ones, a link file, or the profile's own link."""

import argparse
import itertools
from dataclasses import dataclass, replace

from gradcast import _core
from gradcast.cli.common import (
    BANDWIDTH,
    TIME,
    WORKERS_MAX,
    argument,
    list_of,
    not_empty,
    option,
    whole_number,
)
from gradcast.comparison.measured_exchange import exchange_of
from gradcast.errors import Error
from gradcast.files import load_link
from gradcast.host_traffic import FLAT, NARROW_WIRES, RING, TWO_LEVEL, WIRE_SHARES, Hosts, exchange_form, wire_cost
from gradcast.scaling.growth import ALGORITHMS, hop
from gradcast.units import format_bandwidth, format_time, parse_bandwidth_bits_per_s, parse_time_ns

_LATENCY = "50us"  # one hop of Ethernet with TCP, as in the tables of docs/
_INTRA_LATENCY, _INTRA_BANDWIDTH = "5us", "10GB/s"  # about what PCIe, or copying in memory, carries
_DERIVED = ("workers", "latency", "algorithm", "intra_bandwidth", "intra_latency")
_HOSTS = ("hosts", "ranks_per_host")


@dataclass(frozen=True)
class Network:
    """The last four fields are None if the costs were given and not derived."""

    link: _core.LinkModel
    description: str
    worker_count: int | None = None
    algorithm: str | None = None
    bandwidth_bits_per_s: float | None = None
    latency_ns: float | None = None


def add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network (without these options: the profile's own link)")
    names = "published networks, separated by commas; `gradcast dev published-networks` lists them"
    option(group, "--network", "NAMES", names, list_of(str), action="extend")
    link = "file with a link model, for instance from `gradcast dev link fit`, or results of `gradcast network --bench`"
    option(group, "--link", "JSON", link, not_empty)
    option(
        group,
        "--bandwidth",
        "LIST",
        "bandwidth of each host's connection: 10gbit or 1gbit,25gbit",
        list_of(BANDWIDTH),
    )
    counts = "number of workers: 8 or 2,8,64 (default: the profile's world size)"
    option(group, "--workers", "LIST", counts, list_of(whole_number(1, WORKERS_MAX)))
    option(group, "--latency", "TIME", f"latency of one hop (default: {_LATENCY})", TIME)
    algorithms = f"algorithm of the all-reduce: {', '.join(ALGORITHMS)} (default: ring)"
    option(group, "--algorithm", "LIST", algorithms, list_of(argument(_algorithm)))
    hosts = "number of hosts, in place of --workers: 4 or 2,4,8"
    option(group, "--hosts", "LIST", hosts, list_of(whole_number(1, WORKERS_MAX)))
    ranks = (
        "workers of one host, which share its connection (default: 1); with more, ring and hierarchical are compared"
    )
    option(group, "--ranks-per-host", "N", ranks, whole_number(1, WORKERS_MAX))
    inside = f"hierarchical: bandwidth between workers of one host (default: {_INTRA_BANDWIDTH})"
    option(group, "--intra-bandwidth", "BANDWIDTH", inside, BANDWIDTH)
    inside = f"hierarchical: latency of a hop inside a host (default: {_INTRA_LATENCY})"
    option(group, "--intra-latency", "TIME", inside, TIME)
    wire = "send fp32 gradients as 16- or 8-bit numbers, as gradcast.Options(wire=...) does: fewer bytes leave a host"
    option(group, "--wire", None, wire, choices=NARROW_WIRES)


def _algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        raise Error(f"there is no algorithm {text}; there are {', '.join(ALGORITHMS)}")
    return text


def given(args: argparse.Namespace, *names: str) -> list[str]:
    """Returns the options among ``names`` that the user gave, as they are written."""
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) is not None]


def has_network(args: argparse.Namespace) -> bool:
    return bool(given(args, "network", "link", "bandwidth", "wire", *_HOSTS, *_DERIVED))


def network_from(args: argparse.Namespace, profile: _core.Profile) -> Network:
    found = networks_from(args, profile)
    if len(found) > 1:
        raise Error(f"the options describe {len(found)} networks, and this command takes one; give one of each")
    return found[0]


def networks_from(args: argparse.Namespace, profile: _core.Profile) -> list[Network]:
    """Returns the networks that the options describe, in the order of a table; or else the profile's own link."""
    derived = given(args, *_DERIVED)
    if derived and args.bandwidth is None:
        why = _without_bandwidth(args, derived[0])
        raise Error(f"{why}, or predict other numbers of workers with `gradcast simulate --scaling`")
    if args.bandwidth is None and args.wire is None and (on_hosts := given(args, *_HOSTS)):
        raise Error(f"{on_hosts[0]} needs --bandwidth or --wire")
    found = [
        # These are networks of GPUs, between which a wire format goes on one level.
        _narrowed(args, Network(named.link, f"{named.name} ({named.summary})"), named.world_size, FLAT, RING)
        for named in _published(args.network or [])
    ]
    if args.link is not None:
        network = Network(load_link(args.link), f"the link of {args.link}")
        found.append(_narrowed(args, network, max(worker_counts(args) or [profile.world_size])))
    if args.bandwidth is not None:
        found += _derived(_placed(args, profile), profile)
    return found or [_own(args, profile)]


def _placed(args: argparse.Namespace, profile: _core.Profile) -> argparse.Namespace:
    """The options, with the hosts and the algorithm of the profile's measurement where they name no others."""
    exchange = exchange_of(profile)
    others = [count for count in args.workers or [] if count != profile.world_size]
    if exchange is None or exchange.hosts.count == 1 or others or given(args, *_HOSTS):
        return args
    per_host = exchange.hosts.ranks_per_host
    if per_host in (None, 1):
        return args
    algorithm = args.algorithm or ["hierarchical" if exchange.form == TWO_LEVEL else "ring"]
    placed = {"ranks_per_host": per_host, "algorithm": algorithm}
    return argparse.Namespace(**vars(args) | placed)


def worker_counts(args: argparse.Namespace) -> list[int]:
    """Returns the numbers of workers that the user gave, by themselves or by hosts; an empty list if none."""
    if args.hosts is None:
        return args.workers or []
    if args.workers is not None:
        raise Error("--hosts times --ranks-per-host is the number of workers; omit --workers")
    counts = [count * (args.ranks_per_host or 1) for count in args.hosts]
    if max(counts) > WORKERS_MAX:
        raise Error(f"{max(counts)} workers are too many; {WORKERS_MAX} are the most")
    return counts


def _hosts(args: argparse.Namespace, worker_count: int) -> Hosts:
    per_host = args.ranks_per_host or 1
    if args.hosts is not None and worker_count not in worker_counts(args):
        counts = " and ".join(map(str, args.hosts))
        raise Error(f"{counts} hosts of {per_host} ranks are not the {worker_count} workers of this network")
    if worker_count % per_host:
        raise Error(f"{worker_count} workers are not a multiple of --ranks-per-host {per_host}; give --hosts")
    return Hosts.even(worker_count // per_host, per_host)


def _narrowed(
    args: argparse.Namespace,
    network: Network,
    worker_count: int,
    form: str | None = None,
    fp32_form: str | None = None,
    hosts: Hosts | None = None,
) -> Network:
    """The network with the wire format, if one is given. ``form``, ``fp32_form``: see ``wire_cost``; the latter is what
    the network's costs are of. ``hosts``: None for those of the options."""
    if args.wire is None:
        return network
    hosts = hosts or _hosts(args, worker_count)
    cost = wire_cost(hosts, args.wire, form, fp32_form)
    words = f", {args.wire} on the wire"
    if hosts.ranks_per_host != 1:
        where = "" if form == FLAT else "for gradients in host memory "
        words += f" ({where}{cost:.2f} times fp32's cost per byte)"
    return replace(network, link=network.link.scaled(1, cost), description=network.description + words)


def _without_bandwidth(args: argparse.Namespace, option_: str) -> str:
    """Explains an option of derived networks that was given without --bandwidth."""
    if not (sources := given(args, "network", "link")):
        return f"{option_} needs --bandwidth"
    known = [named.name for named in _core.networks()]
    meant = [f"{name}-{count}" for name in args.network or [] for count in args.workers or []]
    names = ",".join(name for name in meant if name in known)
    return f"{sources[0]} has its own costs; omit {option_}" + (f" and write --network {names}" if names else "")


def _published(names: list[str]) -> list[_core.NamedNetwork]:
    """A name without a number of workers, such as 10gbe, stands for the networks of all numbers."""
    found: dict[str, _core.NamedNetwork] = {}
    for name in names:
        family = [named for named in _core.networks() if named.name.rpartition("-")[0] == name]
        found |= {named.name: named for named in family or [_core.network(name)]}
    return list(found.values())


def _own(args: argparse.Namespace, profile: _core.Profile) -> Network:
    if profile.link is None:
        raise Error(
            f"the profile {profile.name} has no link; choose a network with --bandwidth 10gbit --workers 8, "
            "or with --network NAME (`gradcast dev published-networks` lists them)"
        )
    exchange = exchange_of(profile)
    if exchange is None:
        return _narrowed(args, Network(profile.link, "the profile's own link"), profile.world_size)
    if args.wire is not None and exchange.wire != "fp32":
        raise Error(f"the profile's link was measured with {exchange.wire} on the wire; omit --wire")
    network = Network(profile.link, f"the profile's own link, measured on {exchange.describe()}")
    if given(args, *_HOSTS):
        return _narrowed(args, network, profile.world_size)
    # A ring on hosts with several ranks was measured on devices, or on uneven hosts.
    form = FLAT if exchange.form == RING and exchange.hosts.count > 1 else None
    return _narrowed(args, network, profile.world_size, form, exchange.form, exchange.hosts)


def _derived(args: argparse.Namespace, profile: _core.Profile) -> list[Network]:
    counts = worker_counts(args)
    if not counts and profile.world_size == 1:
        raise Error("the number of workers is missing; give it, for instance with --workers 8")
    algorithms = args.algorithm or _compared(args)
    inside = given(args, "intra_bandwidth", "intra_latency")
    if inside and "hierarchical" not in algorithms:
        raise Error(f"{inside[0]} only works with --algorithm hierarchical; omit it for a {algorithms[0]}")
    points = itertools.product(
        dict.fromkeys(algorithms), sorted({*(counts or [profile.world_size])}), sorted({*args.bandwidth})
    )
    return [_network(args, *point) for point in points]


def _compared(args: argparse.Namespace) -> list[str]:
    """Returns the algorithms if the user names none: with a wire format, the one that gradcast takes."""
    per_host = args.ranks_per_host or 1
    if per_host == 1:
        return ["ring"]
    if args.wire is None:
        return ["ring", "hierarchical"]
    return ["hierarchical" if exchange_form(Hosts.even(2, per_host), args.wire) == TWO_LEVEL else "ring"]


def _network(args: argparse.Namespace, algorithm: str, worker_count: int, bandwidth_bits_per_s: float) -> Network:
    latency_ns = latency_ns_of(args)
    hosts, outside = _hosts(args, worker_count), hop(bandwidth_bits_per_s, latency_ns)
    costs = f"{format_bandwidth(bandwidth_bits_per_s)}, {format_time(latency_ns)} per hop"
    known = (worker_count, algorithm, bandwidth_bits_per_s, latency_ns)
    if algorithm == "hierarchical":
        link, words = _hierarchical(args, hosts, outside)
        return Network(link, f"hierarchical, {hosts.describe()}, {costs}, {words}", *known)
    link = {"ring": _core.ring_link, "tree": _core.tree_link}[algorithm](outside, worker_count)
    on_hosts = f" on {hosts.describe()}" if (hosts.ranks_per_host or 1) > 1 else ""
    words = f"{algorithm} of {worker_count} worker{'' if worker_count == 1 else 's'}{on_hosts}, {costs}"
    return _narrowed(args, Network(link, words, *known), worker_count, FLAT, RING)


def _hierarchical(args: argparse.Namespace, hosts: Hosts, outside: _core.Hop) -> tuple[_core.LinkModel, str]:
    if args.ranks_per_host is None:
        raise Error("--algorithm hierarchical needs --ranks-per-host, for instance 4")
    inside, wire = intra_hop(args), args.wire or "fp32"
    bandwidth = outside.bandwidth_bytes_per_s / WIRE_SHARES[wire]  # numbers are narrow between hosts only
    link = _core.hierarchical_link(
        intra_node=inside,
        inter_node=_core.Hop(latency_ns=outside.latency_ns, bandwidth_bytes_per_s=bandwidth),
        node_count=hosts.count,
        workers_per_node=args.ranks_per_host,
    )
    words = f"{format_bandwidth(8 * inside.bandwidth_bytes_per_s)} inside"
    return link, words + (f", {wire} on the wire" if args.wire else "")


def latency_ns_of(args: argparse.Namespace) -> float:
    return parse_time_ns(_LATENCY) if args.latency is None else args.latency


def intra_hop(args: argparse.Namespace) -> _core.Hop:
    latency_ns = parse_time_ns(_INTRA_LATENCY) if args.intra_latency is None else args.intra_latency
    bandwidth = args.intra_bandwidth or parse_bandwidth_bits_per_s(_INTRA_BANDWIDTH)
    return hop(bandwidth, latency_ns)
