"""Shared by several commands: argument types, options, and output."""

import argparse
import json
import textwrap
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from gradcast import _core
from gradcast.comparison.compare import compute_ns, parse_policies, total_bytes
from gradcast.errors import Error
from gradcast.files import bundled_profiles, load_profile
from gradcast.units import (
    format_ms,
    format_size,
    format_time,
    parse_bandwidth_bits_per_s,
    parse_fraction,
    parse_positive,
    parse_time_ns,
)

_HELP_WIDTH = 100


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Makes an argparse type from a parser of ``gradcast.units``, whose error becomes the message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


POSITIVE = argument(parse_positive)
FRACTION = argument(parse_fraction)
TIME = argument(parse_time_ns)
BANDWIDTH = argument(parse_bandwidth_bits_per_s)


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from {low} to {high}")
        return int(text)

    return convert


def list_of(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Makes an argparse type for lists separated by commas, in which each entry counts once."""

    def convert_all(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError("the list is empty")
        return list(dict.fromkeys(convert(part) for part in parts))

    return convert_all


def new_parser(commands: Any, name: str, summary: str, details: str, example: str) -> argparse.ArgumentParser:
    """Adds a command. Its description is ``summary`` and ``details``; the lines of ``example`` are kept."""
    return commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(" ".join(f"{summary[0].upper()}{summary[1:]}. {details}".split()), _HELP_WIDTH),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(bundled_profiles())
    parser.add_argument(
        "profile", metavar="PROFILE", help=f"a profile: a JSON file, or the name of a bundled one ({names})"
    )
    add_scale_option(parser)


def add_profiles_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "profiles",
        metavar="PROFILE",
        nargs="+",
        help="profiles of one model, each measured with another number of workers, or bundled ones",
    )
    add_scale_option(parser)


def add_scale_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        type=POSITIVE,
        default=1.0,
        metavar="FACTOR",
        help="multiply every time of the profile; 0.5 models a device twice as fast (default: 1)",
    )


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=["overlap", "hook"],
        default="overlap",
        help="overlap: communication also overlaps with the next forward pass; hook: with backward only, as with DDP "
        "(default: overlap)",
    )
    parser.add_argument(
        "--in-flight",
        type=whole_number(1, 1_000_000),
        default=1,
        metavar="N",
        help="largest number of blocks in flight (default: 1)",
    )


def add_policies_option(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        name,
        type=argument(parse_policies),
        default=parse_policies("all"),
        metavar="NAMES",
        help="policies, separated by commas (default: all; `gradcast policies` lists them)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def profile_from(args: argparse.Namespace) -> _core.Profile:
    return load_profile(args.profile, args.scale)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def print_table(rows: list[list[Any]], headers: list[str], align: str) -> None:
    """``align`` has one letter per column, l or r."""
    sides = {"l": "left", "r": "right"}
    print(
        tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=[sides[letter] for letter in align])
    )


def profile_name(profile: _core.Profile, scale: float) -> str:
    return profile.name if scale == 1 else f"{profile.name} (times x {scale:g})"


def describe_profile(profile: _core.Profile, scale: float = 1.0) -> str:
    return (
        f"{profile_name(profile, scale)}: {len(profile.tensors)} tensors, {format_size(total_bytes(profile))}; "
        f"backward {format_ms(profile.backward_ns)} + forward {format_ms(profile.forward_ns)} = "
        f"{format_ms(compute_ns(profile))} of compute"
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
