"""``gradcast dev profile``: imports a profile from a table of layers, or shows one."""

import argparse
from pathlib import Path
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.comparison.compare import total_bytes
from gradcast.disk import check_writable, read_text, write_file
from gradcast.errors import Error
from gradcast.files import load_profile, rescaled_profile
from gradcast.terminal import on_one_line
from gradcast.units import format_size

_EXAMPLE = "gradcast dev profile import layers.csv --name mymodel -o mymodel.json"
_SHOW_EXAMPLE = "gradcast dev profile show resnet50"
_LARGEST = 10
_SMALL_BYTES = 64_000  # below this size an all-reduce is mostly start-up on every published network


def add_parser(commands: Any) -> None:
    example = f"{_EXAMPLE}\n  {_SHOW_EXAMPLE}"
    common.command_group(commands, "profile", "import or show profiles", example, (_add_import, _add_show))


def _add_import(commands: Any) -> None:
    parser = common.command(
        commands,
        "import",
        "make a profile from a table of layers",
        "The CSV has one row per layer in forward order, with the columns layer, forward_ms, backward_ms and "
        "parameter_bytes. A layer with parameters is one tensor.",
        _EXAMPLE,
    )
    parser.add_argument("csv", metavar="CSV", help="the table of layers")
    common.option(parser, "--name", "NAME", "name of the profile (default: that of the file)", common.not_empty)
    common.option(parser, "--scale", "FACTOR", "multiply every time", common.POSITIVE, "1")
    workers = common.whole_number(1, common.WORKERS_MAX)
    common.option(parser, "--workers", "N", "number of workers to record", workers, "1")
    output = "write the profile to this file (default: print it)"
    common.option(parser, "-o, --output", "JSON", output, common.not_empty)
    parser.set_defaults(run=run_import)


def _add_show(commands: Any) -> None:
    parser = common.command(commands, "show", "show what a profile holds", "", _SHOW_EXAMPLE)
    common.add_profile_argument(parser)
    common.add_json_option(parser)
    parser.set_defaults(run=run_show)


def run_import(args: argparse.Namespace) -> None:
    text = read_text(args.csv, "table")
    if args.output:
        check_writable(args.output, "profile")
    try:
        profile = _core.Profile.from_layer_table(
            csv=text, name=args.name or Path(args.csv).stem, world_size=args.workers
        )
        profile = rescaled_profile(profile, args.scale)
    except Error as error:
        raise Error(f"{args.csv}: {error}", error.code) from None
    if not args.output:
        print(profile.to_json(), end="")
        return
    write_file(args.output, profile.to_json(), "profile")
    print(common.describe_profile(profile))
    print(f"The profile is in {args.output}.")


def run_show(args: argparse.Namespace) -> None:
    profile = load_profile(args.profile, args.scale)
    if args.json:
        print(profile.to_json(), end="")
        return
    print(common.describe_profile(profile, args.scale))
    tensors = profile.tensors
    small = [tensor for tensor in tensors if tensor.bytes < _SMALL_BYTES]
    print(
        f"{len(small)} of the tensors are smaller than {format_size(_SMALL_BYTES)} and hold "
        f"{100 * sum(tensor.bytes for tensor in small) / total_bytes(profile):.1f} % of the bytes"
    )
    none = "none; give commands --bandwidth or --network"
    print(f"link: {none if profile.link is None else common.describe_cost(profile.link.all_reduce)}")
    print()
    largest = sorted(range(len(tensors)), key=lambda index: -tensors[index].bytes)[:_LARGEST]
    rows = [_tensor_cells(index, tensors[index]) for index in sorted(largest)]
    common.print_table(rows, ["#", "tensor", "size", "ready ms", "first use ms"], "rlrrr")
    if len(tensors) > _LARGEST:
        print(f"(the {_LARGEST} largest of {len(tensors)}; times from the start of backward and of forward)")


def _tensor_cells(index: int, tensor: _core.Tensor) -> list[Any]:
    name = on_one_line(tensor.name if len(tensor.name) <= 60 else tensor.name[:59] + "…")
    return [index, name, format_size(tensor.bytes), f"{tensor.ready_ns / 1e6:.1f}", f"{tensor.need_ns / 1e6:.1f}"]
