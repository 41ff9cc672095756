"""``gradcast report``: an HTML page of a run of gradcast doctor, or a picture of results of gradcast-bench."""

import argparse
import json
from pathlib import Path
from typing import Any

from gradcast.cli import common
from gradcast.diagnosis.report import html as html_report
from gradcast.diagnosis.report import metrics
from gradcast.diagnosis.runs import KIND, RESULT, check_run, load_run, trace_of
from gradcast.diagnosis.trace import files as trace_files
from gradcast.errors import Error
from gradcast.files import check_writable, read_text, write_atomically

_EXAMPLE = """gradcast report run/
  gradcast report run/ -o report.html --prometheus gradcast.prom
  mpirun -n 4 gradcast-bench --transport mpi --json > bench.json && gradcast report bench.json -o bench.png"""
_PAGE = "report.html"
_BENCH = "gradcast-bench"
_EITHER = f"a run of gradcast doctor, its {RESULT}, or the output of gradcast-bench --json"


def add_parser(commands: Any) -> None:
    parser = common.command(
        commands,
        "report",
        "make an HTML page of a run of gradcast doctor, or a picture of results of gradcast-bench",
        "The page is one self-contained file. The picture shows the time of each operation over its size with the "
        "fitted costs, and the step under each policy.",
        _EXAMPLE,
    )
    run_ = "folder or doctor.json of a run, or a file with the output of gradcast-bench --json"
    parser.add_argument("results", metavar="RUN", help=run_)
    output = f"the page (default: {_PAGE} in the folder of the run), or the picture (.png, .svg or .pdf)"
    common.option(parser, "-o, --output", "FILE", output)
    numbers = "also write a run's numbers for node_exporter's textfile collector"
    common.option(parser, "--prometheus", "FILE", numbers)
    traces = "also write a run's trace as one file per rank, for Holistic Trace Analysis"
    common.option(parser, "--hta", "FOLDER", traces)
    common.add_json_option(parser, "print a run's numbers as one flat JSON object, for loggers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if Path(args.results).is_dir():
        _page(args, load_run(args.results))
        return
    text = read_text(args.results, "run")
    fields = _fields(text, args.results)
    if fields.get("kind") == KIND:
        _page(args, check_run(text, args.results))
    else:
        _picture(args, fields)


def _page(args: argparse.Namespace, doctor: dict[str, Any]) -> None:
    folder = Path(args.results) if Path(args.results).is_dir() else Path(args.results).parent
    output = args.output or str(folder / _PAGE)
    check_writable(output, "page")
    write_atomically(output, html_report.build(doctor), "page")
    if args.prometheus:
        write_atomically(args.prometheus, metrics.prometheus(doctor), "file for Prometheus")
    if args.hta:
        trace_files.save_per_rank(trace_files.load(trace_of(args.results)), args.hta)
    if args.json:
        common.print_json(dict(metrics.flat(doctor)))
        return
    print(doctor["verdict"]["sentence"])
    print(f"The page is in {output}.")


def _picture(args: argparse.Namespace, results: dict[str, Any]) -> None:
    _check(results, args.results)
    if args.output is None:
        raise Error("the file of the picture is missing; give it, for instance with -o bench.png")
    if args.prometheus or args.hta or args.json:
        raise Error(
            "--prometheus, --hta and --json only work with runs of gradcast doctor; leave them out for gradcast-bench"
        )
    check_writable(args.output, "picture")
    from gradcast.plots import draw_bench

    draw_bench(args.output, results)
    for sentence in _sentences(results):
        print(sentence)
    print(f"The picture is in {args.output}.")


def _fields(text: str, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise Error(f"{path} is not JSON; give {_EITHER}") from None
    if not isinstance(fields, dict) or fields.get("kind") not in (KIND, _BENCH):
        raise Error(f"{path} was written neither by gradcast doctor nor by gradcast-bench; give {_EITHER}")
    return fields


def _check(results: dict[str, Any], path: str) -> None:
    if results.get("version") != 1:
        raise Error(f"{path} has version {results.get('version')}; this gradcast reads version 1")
    if not results.get("sweep") and not results.get("schedule"):
        raise Error(f"{path} has neither a sweep nor a schedule: nothing to draw")


def _sentences(results: dict[str, Any]) -> list[str]:
    found = []
    wrong = sum(row["errors"] for row in results.get("sweep", []))
    if wrong:
        found.append(f"{wrong} elements of the sums were wrong: do not train over this transport.")
    rows = results.get("schedule", [])
    if rows:
        best = min(rows, key=lambda row: row["step_ns"])
        ddp = next((row for row in rows if row["policy"] == "ddp"), None)
        gain = "" if ddp is None or ddp is best else f", {ddp['step_ns'] / best['step_ns']:.2f}x faster than ddp"
        found.append(
            f"{best['policy']} is the fastest: {best['step_ns'] / 1e6:.1f} ms per step{gain}; the lower bound is "
            f"{best['bound_ns'] / 1e6:.1f} ms."
        )
        worst = max(rows, key=lambda row: abs(row["prediction_error"]))
        found.append(f"Predictions are off by {abs(worst['prediction_error']):.0%} at most ({worst['policy']}).")
    return found
