"""Options of ``gradcast scaling`` and ``gradcast advise`` that choose the network and its costs with other numbers
of workers.
"""

import argparse
from typing import Any

from gradcast.cli import common
from gradcast.cli.network_options import DEFAULT_LATENCY, WORKERS_MAX
from gradcast.errors import Error
from gradcast.scaling.growth import MEASURED_ALGORITHMS, SPREAD, Network, Nodes, from_hop, hop, published
from gradcast.units import format_bandwidth, format_time, parse_time_ns

_INTRA_LATENCY = "5us"


def add_scaling_network_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network (without these options: that of the profiles)")
    group.add_argument(
        "--network",
        action="append",
        metavar="NAME",
        help="a published network: 10gbe-8, or 10gbe for all published numbers of workers; may be repeated",
    )
    group.add_argument(
        "--bandwidth",
        type=common.BANDWIDTH,
        metavar="RATE",
        help="bandwidth of one worker's or node's connection: 10gbit, 1.25GB/s",
    )
    group.add_argument(
        "--latency",
        type=common.TIME,
        metavar="TIME",
        help=f"latency of one hop, with --bandwidth (default: {DEFAULT_LATENCY})",
    )
    add_measured_algorithm(group)
    group.add_argument(
        "--spread",
        type=common.FRACTION,
        default=SPREAD,
        metavar="SHARE",
        help=f"share by which measured costs may be off (default: {SPREAD:.0%}%)",
    )
    group.add_argument(
        "--workers-per-node",
        type=common.whole_number(2, WORKERS_MAX),
        metavar="N",
        help="number of workers of one node; costs of up to that many are then those inside a node",
    )
    group.add_argument(
        "--intra-network", metavar="NAME", help="published network inside a node, for instance nvlink-v100"
    )
    group.add_argument(
        "--intra-bandwidth",
        type=common.BANDWIDTH,
        metavar="RATE",
        help="bandwidth of one worker's connection inside a node",
    )
    group.add_argument(
        "--intra-latency",
        type=common.TIME,
        metavar="TIME",
        help=f"latency of one hop inside a node (default: {_INTRA_LATENCY})",
    )


def add_measured_algorithm(group: Any) -> None:
    group.add_argument(
        "--measured-algorithm",
        choices=MEASURED_ALGORITHMS,
        default="ring",
        help="algorithm that the library used when the costs were measured; Gloo uses ring (default: ring)",
    )


def _hop_network(bandwidth_bits_per_s: float, latency_ns: float, worker_count: int) -> Network:
    name = f"{format_bandwidth(bandwidth_bits_per_s)}, {format_time(latency_ns)} per hop"
    return from_hop(name, hop(bandwidth_bits_per_s, latency_ns), worker_count)


def networks_from(args: argparse.Namespace) -> tuple[Network, ...]:
    """Returns the networks that the options name; none means those of the profiles."""
    if args.latency is not None and args.bandwidth is None:
        raise Error("--latency needs --bandwidth, for instance --bandwidth 10gbit")
    found = [published(name, args.measured_algorithm) for name in dict.fromkeys(args.network or [])]
    if args.bandwidth is not None:
        latency_ns = parse_time_ns(DEFAULT_LATENCY) if args.latency is None else args.latency
        # Any number of workers will do, unless all of them are on one node.
        found.append(_hop_network(args.bandwidth, latency_ns, 2 * (args.workers_per_node or 1)))
    return tuple(found)


def nodes_from(args: argparse.Namespace) -> Nodes | None:
    given = [name for name in ("intra_network", "intra_bandwidth", "intra_latency") if getattr(args, name) is not None]
    if args.workers_per_node is None:
        if given:
            raise Error(f"--{given[0].replace('_', '-')} needs --workers-per-node, for instance --workers-per-node 8")
        return None
    if args.intra_network and len(given) > 1:
        raise Error(f"--intra-network has its own costs; leave out --{given[1].replace('_', '-')}")
    if args.intra_network:
        return Nodes(args.workers_per_node, published(args.intra_network, args.measured_algorithm))
    if args.intra_bandwidth is None:
        if given:
            raise Error("--intra-latency needs --intra-bandwidth, for instance --intra-bandwidth 100GB/s")
        return Nodes(args.workers_per_node)
    latency_ns = parse_time_ns(_INTRA_LATENCY) if args.intra_latency is None else args.intra_latency
    return Nodes(args.workers_per_node, _hop_network(args.intra_bandwidth, latency_ns, 2))
