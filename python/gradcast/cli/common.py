"""What several commands share: options, and how results are printed."""

import argparse
import json
from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from gradcast import _core
from gradcast.comparison.compare import compute_ns, total_bytes
from gradcast.errors import Error
from gradcast.files import bundled_profiles, load_profile
from gradcast.units import format_ms, format_size, format_time, parse_positive


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of ``gradcast.units`` as an argparse type: its sentence becomes the message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number from {low} to {high}")
        return int(text)

    return convert


def new_parser(commands: Any, name: str, summary: str, details: str, example: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {details}".strip(),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_profile_argument(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(bundled_profiles())
    parser.add_argument(
        "profile", metavar="PROFILE", help=f"a profile: a JSON file, or a bundled one by name ({names})"
    )
    add_scale_option(parser)


def add_scale_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale",
        type=argument(parse_positive),
        default=1.0,
        metavar="FACTOR",
        help="multiply every time of the profile: 0.5 stands for a device twice as fast",
    )


def add_schedule_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=["overlap", "hook"],
        default="overlap",
        help="overlap: gradients travel under the next forward pass too; hook: all have arrived before it, as with DDP "
        "(default: overlap)",
    )
    parser.add_argument(
        "--in-flight",
        type=whole_number(1, 1_000_000),
        default=1,
        metavar="N",
        help="blocks between launch and finish at the same time (default: 1)",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs instead of text for people")


def profile_from(args: argparse.Namespace) -> _core.Profile:
    return load_profile(args.profile, args.scale)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def print_table(rows: list[list[Any]], headers: list[str], align: str) -> None:
    """``align``: one letter per column, l or r."""
    words = {"l": "left", "r": "right"}
    print(
        tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=[words[letter] for letter in align])
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
    """ "700 us + 4.67 ms/MB", piece by piece."""
    lines = []
    for piece in cost.pieces:
        line = f"{format_time(piece.alpha_ns)} + {format_time(piece.beta_ns_per_byte * 1e6)} per MB"
        if piece.up_to_bytes is not None:
            line += f" up to {format_size(piece.up_to_bytes)}"
        lines.append(line)
    return ", ".join(lines)


def describe_traffic(profile: _core.Profile, link: _core.LinkModel, worker_count: int | None) -> str:
    """``worker_count``: None where a link says nothing about it."""
    if worker_count == 1:
        return "one worker has no traffic"
    whole_ns = link.all_reduce.cost_ns(total_bytes(profile))
    return f"an all-reduce takes {describe_cost(link.all_reduce)}; all gradients in one take {format_ms(whole_ns)}"
