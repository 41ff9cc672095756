"""``gradcast compare``: compares two runs of ``gradcast doctor``."""

import argparse
import sys
from typing import Any

from gradcast.cli import common
from gradcast.comparison.compare import ratio
from gradcast.diagnosis.report import run_comparison
from gradcast.diagnosis.report.run_comparison import ComparedValue, RunComparison
from gradcast.diagnosis.runs import load_run
from gradcast.units import format_percent

_EXAMPLE = """gradcast compare before/ after/
  gradcast compare before/ after/ --fail-above 5%"""
_CLEAR = {True: "yes", False: "no", None: "-"}


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "compare",
        "compare two runs of gradcast doctor",
        "Shows the step, its parts, its lower bound and the predicted gains of both runs, and whether their 95 % "
        "intervals lie apart.",
        _EXAMPLE,
    )
    parser.add_argument("a", metavar="A", help="a run: its folder, or its doctor.json")
    parser.add_argument("b", metavar="B", help="the other run")
    limit = "end with exit code 1 if B's step takes longer than A's by more than this share, for instance 5%%"
    common.option(parser, "--fail-above", "SHARE", limit, common.FRACTION)
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    difference = run_comparison.compare(load_run(args.a), load_run(args.b))
    slowdown = ratio(difference.step.b, difference.step.a) - 1
    if args.json:
        common.print_json(_json(args, difference, slowdown))
    else:
        _print(args, difference)
    if args.fail_above is None or slowdown <= args.fail_above:
        return 0
    print(
        f"gradcast: B is {format_percent(slowdown)} slower than A, more than {format_percent(args.fail_above)}",
        file=sys.stderr,
    )
    return common.EXIT_FINDING


def _print(args: argparse.Namespace, difference: RunComparison) -> None:
    for words in difference.settings:
        print(f"The runs differ in {words}.")
    print(f"A: {args.a} ({difference.verdicts[0]})\nB: {args.b} ({difference.verdicts[1]})\n")
    common.print_table([_time(row) for row in difference.times], ["ms", "A", "B", "B - A", "clear"], "lrrrl")
    if difference.actions:
        print()
        headers = ["predicted speed-up", "A", "B", "B - A", "clear"]
        common.print_table([_speedup(row) for row in difference.actions], headers, "lrrrl")
    print(f"\n{run_comparison.sentence(difference)}")


def _time(row: ComparedValue) -> list[str]:
    return [row.words, _digits(row.a, ".1f"), _digits(row.b, ".1f"), _digits(row.difference, "+.1f"), _CLEAR[row.clear]]


def _speedup(row: ComparedValue) -> list[str]:
    return [row.words, _digits(row.a, ".2f"), _digits(row.b, ".2f"), _digits(row.difference, "+.2f"), _CLEAR[row.clear]]


def _digits(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _json(args: argparse.Namespace, difference: RunComparison, slowdown: float) -> dict[str, Any]:
    return {
        "a": args.a,
        "b": args.b,
        "verdicts": list(difference.verdicts),
        "not_the_same": difference.settings,
        "slowdown": slowdown,
        "times_ms": [row._asdict() for row in difference.times],
        "actions_speedup": [row._asdict() for row in difference.actions],
        "sentence": run_comparison.sentence(difference),
    }
