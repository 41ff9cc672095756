"""docs/reference/command-line.md has every command; their examples can be parsed, and print what the guide shows."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from conftest import ROOT
from gradcast import _core
from gradcast.cli import GROUPS, main

DOCS = ROOT / "docs"
PAGE = (DOCS / "reference" / "command-line.md").read_text()
PLANNING = (DOCS / "guide" / "planning.md").read_text()
OUTPUTS = re.findall(r"```console\n\$ gradcast (.*?)\n(.*?)```", PLANNING, re.DOTALL)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


PARSERS = list(parsers(main.build_parser()))
EPILOGS = "\n".join(parser.epilog or "" for parser in PARSERS).replace("\\\n", " ")
EXAMPLES = sorted(set(re.findall(r"^ {2}(?:.* )?gradcast (.*)", EPILOGS, re.MULTILINE)))


def test_every_command_has_a_section():
    names = [module.__name__.rpartition(".")[2] for modules in GROUPS.values() for module in modules]
    assert re.findall(r"^## gradcast (\w+)$", PAGE, re.MULTILINE) == names


def test_every_policy_has_a_row():
    assert [policy.name for policy in _core.policies() if f"\n| `{policy.name}` |" not in PLANNING] == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_can_be_parsed(example):
    assert main.build_parser().parse_args(shlex.split(example)).run


@pytest.mark.parametrize(("arguments", "shown"), OUTPUTS, ids=[arguments for arguments, _ in OUTPUTS])
def test_outputs_are_as_shown(arguments, shown, run):
    printed = run(*arguments.split()).out
    for part in filter(None, (part.strip("\n") for part in shown.split("…\n"))):
        assert part in printed
        printed = printed.partition(part)[2]
