"""What ``play`` says of DDP's buckets, two in flight or one after the other, beside what they took.

DDP keeps two buckets in flight. If that hides the start-up cost of one behind the other, predictions with two are
right; if not, they are too short, and the more so the more buckets there are. Each row of DDP in the record of
``benchmarks.lab_grid`` is predicted both ways, with the link that was measured in its cell.

    python -m benchmarks.ddp_in_flight --record benchmarks/results/lab.jsonl
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.lab_grid import FORWARD_SHARE, Cell, read_lines
from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.files import load_profile, scaled_profile
from gradcast.lab.predictions import with_sizes
from gradcast.lab.variants import TORCH_CAPS_MIB, scaled, variant

IN_FLIGHT = (2, 1)
# With more than these, nearly each tensor is a bucket of its own: nobody trains so, and it would decide the slope.
MOST_BUCKETS = 80
_MIB = 1 << 20


def profile_of(line: dict[str, Any], scale_size: float) -> _core.Profile:
    """The stand-in of a cell: the bundled profile with its sizes, and with the compute that was measured."""
    bundled = load_profile(line["model"])
    compute_ns = 1e6 * line["compute_ms"]
    timed = scaled_profile(
        bundled,
        FORWARD_SHARE * compute_ns / bundled.forward_ns,
        backward_factor=(1 - FORWARD_SHARE) * compute_ns / bundled.backward_ns,
    )
    return with_sizes(timed, {each.name: round(scale_size * each.bytes / 4) * 4 for each in bundled.tensors})


def errors(line: dict[str, Any], in_flight: int) -> list[tuple[int, float]]:
    """Of a cell's rows of DDP: how many buckets, and by what part of the prediction the step took longer."""
    scale_size = Cell(line["model"], line["hosts"], line["ratio"]).scale_size
    profile = profile_of(line, scale_size)
    link = _core.LinkModel.from_json(json.dumps(line["link"]))
    found = []
    for row in line["rows"]:
        if row["name"] != "ddp" and not row["name"].startswith("ddp:"):
            continue
        caps_mib = scaled(variant(row["name"]), scale_size).caps_mib or TORCH_CAPS_MIB
        caps_bytes = int(caps_mib[0] * _MIB), int(caps_mib[-1] * _MIB)
        plan = ddp_baseline.plan(profile, caps_bytes, link, in_flight=in_flight)
        if len(plan.blocks) <= MOST_BUCKETS:
            found.append((len(plan.blocks), 1e6 * row["step_ms"] / plan.predicted_ns - 1))
    return found


def mean_and_slope(found: list[tuple[int, float]]) -> tuple[float, float]:
    """Of one cell: the mean error, and by how much it grows with each bucket more."""
    buckets, missing = zip(*found, strict=True)
    return statistics.mean(missing), statistics.linear_regression(buckets, missing).slope


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", default="benchmarks/results/lab.jsonl", metavar="JSONL")
    args = parser.parse_args()
    cells = defaultdict(list)
    for line in read_lines(Path(args.record)):
        if line["stand_in"]:
            cells[line["hosts"], line["ratio"]].append(line)
    rows = []
    for (hosts, ratio), lines in sorted(cells.items()):
        row = [hosts, f"{ratio:g}", len(lines)]
        for in_flight in IN_FLIGHT:
            found = [errors(line, in_flight) for line in lines]
            each = [mean_and_slope(rows) for rows in found if len({count for count, _ in rows}) > 1]
            row += [f"{statistics.median(values):+.2%}" for values in zip(*each, strict=True)]
        rows.append(row)
    titles = [f"{what}, {number} in flight" for number in IN_FLIGHT for what in ("too short by", "more per bucket")]
    print("medians over the cells of the same row")
    print(tabulate(rows, ["hosts", "comm / compute", "cells", *titles], tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
