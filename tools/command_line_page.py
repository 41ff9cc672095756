"""Prints docs/reference/command-line.md, made from the commands' parsers: python tools/command_line_page.py"""

import argparse
from collections.abc import Iterator

from gradcast.cli.main import build_parser

HEAD = """# Command line

`gradcast COMMAND`. Every command has `--help` with an example; those that print results have `--json`. A wrong argument
or file ends with one sentence on stderr and exit code 2. Exit code 1 is a defect of gradcast; `GRADCAST_DEBUG=1` shows
where. `gradcast-bench` has a `--help` of its own ([A new cluster](../guide/cluster.md)).

This page is made from the commands: `python tools/command_line_page.py > docs/reference/command-line.md`.
"""
# Arguments of one command; in groups of several commands they are listed once.
OWN_GROUPS = ("positional arguments", "options", "optional arguments")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that run something, in the order of the help."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for child in action.choices.values():
            yield from commands(child)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def name(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else "")
    if not action.option_strings:
        return value or action.dest
    return ", ".join(action.option_strings) + (f" {value}" if value and action.nargs != 0 else "")


def rows(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> list[str]:
    expand = parser._get_formatter()._expand_help
    actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
    return [f"| `{cell(name(action))}` | {cell(expand(action) if action.help else '')} |" for action in actions]


def section(parser: argparse.ArgumentParser, shown: dict[tuple[str, ...], str]) -> str:
    """One command. ``shown``: groups of arguments that were listed before, and with which command; grows."""
    own, parts = [], []
    for group in parser._action_groups:
        listed = rows(parser, group)
        if group.title in OWN_GROUPS:
            own += listed
        elif tuple(listed) in shown:
            parts.append(f"{cell(group.title or '')}: as for `{shown[tuple(listed)]}`.")
        elif listed:
            shown[tuple(listed)] = parser.prog
            parts.append("\n".join([f"| {cell(group.title or '')} | |", "|---|---|", *listed]))
    if own:
        parts.insert(0, "\n".join(["| argument | meaning |", "|---|---|", *own]))
    example = (parser.epilog or "").partition("example:\n")[2]
    lines = "\n".join(line.removeprefix("  ") for line in example.rstrip().splitlines())
    return "\n\n".join([f"## {parser.prog}", cell(parser.description or ""), *parts, f"```bash\n{lines}\n```"]) + "\n"


def page() -> str:
    shown: dict[tuple[str, ...], str] = {}
    return "\n".join([HEAD, *(section(parser, shown) for parser in commands(build_parser()))])


if __name__ == "__main__":
    print(page(), end="")
