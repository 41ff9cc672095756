"""Options that choose networks: derived from bandwidth and latency, published ones, a link file, or the profile's own
link.
"""

import argparse
import itertools
from dataclasses import dataclass, replace

from gradcast import _core
from gradcast.cli.common import BANDWIDTH, TIME, WORKERS_MAX, argument, list_of, option, renamed, whole_number
from gradcast.errors import Error
from gradcast.files import load_link
from gradcast.scaling.growth import ALGORITHMS, hop
from gradcast.units import format_bandwidth, format_time, parse_time_ns

WIRES = ("bf16", "fp16")
_LATENCY = "50us"  # one hop of Ethernet with TCP, as in the tables of docs/
_INTRA_LATENCY = "5us"
_DERIVED = ("workers", "latency", "algorithm", "workers_per_node", "intra_bandwidth", "intra_latency")


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
    option(group, "--link", "JSON", "file with a link model, for instance from `gradcast dev link fit`")
    option(
        group,
        "--bandwidth",
        "LIST",
        "bandwidth of each worker's own connection: 10gbit or 1gbit,25gbit",
        list_of(BANDWIDTH),
    )
    counts = "number of workers: 8 or 2,8,64 (default: the profile's world size)"
    option(group, "--workers", "LIST", counts, list_of(whole_number(1, WORKERS_MAX)))
    option(group, "--latency", "TIME", f"latency of one hop (default: {_LATENCY})", TIME)
    algorithms = f"algorithm of the all-reduce: {', '.join(ALGORITHMS)} (default: ring)"
    option(group, "--algorithm", "LIST", algorithms, list_of(argument(_algorithm)))
    option(group, "--workers-per-node", "N", "hierarchical: workers of one node", whole_number(1, WORKERS_MAX))
    inside = "hierarchical: bandwidth between workers of one node; --bandwidth is then that of a node"
    option(group, "--intra-bandwidth", "BANDWIDTH", inside, BANDWIDTH)
    inside = f"hierarchical: latency of a hop inside a node (default: {_INTRA_LATENCY})"
    option(group, "--intra-latency", "TIME", inside, TIME)
    wire = "send fp32 gradients as 16-bit numbers, as gradcast.Options(wire=...) does: halves the cost per byte"
    option(group, "--wire", None, wire, choices=WIRES)
    renamed(group, topology="--algorithm")


def _algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        raise Error(f"there is no algorithm {text}; there are {', '.join(ALGORITHMS)}")
    return text


def given(args: argparse.Namespace, *names: str) -> list[str]:
    """Returns the options among ``names`` that the user gave, as they are written."""
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) is not None]


def has_network(args: argparse.Namespace) -> bool:
    return bool(given(args, "network", "link", "bandwidth", "wire", *_DERIVED))


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
    found = [Network(named.link, f"{named.name} ({named.summary})") for named in _published(args.network or [])]
    if args.link is not None:
        found.append(Network(load_link(args.link), f"the link of {args.link}"))
    if args.bandwidth is not None:
        found += _derived(args, profile)
    if not found:
        found = [_own(profile)]
    if args.wire is None:
        return found
    words = f", {args.wire} on the wire"
    return [replace(each, link=each.link.scaled(1, 0.5), description=each.description + words) for each in found]


def _without_bandwidth(args: argparse.Namespace, option_: str) -> str:
    """What to do about an option of derived networks that was given without --bandwidth."""
    if not (sources := given(args, "network", "link")):
        return f"{option_} needs --bandwidth"
    known = [named.name for named in _core.networks()]
    meant = [f"{name}-{count}" for name in args.network or [] for count in args.workers or []]
    names = ",".join(name for name in meant if name in known)
    return f"{sources[0]} has its own costs; leave out {option_}" + (f" and write --network {names}" if names else "")


def _published(names: list[str]) -> list[_core.NamedNetwork]:
    """A name without a number of workers, such as 10gbe, stands for the networks of all numbers."""
    found = {}
    for name in names:
        family = [named for named in _core.networks() if named.name.rpartition("-")[0] == name]
        found |= {named.name: named for named in family or [_core.network(name)]}
    return list(found.values())


def _own(profile: _core.Profile) -> Network:
    if profile.link is None:
        raise Error(
            f"the profile {profile.name} has no link; choose a network with --bandwidth 10gbit --workers 8, "
            "or with --network NAME (`gradcast dev published-networks` lists them)"
        )
    return Network(profile.link, "the profile's own link")


def _derived(args: argparse.Namespace, profile: _core.Profile) -> list[Network]:
    if args.workers is None and profile.world_size == 1:
        raise Error("the number of workers is missing; give it, for instance with --workers 8")
    algorithms = args.algorithm or ["ring"]
    inside = given(args, "workers_per_node", "intra_bandwidth", "intra_latency")
    if inside and "hierarchical" not in algorithms:
        raise Error(f"{inside[0]} only works with --algorithm hierarchical; leave it out for a {algorithms[0]}")
    points = itertools.product(
        dict.fromkeys(algorithms), sorted({*(args.workers or [profile.world_size])}), sorted({*args.bandwidth})
    )
    return [_network(args, *point) for point in points]


def _network(args: argparse.Namespace, algorithm: str, worker_count: int, bandwidth_bits_per_s: float) -> Network:
    latency_ns = latency_ns_of(args)
    outside = hop(bandwidth_bits_per_s, latency_ns)
    costs = f"{format_bandwidth(bandwidth_bits_per_s)}, {format_time(latency_ns)} per hop"
    if algorithm == "hierarchical":
        link, nodes = _hierarchical(args, worker_count, outside)
        words = f"hierarchical, {nodes}, {costs}, {format_bandwidth(args.intra_bandwidth)} inside"
    else:
        link = {"ring": _core.ring_link, "tree": _core.tree_link}[algorithm](outside, worker_count)
        words = f"{algorithm} of {worker_count} worker{'' if worker_count == 1 else 's'}, {costs}"
    return Network(link, words, worker_count, algorithm, bandwidth_bits_per_s, latency_ns)


def _hierarchical(args: argparse.Namespace, worker_count: int, outside: _core.Hop) -> tuple[_core.LinkModel, str]:
    per_node = args.workers_per_node
    if per_node is None or args.intra_bandwidth is None:
        raise Error(
            "--algorithm hierarchical needs --workers-per-node and --intra-bandwidth, for instance 4 and 100GB/s"
        )
    if worker_count % per_node != 0:
        raise Error(f"--workers {worker_count} is not a multiple of --workers-per-node {per_node}")
    link = _core.hierarchical_link(
        intra_node=intra_hop(args), inter_node=outside, node_count=worker_count // per_node, workers_per_node=per_node
    )
    return link, f"{worker_count // per_node} nodes of {per_node} workers"


def latency_ns_of(args: argparse.Namespace) -> float:
    return parse_time_ns(_LATENCY) if args.latency is None else args.latency


def intra_hop(args: argparse.Namespace) -> _core.Hop:
    """The connection inside a node. REQUIRES: --intra-bandwidth is given."""
    latency_ns = parse_time_ns(_INTRA_LATENCY) if args.intra_latency is None else args.intra_latency
    return hop(args.intra_bandwidth, latency_ns)
