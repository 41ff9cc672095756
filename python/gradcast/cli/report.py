"""``gradcast report``: what gradcast doctor has found, as a page; what gradcast-bench has measured, as a picture."""

import argparse
import json
from pathlib import Path
from typing import Any

from gradcast.atomic import write_atomically
from gradcast.cli import common
from gradcast.diagnosis.report import html as html_report
from gradcast.diagnosis.report import metrics
from gradcast.diagnosis.runs import KIND, RESULT, check_run, load_run, trace_of
from gradcast.diagnosis.trace import files as trace_files
from gradcast.errors import Error
from gradcast.files import check_writable

_EXAMPLE = """gradcast report run/
  gradcast report run/ -o report.html --prometheus gradcast.prom
  mpirun -n 4 gradcast-bench --transport mpi --json > bench.json && gradcast report bench.json -o bench.png"""
_PAGE = "report.html"
_BENCH = "gradcast-bench"
_EITHER = f"a run of gradcast doctor, its {RESULT}, or what gradcast-bench --json prints"


def add_parser(commands: Any) -> None:
    parser = common.new_parser(
        commands,
        "report",
        "make a page of a run of gradcast doctor, or a picture of what gradcast-bench has measured",
        "The page is one\nHTML file that needs no network to be read. The picture has time over size of each operation "
        "with the\nfitted costs, and the step under each policy.",
        _EXAMPLE,
    )
    parser.add_argument(
        "results",
        metavar="RUN",
        help="the folder or the doctor.json of a run, or what gradcast-bench --json has printed",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=f"the page (default: {_PAGE} in the folder of the run), or the picture: .png, .svg or .pdf",
    )
    parser.add_argument("--prometheus", metavar="FILE", help="of a run: also its numbers for node_exporter's textfiles")
    parser.add_argument(
        "--hta", metavar="FOLDER", help="of a run: also its trace as one file per rank, as HTA wants it"
    )
    parser.add_argument(
        "--json", action="store_true", help="of a run: print its numbers as one flat object, for loggers"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if Path(args.results).is_dir():
        _page(args, load_run(args.results))
        return
    text = _read(args.results)
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
        common.print_json(metrics.flat(doctor))
        return
    print(doctor["verdict"]["sentence"])
    print(f"The page is in {output}.")


def _picture(args: argparse.Namespace, results: dict[str, Any]) -> None:
    _check(results, args.results)
    if args.output is None:
        raise Error("the picture needs a name; give it with -o, for instance -o bench.png")
    if args.prometheus or args.hta or args.json:
        raise Error("--prometheus, --hta and --json are for runs of gradcast doctor; leave them out for gradcast-bench")
    check_writable(args.output, "picture")
    from gradcast.plots import draw_bench

    draw_bench(args.output, results)
    for sentence in _sentences(results):
        print(sentence)
    print(f"The picture is in {args.output}.")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}", "invalid_option") from None
    except ValueError:
        raise Error(f"{path} is not text in UTF-8; it has to be {_EITHER}", "invalid_option") from None


def _fields(text: str, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise Error(f"{path} is not JSON; it has to be {_EITHER}", "invalid_option") from None
    if not isinstance(fields, dict) or fields.get("kind") not in (KIND, _BENCH):
        raise Error(
            f"{path} is not of gradcast-bench, nor of gradcast doctor; it has to be {_EITHER}", "invalid_option"
        )
    return fields


def _check(results: dict[str, Any], path: str) -> None:
    if results.get("version") != 1:
        raise Error(f"{path} is of version {results.get('version')}; this gradcast reads version 1", "invalid_option")
    if not results.get("sweep") and not results.get("schedule"):
        raise Error(f"{path} has neither a sweep nor a schedule: nothing to draw", "invalid_option")


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
