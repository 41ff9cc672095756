"""Shared by several commands: argument types, options, and output."""

import argparse
import importlib
import importlib.util
import json
import os
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tabulate import tabulate

from gradcast import _core
from gradcast.comparison.compare import compute_ns, total_bytes
from gradcast.disk import check_writable
from gradcast.errors import Error
from gradcast.files import ESTIMATED_PROFILES, bundled_profiles, load_profile, scaled_profile
from gradcast.scaling.growth import MEASURED_ALGORITHMS, SPREAD
from gradcast.scaling.step_times import fit, load_step_times
from gradcast.terminal import on_one_line
from gradcast.units import (
    format_ms,
    format_size,
    format_time,
    parse_bandwidth_bits_per_s,
    parse_fraction,
    parse_positive,
    parse_positive_duration_s,
    parse_positive_time_ns,
    parse_time_ns,
    quoted,
)

EXIT_FINDING = 1  # returned by a command's ``run``: it has found what it was asked to look for
JSON_VERSION = 2  # of what commands print with --json; 1 had other units and names
WORKERS_MAX = 1_000_000
_HELP_WIDTH = 100
_FACTORS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_COUNT_MAX = 1e24  # floating-point operations of a step of the largest models, with room
_PICTURES = ("png", "svg", "pdf")


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


POSITIVE = argument(parse_positive)
FRACTION = argument(parse_fraction)
TIME = argument(parse_time_ns)
POSITIVE_TIME = argument(parse_positive_time_ns)
DURATION = argument(parse_positive_duration_s)
BANDWIDTH = argument(parse_bandwidth_bits_per_s)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(high))
        if not is_number or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a whole number from {low} to {high}")
        return int(text)

    return convert


