"""``gradcast dev policies``: lists the policies, their sources and their parameters."""

import argparse
import textwrap
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.units import format_size, format_time


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "policies",
        "list the policies",
        "Shows their sources, and their parameters for `dev plan --set`.",
        "gradcast dev policies",
    )
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.json:
        common.print_json({"policies": [_as_json(info) for info in _core.policies()]})
        return
    for info in _core.policies():
        default = " (the default)" if info.name == _core.DEFAULT_POLICY else ""
        print(f"{info.name}{default}")
        _print_indented(info.summary)
        _print_indented(f"source: {info.source}")
        if info.overlap_only:
            _print_indented("overlap mode only")
        for parameter in info.parameters:
            _print_indented(f"--set {parameter.name}=…: {parameter.meaning} (default: {_value(parameter)})")
        print()


def _print_indented(text: str) -> None:
    print(textwrap.fill(text, width=100, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False))


def _value(parameter: _core.PolicyParameter) -> str:
    if parameter.name.endswith("_bytes") and parameter.default_value > 0:
        mebibytes, rest = divmod(parameter.default_value, 2**20)
        return f"{mebibytes:g} MiB" if rest == 0 else format_size(parameter.default_value)
    if parameter.name.endswith("_ns") and parameter.default_value > 0:
        return format_time(parameter.default_value)
    return f"{parameter.default_value:g}"


def _as_json(info: _core.PolicyInfo) -> dict[str, Any]:
    names = ("name", "summary", "source", "overlap_only", "needs_scatter_gather")
    parameters = [{"name": p.name, "default": p.default_value, "meaning": p.meaning} for p in info.parameters]
    return {name: getattr(info, name) for name in names} | {"parameters": parameters}
