"""``gradcast compare``: compares two runs of ``gradcast doctor``."""

import argparse
from typing import Any

from gradcast.cli import common
from gradcast.diagnosis.report import run_comparison
from gradcast.diagnosis.report.run_comparison import ComparedValue, RunComparison
from gradcast.diagnosis.runs import load_run

_EXAMPLE = "gradcast compare before/ after/"
_CLEAR = {True: "yes", False: "no", None: "-"}


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "compare",
        "compare two runs of gradcast doctor",
        "Shows the step, its parts, its lower bound and the predicted gains of both runs, and whether their 95 % "
        "intervals lie apart.",
        _EXAMPLE,
    )
    parser.add_argument("a", metavar="A", help="a run: its folder, or its doctor.json")
    parser.add_argument("b", metavar="B", help="the other run")
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    difference = run_comparison.compare(load_run(args.a), load_run(args.b))
    if args.json:
        common.print_json(_json(args, difference))
        return
    for words in difference.settings:
        print(f"The runs differ in {words}.")
    print(f"A: {args.a} ({difference.verdicts[0]})\nB: {args.b} ({difference.verdicts[1]})\n")
    common.print_table([_time(row) for row in difference.times], ["ms", "A", "B", "B - A", "clear"], "lrrrl")
    if difference.actions:
        print()
        headers = ["predicted speedup", "A", "B", "B - A", "clear"]
        common.print_table([_speedup(row) for row in difference.actions], headers, "lrrrl")
    print(f"\n{run_comparison.sentence(difference)}")


def _time(row: ComparedValue) -> list[str]:
    return [row.words, _digits(row.a, ".1f"), _digits(row.b, ".1f"), _digits(row.difference, "+.1f"), _CLEAR[row.clear]]


def _speedup(row: ComparedValue) -> list[str]:
    return [row.words, _digits(row.a, ".2f"), _digits(row.b, ".2f"), _digits(row.difference, "+.2f"), _CLEAR[row.clear]]


def _digits(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _json(args: argparse.Namespace, difference: RunComparison) -> dict[str, Any]:
    return {
        "a": args.a,
        "b": args.b,
        "verdicts": list(difference.verdicts),
        "not_the_same": difference.settings,
        "times_ms": [row._asdict() for row in difference.times],
        "actions_speedup": [row._asdict() for row in difference.actions],
        "sentence": run_comparison.sentence(difference),
    }