def factor(low: float, high: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value: float = POSITIVE(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is not a number from {low:g} to {high:g}")
        return value

    return convert


def not_empty(text: str) -> str:
    """Refuses an empty name, which often comes from an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def convert_all(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError("the list is empty")
        return [convert(part) for part in parts]

    return convert_all


def command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str, details: str, example: str
) -> argparse.ArgumentParser:
    """Adds a command. Its description is ``summary`` and ``details``; the lines of ``example`` are kept."""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(" ".join(f"{summary[0].upper()}{summary[1:]}. {details}".split()), _HELP_WIDTH),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def command_group(
    commands: Any, name: str, summary: str, example: str, adders: Iterable[Callable[[Any], None]]
) -> None:
    inner = command(commands, name, summary, "", example).add_subparsers(
        title="commands", metavar="COMMAND", dest=f"{name}_command", required=True
    )
    for add_parser in adders:
        add_parser(inner)


def option(
    parser: Any, name: str, metavar: str | None, help_: str, type_: Any = None, default: Any = None, **more: Any
) -> None:
    """Adds an option with a value. A default is written as a user would, with its unit, and shown in the help."""
    shown = "" if default is None else " (default: %(default)s)"
    parser.add_argument(*name.split(", "), metavar=metavar, help=help_ + shown, type=type_, default=default, **more)


def add_profile_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    parser.add_argument(
        "profiles" if several else "profile",
        metavar="PROFILE",
        nargs="+" if several else None,
        help=f"a profile: a JSON file, or the name of a bundled one ({', '.join(bundled_profiles())})"
        + ("; several must be of one model, each measured with another number of workers" if several else ""),
    )
    scale = "multiply every time of the profile; 0.5 models a device twice as fast"
    option(parser, "--scale", "FACTOR", scale, POSITIVE, "1")
    if several:
        table = "steps of other models on a machine that you do not have (CSV: flops, tensors, step_ms); predicts yours"
        option(parser, "--step-times", "FILE", table, not_empty)
        option(parser, "--flops", "N", "with --step-times: floating-point operations of a step: 4.1G", argument(count))


def add_schedule_options(parser: argparse._ActionsContainer) -> None:
    modes = "overlap: communication also overlaps with the next forward pass; hook: with backward only, as with DDP"
    option(parser, "--mode", None, modes, default="overlap", choices=["overlap", "hook"])
    option(parser, "--in-flight", "N", "largest number of blocks in flight", whole_number(1, 1_000_000), "1")


def add_uncertainty_options(parser: Any) -> None:
    """Options of predictions from measured costs. Without a value they are None."""
    costs = f"share by which costs of the network may be off (default: {SPREAD:.0%}%)"
    option(parser, "--uncertainty", "SHARE", costs, FRACTION)
    algorithm = "algorithm that the library used when the costs were measured; Gloo uses ring (default: ring)"
    option(parser, "--measured-algorithm", None, algorithm, choices=MEASURED_ALGORITHMS)


def add_json_option(parser: argparse._ActionsContainer, help_: str = "print JSON instead of text") -> None:
    parser.add_argument("--json", action="store_true", help=help_)


def profiles_from(args: argparse.Namespace) -> list[_core.Profile]:
    """Returns the profiles. Sets ``args.step_time``: the facts of a predicted step for JSON, or None."""
    args.step_time = None
    if (args.step_times is None) != (args.flops is None):
        raise Error("--step-times and --flops need each other; give both, or omit both")
    if args.step_times is None:
        return [load_profile(name, args.scale) for name in args.profiles]
    if args.scale != 1:
        raise Error("--step-times says how long a step takes; omit --scale")
    profiles = [load_profile(name) for name in args.profiles]
    if compute_ns(profiles[0]) == 0:
        raise Error(f"the profile {profiles[0].name} has no compute that --step-times could stretch")
    found = fit(load_step_times(args.step_times))
    step_ms = found.step_ms(args.flops, len(profiles[0].tensors))
    args.step_time = {
        "step_ms": step_ms,
        "models": len(found.models),
        "mean_error": found.mean_error,
        "worst_error": found.worst_error,
    }
    return [scaled_profile(profile, 1e6 * step_ms / compute_ns(profiles[0])) for profile in profiles]


def print_step_time(args: argparse.Namespace) -> None:
    """Prints the basis of a predicted step; nothing for a measured one."""
    if args.step_time is not None:
        known = args.step_time
        print(
            f"compute is predicted from {known['models']} other models: {known['step_ms']:.1f} ms. Each of these, when "
            f"predicted from the others, is off by {known['mean_error']:.1%} in the mean, "
            f"{known['worst_error']:.1%} at most"
        )


def count(text: str) -> float:
    """Parses 50000, 20k, 1.28M or 3G."""
    times = _FACTORS.get(text[-1:].lower(), 1)
    value = parse_positive(text if times == 1 else text[:-1]) * times
    if not 1 <= value <= _COUNT_MAX:
        raise Error(f"{quoted(text)} is not a number from 1 to {_COUNT_MAX:g}")
    return value


def check_picture(path: str) -> None:
    """Raises Error if the picture cannot be made or written, so that long work does not end with that."""
    check_writable(path, "picture")
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in ("", *_PICTURES):
        raise Error(
            f"the picture cannot be written to {path}: gradcast makes {', '.join(_PICTURES)}; name a file such as "
            "plot.png"
        )
    importlib.import_module("gradcast.plots")  # raises an Error if matplotlib is missing


def environment_number(name: str, low: int, high: int) -> int:
    """A variable that a launcher sets. Raises Error."""
    value = os.environ.get(name, "")
    try:
        return whole_number(low, high)(value)
    except argparse.ArgumentTypeError as error:
        raise Error(f"the environment variable {name} is wrong: {error}; correct it, or start with torchrun") from None


def require_torch(command_: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise Error(f"{command_} needs PyTorch, which is not installed: pip install torch", "environment")


def print_json(fields: dict[str, Any]) -> None:
    """Prints a command's own result. Files, which have versions of their own, are printed as they are."""
    print(json.dumps({"version": JSON_VERSION, **fields}, indent=1))


def print_table(rows: list[list[Any]], headers: list[str], align: str) -> None:
    """``align`` has one letter per column, l or r."""
    sides = {"l": "left", "r": "right"}
    print(
        tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=[sides[letter] for letter in align])
    )


def profile_name(profile: _core.Profile, scale: float) -> str:
    own = on_one_line(profile.name)
    return own if scale == 1 else f"{own} (times x {scale:g})"


ESTIMATED = "estimated and not measured"


def is_estimate(profile: _core.Profile) -> bool:
    return profile.name in ESTIMATED_PROFILES and profile.backward_ns == 2 * profile.forward_ns


def describe_profile(profile: _core.Profile, scale: float = 1.0) -> str:
    return (
        f"{profile_name(profile, scale)}: {len(profile.tensors)} tensors, {format_size(total_bytes(profile))}; "
        f"backward {format_ms(profile.backward_ns)} + forward {format_ms(profile.forward_ns)} = "
        f"{format_ms(compute_ns(profile))} of compute" + (f", {ESTIMATED}" if is_estimate(profile) else "")
    )


def describe_cost(cost: _core.OpCost) -> str:
    """Describes a cost like "700 us + 4.67 ms per MB", piece by piece."""
    lines = []
    for piece in cost.pieces:
        line = f"{format_time(piece.alpha_ns)} + {format_time(piece.beta_ns_per_byte * 1e6)} per MB"
        if piece.up_to_bytes is not None:
            line += f" up to {format_size(piece.up_to_bytes)}"
        lines.append(line)
    return ", ".join(lines)


def describe_traffic(profile: _core.Profile, link: _core.LinkModel, worker_count: int | None) -> str:
    """``worker_count`` is None if the link does not know it."""
    if worker_count == 1:
        return "one worker does not communicate"
    whole_ns = link.all_reduce.cost_ns(total_bytes(profile))
    return f"an all-reduce takes {describe_cost(link.all_reduce)}; all gradients in one take {format_ms(whole_ns)}"
