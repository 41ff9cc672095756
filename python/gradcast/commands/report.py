"""``gradcast report``: what gradcast-bench has measured, as a picture and in a few sentences."""

import argparse
import json
from pathlib import Path
from typing import Any

from gradcast.commands import common
from gradcast.errors import Error
from gradcast.files import check_writable

_EXAMPLE = "mpirun -n 4 gradcast-bench --transport mpi --json > bench.json && gradcast report bench.json -o bench.png"


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "report",
        "draw what gradcast-bench has measured",
        "Time over size of each operation with the fitted costs, and the step under each policy.",
        _EXAMPLE,
    )
    parser.add_argument("results", metavar="JSON", help="what gradcast-bench --json has printed")
    parser.add_argument("-o", "--output", metavar="PNG", required=True, help="the picture; .svg and .pdf work as well")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    results = _read(args.results)
    check_writable(args.output, "picture")
    from gradcast.pictures import draw_bench

    draw_bench(args.output, results)
    for sentence in _sentences(results):
        print(sentence)
    print(f"The picture is in {args.output}.")


def _read(path: str) -> dict[str, Any]:
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}", "invalid_option") from None
    except ValueError:
        raise Error(f"{path} is not JSON; it has to be what gradcast-bench --json prints", "invalid_option") from None
    if not isinstance(results, dict) or results.get("kind") != "gradcast-bench":
        raise Error(
            f"{path} is not of gradcast-bench; it has to be what gradcast-bench --json prints", "invalid_option"
        )
    if results.get("version") != 1:
        raise Error(f"{path} is of version {results.get('version')}; this gradcast reads version 1", "invalid_option")
    if not results.get("sweep") and not results.get("schedule"):
        raise Error(f"{path} has neither a sweep nor a schedule: nothing to draw", "invalid_option")
    return results


def _sentences(results: dict[str, Any]) -> list[str]:
    found = []
    wrong = sum(row["errors"] for row in results.get("sweep", []))
    if wrong:
        found.append(f"{wrong} elements were not the exact sum: do not train over this transport.")
    rows = results.get("schedule", [])
    if rows:
        best = min(rows, key=lambda row: row["step_ns"])
        ddp = next((row for row in rows if row["policy"] == "ddp"), None)
        gain = "" if ddp is None or ddp is best else f", {ddp['step_ns'] / best['step_ns']:.2f} times as fast as ddp"
        found.append(
            f"{best['policy']} is the fastest: {best['step_ns'] / 1e6:.1f} ms per step{gain}; no plan takes less than "
            f"{best['bound_ns'] / 1e6:.1f}."
        )
        worst = max(rows, key=lambda row: abs(row["prediction_error"]))
        found.append(f"Predictions are off by {abs(worst['prediction_error']):.0%} at most ({worst['policy']}).")
    return found
