"""Does ``gradcast doctor`` find what was put in? Causes injected into a training in the laboratory, alone and in pairs.

Each case trains tests/doctor/train.py on two nodes of two ranks each, with a known cause or two, and is held against
the case without any: what the cause's own part has gained, by what was injected or, for links, by what the step has.

    python -m benchmarks.doctor_causes [--only link,read+link] [--refresh benchmarks/results/tables.md]
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.pages import append, commit, parser_of, read_record, show
from gradcast.diagnosis.analyze.step_breakdown import TRAFFIC
from gradcast.lab.hosts import Network
from gradcast.lab.workers import run_workers

MARK = "doctor causes"
SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "doctor" / "train.py"
NODES, RANKS = 2, 4
FAST_BITS_PER_S, SLOW_BITS_PER_S, SLOW_INSIDE_BITS_PER_S = 2e9, 150e6, 300e6
# Ordinary steps that are watched: the median of twenty still varies by 2 % on cores that four ranks share.
WATCHED_STEPS = 50
USUAL = ("--layer-ms", "5", "--steps", str(WATCHED_STEPS + 10), "--batch", "4")
TIMEOUT_S = 300
# What a part may be off: of the step, or ms.
SHARE, MS = 0.05, 2.0
_REST_AIM = 0.02  # of the step


@dataclass(frozen=True)
class Cause:
    """``part``: where it has to be found; ``ms``: what is injected, None where the step tells; ``took``: what of the
    script's own measurement, since computing takes longer on cores that are shared. ``rank``: where alone."""

    name: str
    part: str
    ms: float | None = None
    took: str | None = None
    arguments: tuple[str, ...] = ()
    slow_links: bool = False  # every node's
    slow_node: bool = False  # of one node's link alone
    inside_bits_per_s: float | None = None
    latency_s: float = 0.0  # of every node's link
    rank: int | None = None


CAUSES = {
    cause.name: cause
    for cause in (
        Cause("read", "data_storage", took="read", arguments=("--read-ms", "40")),
        Cause("prepare", "data_cpu", took="prepare", arguments=("--prepare-ms", "12")),
        Cause("python", "launch", 40.0, arguments=("--python-ms", "40")),
        Cause("link", "network", slow_links=True),
        Cause("slow host", "network", slow_node=True),
        Cause("latency", "network", latency_s=2e-3),
        Cause("inside", "interconnect", inside_bits_per_s=SLOW_INSIDE_BITS_PER_S),
        Cause("slow rank", "waiting", 45.0, arguments=("--slow-rank", "3", "--slow-ms", "45"), rank=3),
        Cause("slow data", "waiting", 40.0, arguments=("--read-ms", "40", "--only-rank", "1"), rank=1),
    )
}
# Two that inject the same option cannot go together.
_EXCLUDED = ({"read", "slow data"}, {"prepare", "slow data"}, {"link", "slow host"})


def set_inside_rate(network: Network, rate_bits_per_s: float) -> None:
    """Sets the rate of each host's loopback, over which its ranks send to each other."""
    for host in range(network.host_count):
        name = network._namespace(host)
        subprocess.run(["ip", "-n", name, "link", "set", "dev", "lo", "mtu", "16000"], check=True)
        network.limit_device(name, "lo", rate_bits_per_s)


def run_script(network: Network, ranks: int, before: list[str], arguments: Iterable[str]) -> None:
    """``before``: what the script is an argument of."""
    per_host = ranks // network.host_count
    with open(os.devnull, "w") as nowhere:
        command = [*before, str(SCRIPT), *arguments]
        run_workers(command, ranks, timeout_s=TIMEOUT_S, network=network, ranks_per_host=per_host, output=nowhere)


