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
        "intervals overlap.",
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
    step = difference.step
    assert step.a is not None, "a run has steps"
    assert step.b is not None, "a run has steps"
    slowdown = ratio(step.b, step.a) - 1
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
    _print_table("ms", difference.times, digits=1)
    if difference.actions:
        print()
        _print_table("predicted speed-up", difference.actions, digits=2)
    print(f"\n{run_comparison.sentence(difference)}")


def _print_table(what: str, rows: list[ComparedValue], digits: int) -> None:
    def cell(value: float | None, sign: str = "") -> str:
        return "-" if value is None else format(value, f"{sign}.{digits}f")

    cells = [[row.words, cell(row.a), cell(row.b), cell(row.difference, "+"), _CLEAR[row.clear]] for row in rows]
    common.print_table(cells, [what, "A", "B", "B - A", "clear"], "lrrrl")


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
