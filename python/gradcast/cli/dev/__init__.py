"""``gradcast dev``: commands for developers of schedules."""

from typing import Any

from gradcast.cli import common
from gradcast.cli.dev import lab_adapt, lab_run, lab_train, link, plan, plot, policies, profile, published_networks


def add_parser(commands: Any) -> None:
    common.command_group(
        commands,
        "dev",
        "plan, draw and train with schedules of your own",
        "gradcast dev plan resnet50 --scale 0.5 --bandwidth 3gbit --workers 8 -o plan.json",
        [*(each.add_parser for each in (plan, plot, policies, profile, link, published_networks)), _add_lab],
    )


def _add_lab(commands: Any) -> None:
    common.command_group(
        commands,
        "lab",
        "train on hosts with slow links, made on this machine",
        lab_train.EXAMPLE,
        [each.add_parser for each in (lab_train, lab_adapt, lab_run)],
    )
