"""``gradcast profile``: imports a profile from a table of layers, or shows one."""

import argparse
import json
from pathlib import Path
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.comparison.compare import total_bytes
from gradcast.errors import Error
from gradcast.files import check_writable, read_text, write_text
from gradcast.units import format_size

_EXAMPLE = "gradcast profile import layers.csv --name mymodel -o mymodel.json"
_SHOW_EXAMPLE = "gradcast profile show resnet50"
_LARGEST = 10
_SMALL_BYTES = 64_000  # below this size an all-reduce is mostly start-up on every network in docs/reference/networks.md


def add_parser(commands: Any) -> None:
    parser = common.new_parser(commands, "profile", "import or show profiles", "", f"{_EXAMPLE}\n  {_SHOW_EXAMPLE}")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    _add_import(actions)
    _add_show(actions)


def _add_import(actions: Any) -> None:
    parser = common.new_parser(
        actions,
        "import",
        "make a profile from a table of layers",
        "The CSV has one row per layer in forward order, with the columns layer, forward_ms, backward_ms and "
        "parameter_bytes. A layer with parameters is one tensor.",
        _EXAMPLE,
    )
    parser.add_argument("csv", metavar="CSV", help="the table of layers")
    parser.add_argument("--name", help="name of the profile (default: that of the file)")
    parser.add_argument(
        "--scale", type=common.POSITIVE, default=1.0, metavar="FACTOR", help="multiply every time (default: 1)"
    )
    parser.add_argument(
        "--workers",
        type=common.whole_number(1, 1_000_000),
        default=1,
        metavar="N",
        help="world size to record (default: 1)",
    )
    parser.add_argument("-o", "--output", metavar="JSON", help="write the profile to this file (default: print it)")
    parser.set_defaults(run=run_import)


def _add_show(actions: Any) -> None:
    parser = common.new_parser(actions, "show", "show what a profile holds", "", _SHOW_EXAMPLE)
    common.add_profile_argument(parser)
    common.add_json_option(parser)
    parser.set_defaults(run=run_show)


def run_import(args: argparse.Namespace) -> None:
    text = read_text(args.csv, "table")
    if args.output:
        check_writable(args.output, "profile")
    try:
        profile = _core.Profile.from_layer_table(
            csv=text, name=args.name or Path(args.csv).stem, scale=args.scale, world_size=args.workers
        )
    except Error as error:
        raise Error(f"{args.csv}: {error}", error.code) from None
    if not args.output:
        print(profile.to_json(), end="")
        return
    write_text(args.output, profile.to_json(), "profile")
    print(common.describe_profile(profile))
    print(f"The profile is in {args.output}.")


def run_show(args: argparse.Namespace) -> None:
    profile = common.profile_from(args)
    if args.json:
        common.print_json(json.loads(profile.to_json()))
        return
    print(common.describe_profile(profile, args.scale))
    small = [tensor for tensor in profile.tensors if tensor.bytes < _SMALL_BYTES]
    print(
        f"{len(small)} of the tensors are smaller than {format_size(_SMALL_BYTES)} and hold "
        f"{100 * sum(tensor.bytes for tensor in small) / total_bytes(profile):.1f} % of the bytes"
    )
    print("link: " + _link(profile))
    print()
    largest = sorted(range(len(profile.tensors)), key=lambda index: -profile.tensors[index].bytes)[:_LARGEST]
    rows = [_tensor_cells(index, profile.tensors[index]) for index in sorted(largest)]
    common.print_table(rows, ["#", "tensor", "size", "ready ms", "first use ms"], "rlrrr")
    if len(profile.tensors) > _LARGEST:
        print(f"(the {_LARGEST} largest of {len(profile.tensors)}; times from the start of backward and of forward)")


def _link(profile: _core.Profile) -> str:
    return (
        "none; give commands --bandwidth or --network"
        if profile.link is None
        else common.describe_cost(profile.link.all_reduce)
    )


def _tensor_cells(index: int, tensor: _core.Tensor) -> list[Any]:
    name = tensor.name if len(tensor.name) <= 60 else tensor.name[:59] + "…"
    return [index, name, format_size(tensor.bytes), f"{tensor.ready_ns / 1e6:.1f}", f"{tensor.need_ns / 1e6:.1f}"]
