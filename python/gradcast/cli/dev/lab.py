"""``gradcast dev lab``: trains on hosts with slow links, made on this machine. Each command is a module ``lab_*``."""

from typing import Any

from gradcast.cli import common
from gradcast.cli.dev import lab_adapt, lab_run, lab_train


def add_parser(commands: Any) -> None:
    common.command_group(
        commands,
        "lab",
        "train on hosts with slow links, made on this machine",
        lab_train.EXAMPLE,
        [each.add_parser for each in (lab_train, lab_adapt, lab_run)],
    )
