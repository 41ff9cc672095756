"""``gradcast simulate --scaling``: step time and efficiency with other numbers of workers, with a band."""

import argparse
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import given, intra_hop, latency_ns_of, worker_counts
from gradcast.errors import Error
from gradcast.scaling.estimate import WORKERS, Band, Options, Point, as_json, band
from gradcast.scaling.growth import ALGORITHMS, SPREAD, Network, Nodes, from_hop, hop, published
from gradcast.units import format_bandwidth, format_percent, format_time

OPTIONS = ("uncertainty", "measured_algorithm", "intra_network")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "more workers: each point has a band, and says whether its costs were measured, fitted or extrapolated"
    )
    group.add_argument(
        "--scaling",
        action="store_true",
        help="predict step time and efficiency with other numbers of workers (default: 2, 4, 8 … 4096) and all "
        "algorithms, from profiles of two or more ranks or from --network or --bandwidth. A published network may be "
        "named without its number of workers: 10gbe",
    )
    common.add_uncertainty_options(group)
    common.option(group, "--intra-network", "NAME", "published network inside a node, for instance nvlink-v100")


def run(args: argparse.Namespace, profiles: list[_core.Profile]) -> None:
    if ignored := given(args, "link", "wire", "csv"):
        raise Error(f"{ignored[0]} does not work with --scaling; omit it")
    if len(args.policy or ["forecast"]) > 1:
        raise Error("--scaling predicts one policy, and DDP beside it; give one with --policy")
    options = Options(
        workers=tuple(dict.fromkeys(worker_counts(args) or WORKERS)),
        algorithms=tuple(dict.fromkeys(args.algorithm or ALGORITHMS)),
        networks=_networks(args),
        measured_algorithm=args.measured_algorithm or Options.measured_algorithm,
        nodes=_nodes(args),
        spread=SPREAD if args.uncertainty is None else args.uncertainty,
        policy=(args.policy or [Options.policy])[0],
        mode=args.mode,
        in_flight=args.in_flight,
    )
    found = band(profiles, options)
    if args.plot:
        from gradcast.plots import draw_scaling

        draw_scaling(args.plot, found, title=f"{common.profile_name(profiles[0], args.scale)}, {args.mode} mode")
    if args.json:
        common.print_json(_as_json(args, profiles, found, options))
    else:
        _print(args, profiles, found)


def _networks(args: argparse.Namespace) -> tuple[Network, ...]:
    if args.latency is not None and args.bandwidth is None:
        raise Error("--latency needs --bandwidth, for instance --bandwidth 10gbit")
    algorithm = args.measured_algorithm or Options.measured_algorithm
    found = [published(name, algorithm) for name in dict.fromkeys(args.network or [])]
    # Any number of workers will do, unless all of them are on one node.
    count = 2 * (args.ranks_per_host or 1)
    return (
        *found,
        *(_hop_network(hop(bits, latency_ns_of(args)), count) for bits in dict.fromkeys(args.bandwidth or [])),
    )


def _hop_network(connection: _core.Hop, worker_count: int) -> Network:
    bandwidth, latency = format_bandwidth(8 * connection.bandwidth_bytes_per_s), format_time(connection.latency_ns)
    return from_hop(f"{bandwidth}, {latency} per hop", connection, worker_count)


def _nodes(args: argparse.Namespace) -> Nodes | None:
    inside = given(args, "intra_network", "intra_bandwidth", "intra_latency")
    if args.ranks_per_host is None:
        if inside:
            raise Error(f"{inside[0]} needs --ranks-per-host, for instance --ranks-per-host 8")
        return None
    if args.ranks_per_host < 2:
        raise Error("--ranks-per-host 1 is what is assumed without it; omit it")
    if args.intra_network and len(inside) > 1:
        raise Error(f"--intra-network has its own costs; omit {inside[1]}")
    if args.intra_network:
        algorithm = args.measured_algorithm or Options.measured_algorithm
        return Nodes(args.ranks_per_host, published(args.intra_network, algorithm))
    if args.intra_bandwidth is None:
        if inside:
            raise Error("--intra-latency needs --intra-bandwidth, for instance --intra-bandwidth 100GB/s")
        return Nodes(args.ranks_per_host)
    return Nodes(args.ranks_per_host, _hop_network(intra_hop(args), 2))


