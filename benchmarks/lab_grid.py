"""The speed of gradcast beside stock DDP over models, hosts and networks: the tables of benchmarks/results/tables.md.

Each cell is one run of ``gradcast dev lab train`` on this machine, with a timed stand-in for an accelerator or a real
model on the CPU, and becomes one JSON line of the record. Cells that the record has already are left out, so that an
interrupted grid goes on where it was.

    python -m benchmarks.lab_grid --run
    python -m benchmarks.lab_grid --refresh benchmarks/results/tables.md
    python -m benchmarks.lab_grid --run --record new.jsonl --compare benchmarks/results/lab.jsonl
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.pages import append, commit, parser_of, read_record, show
from gradcast.comparison.compare import total_bytes
from gradcast.files import load_profile

MODELS = ("resnet18", "resnet50", "resnet152", "inception_v3", "vgg16", "vit_b_16", "bert_base", "gpt2")
RATIOS = (0.5, 1.0, 2.0)  # of the time on the wire to compute
# Compute of a step, ms, by hosts: so long that two cores serve the sockets of all hosts beside it.
COMPUTE_MS = {2: 400, 4: 600, 8: 1200}
GRADIENT_BYTES = 6e6  # every model's tensors are scaled to this sum, for the same reason
FORWARD_SHARE = 1 / 3
USUAL = "ddp,ddp-near,hook,overlap"
FULL_HOSTS, FULL_RATIO = 4, 1.0  # in this cell of each model all is compared
# Real models compute with all that their core has, so that only two hosts find a core each.
# From 4 MiB on all of DDP's sizes make one bucket. Few variants, since a run's prediction is from its beginning.
REAL_HOSTS, REAL_COMPARE = 2, "ddp,ddp:1,ddp:4,hook,overlap"
# Mbit/s and texts or images per host and step: communication takes about as long as compute, half and twice as long.
# digits has 750 images for each host, too few for 50 Mbit/s.
REAL_CELLS = {
    "char_gpt": ((50, 96), (100, 48), (200, 24), (500, 10), (100, 96), (100, 24)),
    "digits": ((100, 700), (200, 480), (500, 200), (500, 400), (200, 320), (500, 120)),
}
ROUNDS, STEPS = 5, 3
# Steps of a real model vary more, since two cores compute and serve the sockets. And after connections have rested, the
# first step that is counted takes up to 7 % longer than the next.
REAL_ROUNDS, REAL_STEPS = 6, 6
MARK = "lab grid"
# Where the cores are busier than that, they are the limit and not the wire, and no schedule helps.
BUSY_LIMIT = 0.85
NEAR_BOUND = 1.05
# Where compute alone is not steady, something else was at work on the machine: the cell is measured again, and the
# steadiest is kept.
STEADY, TRIES = 1.05, 2
PROMISED_GAIN, KEPT_GAIN = 1.27, 1.25


@dataclass(frozen=True)
class Cell:
    """``ratio``: of a stand-in's communication to its compute; 0: a real model, whose rate is given instead."""

    model: str
    hosts: int
    ratio: float = 0
    rate_mbit: float = 0
    batch: int = 0

    @property
    def scale_size(self) -> float:
        return GRADIENT_BYTES / total_bytes(load_profile(self.model))

    @property
    def rate_bits_per_s(self) -> float:
        wire_bytes = 2 * (self.hosts - 1) / self.hosts * GRADIENT_BYTES
        return 8e3 * wire_bytes / (self.ratio * COMPUTE_MS[self.hosts])

    @property
    def key(self) -> str:
        if self.ratio == 0:
            return f"{self.model} {self.rate_mbit:g}mbit batch {self.batch}"
        return f"{self.model} {self.hosts} {self.ratio:g}"

    def arguments(self) -> list[str]:
        real = self.ratio == 0
        rounds, steps = (REAL_ROUNDS, REAL_STEPS) if real else (ROUNDS, STEPS)
        options = {"--hosts": self.hosts, "--model": self.model, "--rounds": rounds, "--steps": steps}
        if real:
            options |= {"--bandwidth": f"{self.rate_mbit:g}mbit", "--batch": self.batch, "--compare": REAL_COMPARE}
        else:
            forward_ms = COMPUTE_MS[self.hosts] * FORWARD_SHARE
            full = (self.hosts, self.ratio) == (FULL_HOSTS, FULL_RATIO)
            options |= {
                "--bandwidth": f"{self.rate_bits_per_s / 1e6:.0f}mbit",
                "--scale-size": f"{self.scale_size:.4g}",
                "--forward": f"{forward_ms:g}ms",
                "--backward": f"{COMPUTE_MS[self.hosts] - forward_ms:g}ms",
                "--compare": "all" if full else USUAL,
            }
        return ["dev", "lab", "train", *(str(word) for option in options.items() for word in option)]


