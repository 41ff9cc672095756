"""docs/reference/command-line.md: its commands exist, and those without a training print what it and the guide show."""

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
EXAMPLES = re.findall(
    r"^(?:\$ |.* -m )?gradcast (.*)", "\n".join(re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)), re.M
)
OUTPUTS = re.findall(r"```console\n\$ gradcast (.*?)\n(.*?)```", PAGE + PLANNING, re.DOTALL)


def test_every_command_has_a_section():
    names = [module.__name__.rpartition(".")[2] for modules in GROUPS.values() for module in modules]
    assert re.findall(r"^## gradcast (\w+)$", PAGE, re.MULTILINE) == names


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from options(command)
        elif action.help != argparse.SUPPRESS:  # names of an earlier release
            yield from (option for option in action.option_strings if option.startswith("--"))


def test_every_option_is_in_the_documentation():
    text = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    assert sorted(set(options(main.build_parser())) - named) == []


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
