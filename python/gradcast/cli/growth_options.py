"""Options of ``gradcast scaling`` that say which network, and what is known of it on how many workers."""

import argparse
from typing import Any

from gradcast.cli import common
from gradcast.cli.network_options import DEFAULT_LATENCY, WORKERS_MAX
from gradcast.errors import Error
from gradcast.scaling.growth import MEASURED_ALGORITHMS, SPREAD, Network, Nodes, from_hop, hop, published
from gradcast.units import (
    format_bandwidth,
    format_time,
    parse_bandwidth_bits_per_s,
    parse_fraction,
    parse_time_ns,
)

_INTRA_LATENCY = "5us"


def add_growth_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network (without these options: the one that the profiles were measured on)")
    group.add_argument(
        "--network",
        action="append",
        metavar="NAME",
        help="a published network: 10gbe-8, or 10gbe for all numbers of workers that were published; may be repeated",
    )
    group.add_argument(
        "--bandwidth",
        type=common.argument(parse_bandwidth_bits_per_s),
        metavar="RATE",
        help="of one worker's connection, or of a node's: 10gbit, 1.25GB/s",
    )
    group.add_argument(
        "--latency",
        type=common.argument(parse_time_ns),
        metavar="TIME",
        help=f"of one hop, beside --bandwidth (default: {DEFAULT_LATENCY})",
    )
    add_measured_algorithm(group)
    group.add_argument(
        "--spread",
        type=common.argument(parse_fraction),
        default=SPREAD,
        metavar="SHARE",
        help=f"by how much measured costs may be off (default: {SPREAD:.0%}%)",
    )
    group.add_argument(
        "--workers-per-node",
        type=common.whole_number(2, WORKERS_MAX),
        metavar="N",
        help="workers of one node; costs of that many and fewer are then those inside a node",
    )
    group.add_argument(
        "--intra-network", metavar="NAME", help="inside a node: a published network, for instance nvlink-v100"
    )
    group.add_argument(
        "--intra-bandwidth",
        type=common.argument(parse_bandwidth_bits_per_s),
        metavar="RATE",
        help="inside a node: of one worker's connection",
    )
    group.add_argument(
        "--intra-latency",
        type=common.argument(parse_time_ns),
        metavar="TIME",
        help=f"inside a node: of one hop (default: {_INTRA_LATENCY})",
    )


def add_measured_algorithm(group: Any) -> None:
    group.add_argument(
        "--measured-algorithm",
        choices=MEASURED_ALGORITHMS,
        default="ring",
        help="what the library ran when the costs were measured; Gloo: ring (default: ring)",
    )


def list_of(convert: Any) -> Any:
    """A list with commas as an argparse type, each entry once."""

    def convert_all(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError("the list is empty")
        return list(dict.fromkeys(convert(part) for part in parts))

    return convert_all


def _hop_network(bandwidth_bits_per_s: float, latency_ns: float, worker_count: int) -> Network:
    name = f"{format_bandwidth(bandwidth_bits_per_s)}, {format_time(latency_ns)} per hop"
    return from_hop(name, hop(bandwidth_bits_per_s, latency_ns), worker_count)


def networks_from(args: argparse.Namespace) -> tuple[Network, ...]:
    """Those that the options name; none of them means the profiles' own."""
    if args.latency is not None and args.bandwidth is None:
        raise Error("--latency needs --bandwidth, for instance --bandwidth 10gbit")
    found = [published(name, args.measured_algorithm) for name in dict.fromkeys(args.network or [])]
    if args.bandwidth is not None:
        latency_ns = parse_time_ns(DEFAULT_LATENCY) if args.latency is None else args.latency
        # Any number of workers will do, as long as they are no single node.
        found.append(_hop_network(args.bandwidth, latency_ns, 2 * (args.workers_per_node or 1)))
    return tuple(found)


def nodes_from(args: argparse.Namespace) -> Nodes | None:
    given = [name for name in ("intra_network", "intra_bandwidth", "intra_latency") if getattr(args, name) is not None]
    if args.workers_per_node is None:
        if given:
            raise Error(f"--{given[0].replace('_', '-')} needs --workers-per-node, for instance --workers-per-node 8")
        return None
    if args.intra_network and len(given) > 1:
        raise Error(f"--intra-network has costs of its own; leave out --{given[1].replace('_', '-')}")
    if args.intra_network:
        return Nodes(args.workers_per_node, published(args.intra_network, args.measured_algorithm))
    if args.intra_bandwidth is None:
        if given:
            raise Error("--intra-latency needs --intra-bandwidth, for instance --intra-bandwidth 100GB/s")
        return Nodes(args.workers_per_node)
    latency_ns = parse_time_ns(_INTRA_LATENCY) if args.intra_latency is None else args.intra_latency
    return Nodes(args.workers_per_node, _hop_network(args.intra_bandwidth, latency_ns, 2))
