"""docs/reference/command-line.md has every command, and what the guide shows is printed."""

import re

import pytest

from conftest import ROOT
from gradcast import _core
from gradcast.cli import GROUPS

DOCS = ROOT / "docs"
PAGE = (DOCS / "reference" / "command-line.md").read_text()
PLANNING = (DOCS / "guide" / "planning.md").read_text()
OUTPUTS = re.findall(r"```console\n\$ gradcast (.*?)\n(.*?)```", PLANNING, re.DOTALL)


def test_every_command_has_a_section():
    names = [module.__name__.rpartition(".")[2] for modules in GROUPS.values() for module in modules]
    assert re.findall(r"^## gradcast (\w+)$", PAGE, re.MULTILINE) == names


def test_every_policy_has_a_row():
    assert [policy.name for policy in _core.policies() if f"\n| `{policy.name}` |" not in PLANNING] == []


@pytest.mark.parametrize(("arguments", "shown"), OUTPUTS, ids=[arguments for arguments, _ in OUTPUTS])
def test_outputs_are_as_shown(arguments, shown, run):
    printed = run(*arguments.split()).out
    for part in filter(None, (part.strip("\n") for part in shown.split("…\n"))):
        assert part in printed
        printed = printed.partition(part)[2]
