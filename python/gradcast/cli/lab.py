"""``gradcast lab``: trains on hosts with slow links, made on this machine. Each action is a module ``lab_*``."""

from typing import Any

from gradcast.cli import common, lab_adapt, lab_run, lab_train


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands, "lab", "train on hosts with slow links, made on this machine", "", lab_train.EXAMPLE
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for action in (lab_train, lab_adapt, lab_run):
        action.add_parser(actions)
