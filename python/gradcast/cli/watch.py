"""``gradcast watch``: the alarms of a run of the past, and its last snapshot."""

import argparse
import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from gradcast import documents
from gradcast.alarms import Alarms, Observation
from gradcast.cli import common
from gradcast.disk import read_text
from gradcast.documents import Wrong, number, record, text, whole
from gradcast.errors import Error

_EXAMPLE = """gradcast watch run.jsonl
  gradcast watch speeds.jsonl --expected 335ms --ranks 8"""
_MS = number(0, 1e10)
_SNAPSHOTS = record(
    {},
    {"step": whole(0, 2**53), "age_s": number(0, 1e10), "stall_ms": _MS, "write_ms": _MS, "overhead": number(0, 1e10)}
    | {"failed": whole(0, 2**53), "error": text},
)
_STATISTICS = record({}, {"snapshots": _SNAPSHOTS})


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
    common.option(parser, "--expected", "TIME", expected, common.POSITIVE_TIME)
    ranks = "number of ranks, where the lines do not hold it (default: 1)"
    common.option(parser, "--ranks", "N", ranks, common.whole_number(1, common.WORKERS_MAX))
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    lines = list(_lines(read_text(args.run_, "run"), args.run_))
    if not lines:
        raise Error(f"{args.run_} has no lines; give a file with one JSON object in each")
    steps, snapshots = list(_observations(lines)), lines[-1].snapshots
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


def _described(snapshots: dict[str, Any]) -> str:
    values = collections.defaultdict(lambda: None, snapshots)
    failed = f"; {values['failed'] or 0} failed, the last time with: {values['error']}" if values["error"] else ""
    if values["step"] is None:
        return f"snapshots: none is complete{failed}"
    ms = {"the copy": values["stall_ms"], "the write": values["write_ms"]}
    times = ", ".join(f"{name} took {each:.1f} ms" for name, each in ms.items() if each is not None)
    cost = "" if values["overhead"] is None else f", {values['overhead']:.1%} of the time in all"
    age = "" if values["age_s"] is None else f", {values['age_s']:.1f} s old at the end of the run"
    return f"snapshots: the last one is of step {values['step']:,}{age}; {times}{cost}{failed}"


@dataclasses.dataclass(frozen=True)
class _Line:
    """The parts of a line that are read. ``observed``: None if nothing is known of the step yet, as in the warm-up."""

    observed: Observation | None
    snapshots: dict[str, Any] | None


def _lines(text_: str, path: str) -> Iterator[_Line]:
    # Not splitlines(): a text may hold what that takes for the end of a line, such as U+2028.
    for number_, line in enumerate(text_.split("\n"), 1):
        if line.strip():
            yield documents.read(line, _line, f"{path}, line {number_}")


def _line(value: Any) -> _Line:
    fields = _STATISTICS(value)
    if "observed" in fields:
        observed = fields["observed"]
        try:
            return _Line(None if observed is None else Observation.read(observed), fields.get("snapshots"))
        except Wrong as wrong:
            raise wrong.inside("observed") from None
    return _Line(Observation.read(fields), fields.get("snapshots"))


def _observations(lines: Iterable[_Line]) -> Iterator[Observation]:
    """Skips an observation that was written twice in one step."""
    seen = None
    for line in lines:
        if line.observed is None:
            continue
        if line.observed.step != seen:
            yield line.observed
        seen = line.observed.step
