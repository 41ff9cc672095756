"""``gradcast report``: an HTML page of a run of gradcast doctor, or a picture of results of gradcast-bench."""

import argparse
import os
from typing import Any

from gradcast import bench_results, documents
from gradcast.cli import common
from gradcast.diagnosis.report import html as html_report
from gradcast.diagnosis.report import metrics
from gradcast.diagnosis.runs import KIND, RESULT, check_run, load_run, trace_of
from gradcast.diagnosis.trace import files as trace_files
from gradcast.disk import check_writable, read_text, write_file
from gradcast.errors import Error

_EXAMPLE = """gradcast report run/
  gradcast report run/ -o report.html --prometheus gradcast.prom
  mpirun -n 4 gradcast-bench --transport mpi --json > bench.json && gradcast report bench.json -o bench.png"""
_PAGE = "report.html"
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
    common.option(parser, "-o, --output", "FILE", output, common.not_empty)
    numbers = "also write a run's numbers for node_exporter's textfile collector"
    common.option(parser, "--prometheus", "FILE", numbers, common.not_empty)
    traces = "also write a run's trace as one file per rank, for Holistic Trace Analysis"
    common.option(parser, "--hta", "FOLDER", traces, common.not_empty)
    common.add_json_option(parser, "print a run's numbers as one flat JSON object, for loggers")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if os.path.isdir(args.results):
        _page(args, load_run(args.results))
        return
    fields = documents.parsed(read_text(args.results, "run"), args.results)
    kind = fields.get("kind") if isinstance(fields, dict) else None
    if kind == KIND:
        _page(args, check_run(fields, args.results))
    elif kind == bench_results.KIND:
        _picture(args, bench_results.check_results(fields, args.results))
    else:
        raise Error(f"{args.results} was written neither by gradcast doctor nor by gradcast-bench; give {_EITHER}")


def _page(args: argparse.Namespace, doctor: dict[str, Any]) -> None:
    folder = args.results if os.path.isdir(args.results) else os.path.dirname(args.results)
    output = args.output or os.path.join(folder, _PAGE)
    check_writable(output, "page")
    if args.prometheus:
        check_writable(args.prometheus, "file for Prometheus")
    trace = trace_files.load(trace_of(args.results)) if args.hta else None
    write_file(output, html_report.build(doctor), "page")
    if args.prometheus:
        write_file(args.prometheus, metrics.prometheus(doctor), "file for Prometheus")
    if trace is not None:
        trace_files.save_per_rank(trace, args.hta)
    if args.json:
        common.print_json(dict(metrics.flat(doctor)))
        return
    print(doctor["verdict"].get("sentence") or "")
    print(f"The page is in {output}.")


def _picture(args: argparse.Namespace, results: dict[str, Any]) -> None:
    if args.output is None:
        raise Error("the file of the picture is missing; give it, for instance with -o bench.png")
    if args.prometheus or args.hta or args.json:
        raise Error(
            "--prometheus, --hta and --json only work with runs of gradcast doctor; omit them for gradcast-bench"
        )
    common.check_picture(args.output)
    from gradcast.plots import draw_bench

    draw_bench(args.output, results)
    for sentence in bench_results.sentences(results):
        print(sentence)
    print(f"The picture is in {args.output}.")