def diagnose(causes: list[Cause]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, Network(NODES, FAST_BITS_PER_S) as network:
        for cause in causes:
            for node in range(network.host_count):
                if cause.slow_links or (cause.slow_node and node == 1):
                    network.set_rate(node, SLOW_BITS_PER_S)
                if cause.latency_s > 0:
                    network.set_latency(node, cause.latency_s)
            if cause.inside_bits_per_s is not None:
                set_inside_rate(network, cause.inside_bits_per_s)
        options = ("--no-network", "--no-trial", "--steps", str(WATCHED_STEPS), "--duration", "40s", "-o", folder)
        took = str(Path(folder) / "took")
        arguments = [*USUAL, "--took", took, *(word for cause in causes for word in cause.arguments)]
        run_script(network, RANKS, ["-m", "gradcast", "doctor", *options], arguments)
        return json.loads((Path(folder) / "doctor.json").read_text()) | {"took": json.loads(Path(took).read_text())}


def kept(name: str, result: dict[str, Any]) -> dict[str, Any]:
    """What a table needs of a run."""
    return {
        "name": name,
        "commit": commit(),
        "step_ms": result["step"]["ms"],
        "parts": {part["key"]: part["ms"] for part in result["parts"]},
        "straggler": result["straggler"],
        "verdict": result["verdict"]["kind"],
        "took": result["took"],
    }


def gained_ms(part: str, usual: dict[str, Any], found: dict[str, Any]) -> float:
    """Milliseconds that a part has gained. Both parts of traffic count together: one hides the other."""
    counted = TRAFFIC if part in TRAFFIC else (part,)
    return sum(found["parts"][each] - usual["parts"][each] for each in counted)


def row_of(cause: Cause, causes: list[Cause], usual: dict[str, Any], found: dict[str, Any]) -> list[str]:
    step_ms = found["step_ms"]
    injected_ms = {each.name: found["took"][each.took] if each.took else each.ms for each in causes}
    expected_ms = injected_ms[cause.name]
    if expected_ms is None:
        # What links cost is what the step has gained but for what the other cause has put in.
        expected_ms = step_ms - usual["step_ms"] - sum(ms for ms in injected_ms.values() if ms is not None)
    if cause.part == "waiting":
        # Buffers are sent before forward, so that ranks wait for the one's data and for the other's computing.
        expected_ms = sum(each.ms for each in causes if each.part == "waiting")
    off_ms = gained_ms(cause.part, usual, found) - expected_ms
    right = abs(off_ms) <= max(SHARE * step_ms, MS) and is_named(cause, causes, found)
    return [
        " + ".join(each.name for each in causes),
        cause.part,
        f"{expected_ms:.1f}",
        f"{gained_ms(cause.part, usual, found):.1f}",
        f"{off_ms / step_ms:+.1%}",
        f"{step_ms:.0f}",
        f"{found['parts']['rest'] / step_ms:+.1%}",
        found["verdict"],
        "yes" if right else "no",
    ]


def is_named(cause: Cause, causes: list[Cause], found: dict[str, Any]) -> bool:
    """The right rank, where two are not slow at once; the right kind of traffic, where only one is slow."""
    if cause.rank is not None:
        slow = [each.rank for each in causes if each.rank is not None]
        return found["straggler"] is not None and found["straggler"]["rank"] in slow
    if cause.part in TRAFFIC and sum(each.part in TRAFFIC for each in causes) == 1:
        return found["parts"][cause.part] == max(found["parts"][each] for each in TRAFFIC)
    return True


def cases(only: str | None) -> list[list[Cause]]:
    """``only``: names of causes with commas, those of a pair joined by a plus; None: all causes and all pairs."""
    if only:
        asked = [sorted(case.split("+"), key=list(CAUSES).index) for case in only.split(",")]
        return [[], *([CAUSES[name] for name in names] for names in asked)]
    pairs = [list(pair) for pair in itertools.combinations(CAUSES.values(), 2)]
    return [[], *([cause] for cause in CAUSES.values()), *pairs]


def rows_of(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Each run is held against the last one without a cause that came before it."""
    usual: dict[str, Any] = {}
    found = {}
    for line in lines:
        if line["name"] == name_of([]):
            usual = line
        found[line["name"]] = (usual, line)
    named = [(causes, found[name_of(causes)]) for causes in cases(None)[1:] if name_of(causes) in found]
    return [row_of(cause, causes, *held) for causes, held in named for cause in causes]


def rests_of(lines: list[dict[str, Any]]) -> str:
    """How far the parts are from adding up to the step."""
    shares = [abs(line["parts"]["rest"]) / line["step_ms"] for line in lines]
    small = sum(share <= _REST_AIM for share in shares)
    return (
        f"The rest, what the parts leave of the step: {statistics.median(shares):.1%} of it in the median run, "
        f"{_REST_AIM:.0%} or less in {small} of {len(shares)}, {max(shares):.1%} at most."
    )


def name_of(causes: list[Cause]) -> str:
    return " + ".join(cause.name for cause in causes) or "no cause"


def main() -> None:
    parser = parser_of(__doc__, "doctor_causes.jsonl")
    parser.add_argument("--only", help="these and the case without any, also where the record has them: link,read+link")
    parser.add_argument("--table", action="store_true", help="only the table of what the record has")
    args = parser.parse_args()
    lines = read_record(args.record)
    for causes in [] if args.table else cases(args.only):
        name = name_of(causes)
        has_it = not args.only and name in {line["name"] for line in lines}
        if {cause.name for cause in causes} in _EXCLUDED or has_it:
            continue
        lines.append(kept(name, diagnose(causes)))
        append(args.record, lines[-1])
        print(f"{name}: {lines[-1]['step_ms']:.1f} ms, {lines[-1]['verdict']}", file=sys.stderr, flush=True)
    headers = ["injected", "part", "expected ms", "found ms", "off", "step ms", "rest", "verdict", "recovered"]
    rows = rows_of(lines)
    text = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    text += f"\n\n{sum(row[-1] == 'yes' for row in rows)} of {len(rows)} recovered. {rests_of(lines)}"
    show(text, MARK, args.refresh)


if __name__ == "__main__":
    main()
