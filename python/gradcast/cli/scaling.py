"""``gradcast scaling``: predicts step time and efficiency with other numbers of workers, with error bands."""

import argparse
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.cli.network_options import WORKERS_MAX
from gradcast.cli.scaling_options import add_scaling_network_options, networks_from, nodes_from
from gradcast.files import check_writable, load_profile
from gradcast.scaling.estimate import WORKERS, Band, Options, Point, as_json, band
from gradcast.scaling.growth import ALGORITHMS
from gradcast.units import format_percent

_EXAMPLE = "gradcast scaling resnet50 --scale 0.5 --network 10gbe --workers 8,16,32,64,128,256 -o scaling.png"


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "scaling",
        "predict step time and efficiency with other numbers of workers",
        "Starts from profiles of two or more ranks, or from a named or given network. Each point has a band and "
        "says which costs it uses: measured, fitted between measured ones, or extrapolated beyond them.",
        _EXAMPLE,
    )
    common.add_profiles_argument(parser)
    add_scaling_network_options(parser)
    parser.add_argument(
        "--workers",
        type=common.list_of(common.whole_number(1, WORKERS_MAX)),
        default=list(WORKERS),
        metavar="NS",
        help="numbers of workers, separated by commas (default: 2, 4, 8 … 4096)",
    )
    parser.add_argument(
        "--algorithms",
        type=common.list_of(_algorithm),
        default=list(ALGORITHMS),
        metavar="NAMES",
        help="algorithms of the all-reduce: ring, tree, hierarchical (default: all that can be predicted)",
    )
    common.add_schedule_options(parser)
    parser.add_argument("-o", "--output", metavar="PNG", help="also draw step time and efficiency")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def _algorithm(text: str) -> str:
    if text not in ALGORITHMS:
        raise argparse.ArgumentTypeError(f"there is no algorithm {text}; there are {', '.join(ALGORITHMS)}")
    return text


def run(args: argparse.Namespace) -> None:
    profiles = [load_profile(name, args.scale) for name in args.profiles]
    if args.output:
        check_writable(args.output, "picture")
    options = Options(
        workers=tuple(args.workers),
        algorithms=tuple(args.algorithms),
        networks=networks_from(args),
        measured_algorithm=args.measured_algorithm,
        nodes=nodes_from(args),
        spread=args.spread,
        mode=args.mode,
        in_flight=args.in_flight,
    )
    found = band(profiles, options)
    if args.output:
        from gradcast.plots import draw_scaling

        draw_scaling(args.output, found, title=f"{common.profile_name(profiles[0], args.scale)}, {args.mode} mode")
    if args.json:
        common.print_json(_as_json(args, profiles, found))
    else:
        _print(args, profiles, found)


def _print(args: argparse.Namespace, profiles: list[_core.Profile], found: Band) -> None:
    print(common.describe_profile(profiles[0], args.scale))
    for (network, algorithm), points in found.curves().items():
        print(f"\n{network}, {algorithm}:\n")
        headers = ["workers", "step ms", "band ms", "DDP ms", "bound ms", "efficiency", "x one worker", "costs"]
        common.print_table([_cells(point) for point in points], headers, "rrrrrrrl")
    print()
    for curve, reason in found.skipped.items():
        print(f"{curve}: some points are missing, because {reason}.")
    print(sentence(found))
    if args.output:
        print(f"The picture is in {args.output}.")


def _cells(point: Point) -> list[str]:
    return [
        str(point.workers),
        f"{point.step_ns / 1e6:.1f}",
        f"{point.low_ns / 1e6:.1f} to {point.high_ns / 1e6:.1f}",
        f"{point.ddp_ns / 1e6:.1f}",
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


def _as_json(args: argparse.Namespace, profiles: list[_core.Profile], found: Band) -> dict[str, Any]:
    scaling = as_json(found)
    for point, fields in zip(found.points, scaling["points"], strict=True):
        fields["ddp_ms"] = point.ddp_ns / 1e6
        fields["bound_ms"] = point.bound_ns / 1e6
    return {
        "version": 1,
        "profiles": [profile.name for profile in profiles],
        "scale": args.scale,
        "mode": args.mode,
        "in_flight": args.in_flight,
        "spread": args.spread,
        **scaling,
        "knee_low_workers": found.knee_low,
        "knee_high_workers": found.knee_high,
        "skipped": found.skipped,
        "summary": sentence(found),
    }
