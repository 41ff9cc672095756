"""``gradcast watch``: the alarms of a run of the past, and its last snapshot."""

import argparse
import collections
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from gradcast.alarms import Alarms, Observation
from gradcast.cli import common
from gradcast.errors import Error
from gradcast.files import read_text

_EXAMPLE = """gradcast watch run.jsonl
  gradcast watch speeds.jsonl --expected 335ms --ranks 8"""


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "watch",
        "when a run of the past became slower than expected, and why, and its last snapshot",
        "Each line of the file is one step: handle.stats(), its field observed, or an object with step and step_ms. "
        "Ends with 1 if there are alarms.",
        _EXAMPLE,
    )
    parser.add_argument("run_", metavar="RUN", help="a file with one JSON object in each line")
    expected = "what a step should take, for all steps; nothing but the steps is then looked at"
    common.option(parser, "--expected", "TIME", expected, common.TIME)
    ranks = "number of ranks, where the lines do not hold it (default: 1)"
    common.option(parser, "--ranks", "N", ranks, common.whole_number(1, common.WORKERS_MAX))
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    text = read_text(args.run_, "run")
    steps, snapshots = list(_observations(text, args.run_)), _last_snapshots(text)
    if args.expected is not None:
        steps = [dataclasses.replace(step, expected_ms=args.expected / 1e6) for step in steps]
    ranks = args.ranks or max([1, *(len(step.compute_ms) for step in steps)])
    alarms = Alarms(ranks, exact=args.expected is not None)
    for step in steps:
        alarms.add(step)
    if args.json:
        found = {"steps": len(steps), "alarms": [dataclasses.asdict(alarm) for alarm in alarms.all]}
        common.print_json(found | {"snapshots": snapshots})
    else:
        if snapshots is not None:
            print(_described(snapshots))
        for alarm in alarms.all:
            end = "still at the end of the run" if alarm.until_step is None else f"over at step {alarm.until_step:,}"
            print(f"{alarm.sentence} ({end})")
        print(f"steps: {len(steps)}, alarms: {len(alarms.all)}")
    return common.EXIT_FINDING if alarms.all else 0


def _last_snapshots(text: str) -> dict[str, Any] | None:
    """Their statistics at the end of the run; None if it took none. REQUIRES: each line is one that is observed."""
    last = next((json.loads(line) for line in reversed(text.splitlines()) if line.strip()), {})
    found = last.get("snapshots")
    return found if isinstance(found, dict) else None


def _described(snapshots: dict[str, Any]) -> str:
    values = collections.defaultdict(lambda: None, snapshots)
    failed = f"; {values['failed']} failed, the last time with: {values['error']}" if values["error"] else ""
    if values["step"] is None:
        return f"snapshots: none is complete{failed}"
    ms = {"the copy": values["stall_ms"], "the write": values["write_ms"]}
    times = ", ".join(f"{name} took {each:.1f} ms" for name, each in ms.items() if each is not None)
    cost = "" if values["overhead"] is None else f", {values['overhead']:.1%} of the time in all"
    age = "" if values["age_s"] is None else f", {values['age_s']:.1f} s old at the end of the run"
    return f"snapshots: the last one is of step {values['step']:,}{age}; {times}{cost}{failed}"


def _observations(text: str, path: str) -> Iterator[Observation]:
    """Lines of steps about which nothing is known yet are left out."""
    seen = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise Error(f"{where}: this is not JSON; write one object in each line") from None
        if not isinstance(fields, dict):
            raise Error(f"{where}: this is not an object; write one in each line")
        fields = fields.get("observed", fields)
        if fields is None:
            continue
        if not isinstance(fields, dict):
            raise Error(f"{where}: observed is no object; write handle.stats() as it is")
        try:
            observed = Observation.from_json(fields)
        except Error as error:
            raise Error(f"{where}: {error}") from None
        # Whoever writes the statistics twice in a step sees the same observation again.
        if observed.step != seen:
            yield observed
        seen = observed.step