def cells() -> list[Cell]:
    stand_ins = [Cell(model, hosts, ratio) for hosts in COMPUTE_MS for ratio in RATIOS for model in MODELS]
    real = [Cell(model, REAL_HOSTS, 0, rate, batch) for model, each in REAL_CELLS.items() for rate, batch in each]
    return stand_ins + real


def run(args: argparse.Namespace) -> None:
    """The cells that are missing in the record, one after the other."""
    done = {line["cell"] for line in read_record(args.record)}
    missing = [cell for cell in cells() if cell.key not in done and _is_asked_for(cell, args)]
    for number, cell in enumerate(missing):
        arguments = cell.arguments()
        print(f"{number + 1} of {len(missing)}: gradcast {' '.join(arguments)}", flush=True)
        tries = [line for line in _tries(cell, arguments) if _is_settled(line)]
        if not tries:
            print("  left out; run it again", flush=True)
            continue
        append(args.record, min(tries, key=_unsteadiness))


def _tries(cell: Cell, arguments: list[str]) -> Iterator[dict[str, Any]]:
    for _ in range(TRIES):
        finished = subprocess.run(["gradcast", *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode != 0:
            sys.exit(f"the cell failed with exit code {finished.returncode}; run the rest again")
        line = _line(cell, arguments, json.loads(finished.stdout))
        print(_words(line), flush=True)
        yield line
        if not _is_settled(line):
            print("  but the machine has changed so much that gradcast was measuring it again at the end", flush=True)
        elif cell.ratio and _unsteadiness(line) > STEADY:  # a real model's compute is never steady
            print("  but compute alone was not steady: the machine had something else to do", flush=True)
        else:
            return


def _is_settled(line: dict[str, Any]) -> bool:
    """Whether hook and overlap mode had a plan at the end."""
    return all(row_of(line, name)["predicted_ms"] is not None for name in ("hook", "overlap"))


def _unsteadiness(line: dict[str, Any]) -> float:
    """The longest of 80 % of the steps over the shortest, of compute alone, with which no network interferes."""
    alone = row_of(line, "alone")
    return alone["high_ms"] / alone["low_ms"]


def _is_asked_for(cell: Cell, args: argparse.Namespace) -> bool:
    wanted = {"hosts": args.hosts, "model": args.model, "ratio": args.ratio}
    return all(value is None or getattr(cell, name) == value for name, value in wanted.items())


def _line(cell: Cell, arguments: list[str], result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: everything but single steps, details and the profile."""
    rows = [{key: value for key, value in row.items() if key not in ("steps_ms", "details")} for row in result["rows"]]
    for row, full in zip(rows, result["rows"], strict=True):
        stats = full["details"].get("stats", {})
        row |= {key: stats.get(key) for key in ("runs_as_ddp", "plan_version")}
    return {
        "cell": cell.key,
        "model": cell.model,
        "hosts": cell.hosts,
        "ratio": cell.ratio,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cores": os.cpu_count(),
        "command": f"gradcast {' '.join(arguments)}",
        **{key: result[key] for key in ("stand_in", "torch", "parameter_bytes", "link", "compute_ms", "bounds_ms")},
        "rate_bits_per_s": 1e9 * result["bandwidths_gbit_per_s"][0],
        "best_ddp": result["best_ddp"],
        "parameters_equal": result["parameters_equal"],
        "rows": rows,
    }


def row_of(line: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in line["rows"] if row["name"] == name)


def _words(line: dict[str, Any]) -> str:
    overlap, hook = row_of(line, "overlap"), row_of(line, "hook")
    return (
        f"  overlap {overlap['step_ms']:.0f} ms, {overlap['ratio_to_best_ddp']:.2f} x best DDP, "
        f"{overlap['ratio_to_bound']:.3f} of the bound; hook {hook['ratio_to_best_ddp']:.2f} x"
    )


def table(lines: list[dict[str, Any]]) -> str:
    order = [cell.key for cell in cells()]
    lines = sorted(lines, key=lambda line: order.index(line["cell"]))
    stand_ins, real = ([line for line in lines if bool(line["ratio"]) is wanted] for wanted in (True, False))
    full = [line for line in stand_ins if (line["hosts"], line["ratio"]) == (FULL_HOSTS, FULL_RATIO)]
    tables = [
        _titled(f"{hosts} hosts", [_cells(line) for line in stand_ins if line["hosts"] == hosts], HEADERS)
        for hosts in sorted({line["hosts"] for line in stand_ins})
    ]
    tables += [make(chosen) for make, chosen in ((_full_table, full), (_real_table, real)) if chosen]
    return "\n\n".join([_summary(stand_ins), *tables])


def _summary(lines: list[dict[str, Any]]) -> str:
    overlaps = [row_of(line, "overlap") for line in lines]
    gains = [row["ratio_to_best_ddp"] for row in overlaps]
    hook_gains = [row_of(line, "hook")["ratio_to_best_ddp"] for line in lines]
    hook_slower = sum(row_of(line, "hook")["low_ms"] > row_of(line, line["best_ddp"])["high_ms"] for line in lines)
    near = sum(row["ratio_to_bound"] <= NEAR_BOUND for row in overlaps)
    errors = [abs(row["prediction_error"]) for row in overlaps]
    promised = [gain for line, gain in zip(lines, gains, strict=True) if _predicted_gain(line) >= PROMISED_GAIN]
    kept = sum(gain >= KEPT_GAIN for gain in promised)
    return (
        f"{len(lines)} cells. Overlap mode: {near} within 5 % of the bound; {statistics.median(gains):.2f} x "
        f"best-tuned DDP in the median cell, {min(gains):.2f} to {max(gains):.2f}; {KEPT_GAIN} or more in {kept} of "
        f"the {len(promised)} cells where {PROMISED_GAIN} was predicted. Hook mode: {min(hook_gains):.2f} to "
        f"{max(hook_gains):.2f} x, {statistics.median(hook_gains):.2f} in the median cell; in {hook_slower or 'none'} "
        "are its steps slower than the best DDP's beyond the ranges of both. Prediction: off by "
        f"{statistics.median(errors):.1%} in the median cell, {max(errors):.1%} at most."
    )


def _predicted_gain(line: dict[str, Any]) -> float:
    ddp_ms = min(row["predicted_ms"] for row in line["rows"] if row["mode"] == "ddp")
    return ddp_ms / row_of(line, "overlap")["predicted_ms"]


HEADERS = [
    "model", "comm / compute", "Mbit/s", "compute", "bound", "ddp", "best ddp", "hook", "overlap", "x best ddp",
    "/ bound", "predicted", "blocks", "cores busy",
]  # fmt: skip


def _titled(title: str, rows: list[list[str]], headers: list[str]) -> str:
    return f"**{title}** (ms per step)\n\n{tabulate(rows, headers, tablefmt='github', disable_numparse=True)}"


def _real_table(lines: list[dict[str, Any]]) -> str:
    rows = [[*_cells(line), *(_replay(row_of(line, name)) for name in ("overlap", "hook"))] for line in lines]
    title = f"Real models on the CPU, {REAL_HOSTS} hosts"
    return _titled(title, rows, [*HEADERS, "overlap replayed", "hook replayed"])


def _replay(row: dict[str, Any]) -> str:
    return f"{row['replayed_ms']:.0f} ({row['replay_error']:+.1%})" if row.get("replayed_ms") else "-"


def _cells(line: dict[str, Any]) -> list[str]:
    overlap, hook, ddp = row_of(line, "overlap"), row_of(line, "hook"), row_of(line, "ddp")
    best = row_of(line, line["best_ddp"])
    as_ddp = " (as DDP)" if overlap["runs_as_ddp"] else ""
    busy = overlap["cores_busy"]
    return [
        line["model"],
        f"{line['ratio'] or _wire_ms(line) / line['compute_ms']:.2g}",
        f"{line['rate_bits_per_s'] / 1e6:.0f}",
        f"{line['compute_ms']:.0f}{' ~' if _unsteadiness(line) > STEADY else ''}",
        f"{line['bounds_ms']['overlap']['best']:.0f}",
        f"{ddp['step_ms']:.0f}",
        f"{best['step_ms']:.0f} ({best['name'].removeprefix('ddp:')})",
        f"{hook['step_ms']:.0f} ({hook['ratio_to_best_ddp']:.2f} x)",
        f"{overlap['step_ms']:.0f}{as_ddp}",
        f"{overlap['ratio_to_best_ddp']:.2f}",
        f"{overlap['ratio_to_bound']:.3f}",
        f"{overlap['predicted_ms']:.0f} ({overlap['prediction_error']:+.1%})",
        str(overlap["blocks"]),
        f"{busy:.0%}{' !' if busy > BUSY_LIMIT else ''}",
    ]


def _wire_ms(line: dict[str, Any]) -> float:
    wire_bytes = 2 * (line["hosts"] - 1) / line["hosts"] * line["parameter_bytes"]
    return 8e3 * wire_bytes / line["rate_bits_per_s"]


def _full_table(lines: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["name"] for line in lines for row in line["rows"]))
    rows = [[name, *(f"{row_of(line, name)['step_ms']:.0f}" for line in lines)] for name in names]
    title = f"Everything, {FULL_HOSTS} hosts, communication as long as compute"
    return _titled(title, rows, ["", *(line["model"] for line in lines)])


def comparison(lines: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> str:
    """What has become slower or faster in the same cells, as ratios to the best DDP of the same run."""
    old = {line["cell"]: line for line in earlier}
    rows = []
    for line in lines:
        for name in ("hook", "overlap") if line["cell"] in old else ():
            new_ratio, old_ratio = (row_of(each, name)["ratio_to_best_ddp"] for each in (line, old[line["cell"]]))
            rows.append(
                [line["cell"], name, f"{old_ratio:.2f}", f"{new_ratio:.2f}", f"{new_ratio / old_ratio - 1:+.1%}"]
            )
    return tabulate(rows, ["cell", "", "x best ddp, before", "now", "change"], disable_numparse=True)


def main() -> None:
    parser = parser_of(__doc__, "lab.jsonl")
    parser.add_argument("--run", action="store_true", help="measure the cells that are missing in the record")
    parser.add_argument("--hosts", type=int, choices=list(COMPUTE_MS), help="run only the cells with so many")
    parser.add_argument("--model", choices=[*MODELS, *REAL_CELLS], help="run only the cells of this one")
    parser.add_argument("--ratio", type=float, choices=[0, *RATIOS], help="run only these cells; 0: real models")
    parser.add_argument("--compare", type=Path, metavar="JSONL", help="with this earlier record, instead of the tables")
    args = parser.parse_args()
    if args.run:
        run(args)
    lines = read_record(args.record)
    if args.compare:
        print(comparison(lines, read_record(args.compare)))
    else:
        show(table(lines), MARK, args.refresh)


if __name__ == "__main__":
    main()
