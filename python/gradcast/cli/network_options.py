"""Options that choose the network: derived from bandwidth and latency, a published one, a link file, or the
profile's own link.
"""

import argparse
from dataclasses import dataclass

from gradcast import _core
from gradcast.cli.common import BANDWIDTH, TIME, whole_number
from gradcast.errors import Error
from gradcast.files import load_link
from gradcast.scaling.growth import hop
from gradcast.units import format_bandwidth, format_time, parse_time_ns

WIRES = ("bf16", "fp16")
TOPOLOGIES = ("ring", "tree", "hierarchical")
WORKERS_MAX = 1_000_000
DEFAULT_LATENCY = "50us"  # one hop of Ethernet with TCP, as in the tables of docs/
_DEFAULT_INTRA_LATENCY = "5us"
_DERIVED = ("workers", "latency", "topology", "workers_per_node", "intra_bandwidth", "intra_latency")


@dataclass(frozen=True)
class Network:
    link: _core.LinkModel
    description: str
    worker_count: int | None = None  # None: unknown, because the costs were given and not derived


def add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network (without these options: the profile's own link)")
    group.add_argument("--network", metavar="NAME", help="name of a published network; `gradcast networks` lists them")
    group.add_argument("--link", metavar="JSON", help="file with a link model, for instance from `gradcast link fit`")
    group.add_argument(
        "--bandwidth",
        type=BANDWIDTH,
        metavar="RATE",
        help="bandwidth of one worker's connection: 10gbit, 1.25GB/s",
    )
    group.add_argument(
        "--workers",
        type=whole_number(1, WORKERS_MAX),
        metavar="N",
        help="number of workers (default: the profile's world size)",
    )
    group.add_argument("--latency", type=TIME, metavar="TIME", help=f"latency of one hop (default: {DEFAULT_LATENCY})")
    group.add_argument("--topology", choices=TOPOLOGIES, help="algorithm of the all-reduce (default: ring)")
    group.add_argument(
        "--workers-per-node",
        type=whole_number(1, WORKERS_MAX),
        metavar="N",
        help="hierarchical: number of workers in one node",
    )
    group.add_argument(
        "--intra-bandwidth",
        type=BANDWIDTH,
        metavar="RATE",
        help="hierarchical: bandwidth between workers of one node; --bandwidth is then that of a node",
    )
    group.add_argument(
        "--intra-latency",
        type=TIME,
        metavar="TIME",
        help=f"hierarchical: latency of a hop inside a node (default: {_DEFAULT_INTRA_LATENCY})",
    )
    group.add_argument(
        "--wire",
        choices=WIRES,
        help="send fp32 gradients as 16-bit numbers, as gradcast.Options(wire=...) does: halves the cost per byte",
    )


def derived_network(topology: str, worker_count: int, bandwidth_bits_per_s: float, latency_ns: float) -> Network:
    """Returns the network of a ring or a tree of equal connections."""
    formula = {"ring": _core.ring_link, "tree": _core.tree_link}[topology]
    link = formula(hop(bandwidth_bits_per_s, latency_ns), worker_count)
    workers = "1 worker" if worker_count == 1 else f"{worker_count} workers"
    return Network(
        link,
        f"{topology} of {workers}, {format_bandwidth(bandwidth_bits_per_s)}, {format_time(latency_ns)} per hop",
        worker_count,
    )


def _hierarchical(args: argparse.Namespace, worker_count: int, latency_ns: float) -> Network:
    per_node = args.workers_per_node
    if per_node is None or args.intra_bandwidth is None:
        raise Error(
            "--topology hierarchical needs --workers-per-node and --intra-bandwidth, for instance 4 and 100GB/s"
        )
    if worker_count % per_node != 0:
        raise Error(f"--workers {worker_count} is not a multiple of --workers-per-node {per_node}")
    intra_latency_ns = parse_time_ns(_DEFAULT_INTRA_LATENCY) if args.intra_latency is None else args.intra_latency
    link = _core.hierarchical_link(
        intra_node=hop(args.intra_bandwidth, intra_latency_ns),
        inter_node=hop(args.bandwidth, latency_ns),
        node_count=worker_count // per_node,
        workers_per_node=per_node,
    )
    return Network(
        link,
        f"hierarchical, {worker_count // per_node} nodes of {per_node} workers, {format_bandwidth(args.bandwidth)} and "
        f"{format_time(latency_ns)} between nodes, {format_bandwidth(args.intra_bandwidth)} inside",
        worker_count,
    )


def _given(args: argparse.Namespace) -> list[str]:
    return ["--" + name.replace("_", "-") for name in _DERIVED if getattr(args, name) is not None]


def _derived_from(args: argparse.Namespace, profile: _core.Profile) -> Network:
    worker_count = args.workers
    if worker_count is None:
        if profile.world_size == 1:
            raise Error("the number of workers is missing; give it, for instance with --workers 8")
        worker_count = profile.world_size
    latency_ns = parse_time_ns(DEFAULT_LATENCY) if args.latency is None else args.latency
    topology = args.topology or "ring"
    if topology == "hierarchical":
        return _hierarchical(args, worker_count, latency_ns)
    for option in ("workers_per_node", "intra_bandwidth", "intra_latency"):
        if getattr(args, option) is not None:
            raise Error(
                f"--{option.replace('_', '-')} only works with --topology hierarchical; leave it out for a {topology}"
            )
    return derived_network(topology, worker_count, args.bandwidth, latency_ns)


def has_network(args: argparse.Namespace) -> bool:
    sources = (args.network, args.link, args.bandwidth, args.wire)
    return any(value is not None for value in sources) or bool(_given(args))


def network_from(args: argparse.Namespace, profile: _core.Profile) -> Network:
    network = _without_wire(args, profile)
    if args.wire is None:
        return network
    return Network(network.link.scaled(1, 0.5), f"{network.description}, {args.wire} on the wire", network.worker_count)


def _without_wire(args: argparse.Namespace, profile: _core.Profile) -> Network:
    sources = [name for name in ("network", "link", "bandwidth") if getattr(args, name) is not None]
    given = _given(args)
    if len(sources) > 1:
        raise Error(f"--{sources[0]} and --{sources[1]} both define the network; leave one out")
    if given and sources != ["bandwidth"]:
        raise Error(
            f"--{sources[0]} has its own costs; leave out {given[0]}"
            if sources
            else f"{given[0]} needs --bandwidth, for instance --bandwidth 10gbit"
        )
    if args.bandwidth is not None:
        return _derived_from(args, profile)
    if args.network is not None:
        named = _core.network(args.network)
        return Network(named.link, f"{named.name} ({named.summary})")
    if args.link is not None:
        return Network(load_link(args.link), f"the link of {args.link}")
    if profile.link is None:
        raise Error(
            f"the profile {profile.name} has no link; choose a network with --bandwidth 10gbit --workers 8, "
            "or with --network NAME (`gradcast networks` lists them)"
        )
    return Network(profile.link, "the profile's own link")