def _print(args: argparse.Namespace, profiles: list[_core.Profile], found: Band) -> None:
    print(common.describe_profile(profiles[0], args.scale))
    common.print_step_time(args)
    for (network, algorithm), points in found.curves().items():
        print(f"\n{network}, {algorithm}:\n")
        headers = [
            "workers", "step ms", "band ms", "DDP ms", "speed-up\nover ddp", "all-reduce\nbound ms", "efficiency",
            "x one\nworker", "costs",
        ]  # fmt: skip
        common.print_table([_cells(point) for point in points], headers, "rrrrrrrrl")
    print()
    for curve, reason in found.skipped.items():
        print(f"{curve}: some points are missing, because {reason}.")
    print(sentence(found))
    if args.plot:
        print(f"The picture is in {args.plot}.")


def _cells(point: Point) -> list[str]:
    return [
        str(point.workers),
        f"{point.step_ns / 1e6:.1f}",
        f"{point.low_ns / 1e6:.1f} to {point.high_ns / 1e6:.1f}",
        f"{point.ddp_ns / 1e6:.1f}",
        f"{point.speedup_over_ddp:.2f} x",
        f"{point.bound_ns / 1e6:.1f}",
        format_percent(point.efficiency),
        f"{point.throughput:.1f}",
        point.basis,
    ]


def sentence(found: Band) -> str:
    """Says where more workers cease to pay off, and how certain that is."""
    first = found.points[0]
    curve = f"{first.network}, {first.algorithm}"
    points = found.curves()[first.network, first.algorithm]
    if found.worth_trying:
        text = f"Worth trying: {', '.join(str(count) for count in found.worth_trying)}."
    elif max(point.throughput for point in points) > 1:
        text = "None is worth trying: all that are faster than one worker cost too much worker time per sample."
    else:
        text = "None is faster than one worker."
    # A curve of one point has no knee.
    return f"{curve}: {_knee(found, points[-1].workers)}. {text}" if len(points) > 1 else f"{curve}: {text}"


def _knee(found: Band, last: int) -> str:
    if found.knee is None:
        text = f"no knee up to {last} workers; the last doubling still multiplies the throughput by 1.5 or more"
    elif found.knee == 1:
        text = "the knee is at one worker; no doubling multiplies the throughput by 1.5"
    else:
        text = f"the knee is at {found.knee} workers: the last doubling that multiplies the throughput by 1.5 or more"
    if found.unpaid:
        text += (
            f"; from {' and '.join(f'{fewer} to {more}' for fewer, more in found.unpaid)} workers the gain is smaller"
        )
    ends = [f"above {last}" if end is None else str(end) for end in (found.knee_low, found.knee_high)]
    if len({found.knee, found.knee_low, found.knee_high}) > 1:
        text += f" (with all costs at their highest it is {_at(ends[0])}, at their lowest {_at(ends[1])})"
    return text


def _at(end: str) -> str:
    return end if end.startswith("above") else f"at {end}"


def _as_json(args: argparse.Namespace, profiles: list[_core.Profile], found: Band, options: Options) -> dict[str, Any]:
    scaling = as_json(found)
    for point, fields in zip(found.points, scaling["points"], strict=True):
        fields["ddp_ms"] = point.ddp_ns / 1e6
        fields["speedup_over_ddp"] = point.speedup_over_ddp
        fields["all_reduce_bound_ms"] = point.bound_ns / 1e6
    return {
        "profiles": [profile.name for profile in profiles],
        "scale": args.scale,
        "step_time": args.step_time,
        "policy": options.policy,
        "mode": args.mode,
        "in_flight": args.in_flight,
        "uncertainty": options.spread,
        **scaling,
        "knee_low_workers": found.knee_low,
        "knee_high_workers": found.knee_high,
        "skipped": found.skipped,
        "summary": sentence(found),
    }
