"""Which network a command reckons with: derived from bandwidth and latency, a published one, or the profile's own."""

import argparse
from dataclasses import dataclass

from gradcast import _core
from gradcast.cli.common import argument, whole_number
from gradcast.errors import Error
from gradcast.files import load_link
from gradcast.scaling.growth import hop
from gradcast.units import format_bandwidth, format_time, parse_bandwidth_bits_per_s, parse_time_ns

WIRES = ("bf16", "fp16")
TOPOLOGIES = ("ring", "tree", "hierarchical")
WORKERS_MAX = 1_000_000
DEFAULT_LATENCY = "50us"  # one hop of Ethernet with TCP, as this project's tables use
_DEFAULT_INTRA_LATENCY = "5us"
_DERIVED = ("workers", "latency", "topology", "workers_per_node", "intra_bandwidth", "intra_latency")


@dataclass(frozen=True)
class Network:
    link: _core.LinkModel
    description: str
    worker_count: int | None = None  # None: not known, the costs were given and not derived


def add_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network (without these options: the profile's own link)")
    group.add_argument("--network", metavar="NAME", help="a published network by name; `gradcast networks` lists them")
    group.add_argument("--link", metavar="JSON", help="a link model in a file, for instance from `gradcast link fit`")
    group.add_argument(
        "--bandwidth",
        type=argument(parse_bandwidth_bits_per_s),
        metavar="RATE",
        help="of one worker's connection: 10gbit, 1.25GB/s",
    )
    group.add_argument(
        "--workers", type=whole_number(1, WORKERS_MAX), metavar="N", help="workers (default: the profile's world size)"
    )
    group.add_argument(
        "--latency", type=argument(parse_time_ns), metavar="TIME", help=f"of one hop (default: {DEFAULT_LATENCY})"
    )
    group.add_argument("--topology", choices=TOPOLOGIES, help="algorithm of the all-reduce (default: ring)")
    group.add_argument(
        "--workers-per-node", type=whole_number(1, WORKERS_MAX), metavar="N", help="hierarchical: workers in one node"
    )
    group.add_argument(
        "--intra-bandwidth",
        type=argument(parse_bandwidth_bits_per_s),
        metavar="RATE",
        help="hierarchical: between workers of one node; --bandwidth is then a node's",
    )
    group.add_argument(
        "--intra-latency",
        type=argument(parse_time_ns),
        metavar="TIME",
        help=f"hierarchical: of a hop inside a node (default: {_DEFAULT_INTRA_LATENCY})",
    )
    group.add_argument(
        "--wire",
        choices=WIRES,
        help="as if fp32 gradients travelled as 16-bit numbers, gradcast.Options(wire=...): half the cost per byte",
    )


def derived_network(topology: str, worker_count: int, bandwidth_bits_per_s: float, latency_ns: float) -> Network:
    """A ring or a tree of equal connections."""
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
        raise Error(f"--workers {worker_count} is no multiple of --workers-per-node {per_node}")
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
            raise Error("--workers is missing: how many workers share the training, for instance --workers 8")
        worker_count = profile.world_size
    latency_ns = parse_time_ns(DEFAULT_LATENCY) if args.latency is None else args.latency
    topology = args.topology or "ring"
    if topology == "hierarchical":
        return _hierarchical(args, worker_count, latency_ns)
    for option in ("workers_per_node", "intra_bandwidth", "intra_latency"):
        if getattr(args, option) is not None:
            raise Error(
                f"--{option.replace('_', '-')} is for --topology hierarchical only; leave it out for a {topology}"
            )
    return derived_network(topology, worker_count, args.bandwidth, latency_ns)


def has_network(args: argparse.Namespace) -> bool:
    sources = (args.network, args.link, args.bandwidth, args.wire)
    return any(value is not None for value in sources) or bool(_given(args))


def network_from(args: argparse.Namespace, profile: _core.Profile) -> Network:
    network = _network_of_gradients(args, profile)
    if args.wire is None:
        return network
    return Network(network.link.scaled(1, 0.5), f"{network.description}, {args.wire} on the wire", network.worker_count)


def _network_of_gradients(args: argparse.Namespace, profile: _core.Profile) -> Network:
    sources = [name for name in ("network", "link", "bandwidth") if getattr(args, name) is not None]
    given = _given(args)
    if len(sources) > 1:
        raise Error(f"--{sources[0]} and --{sources[1]} both say what the network costs; leave one out")
    if given and sources != ["bandwidth"]:
        raise Error(
            f"--{sources[0]} has costs of its own; leave out {given[0]}"
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
            f"the profile {profile.name} holds no link; say which network: --bandwidth 10gbit --workers 8, "
            "or --network NAME (`gradcast networks` lists them)"
        )
    return Network(profile.link, "the profile's own link")
