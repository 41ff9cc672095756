"""Predicts published training throughput and says how far off it is: ``python -m benchmarks.replay``.

docs/evaluation/predictions.md explains the method and holds the tables; every cell and the variants are printed only.
"""

import sys
from collections.abc import Callable, Iterable

from tabulate import tabulate

from benchmarks.pages import parser_of, show
from benchmarks.replay.fit import BERT, FIT_MODELS, RESNET, Replay, Result, mean_error
from benchmarks.replay.predict import METHODS, Parameters

_NOT_MODELLED = "ByteScheduler-A2A"  # was limited by its program, not by the network
_PARAMETER_HEADERS = ["wire Gbit/s", "start-up at 8 GPUs us", "update ps/byte"]
_ERROR_HEADER = "mean absolute error %"


def _table(headers: list[str], rows: list[list[str]], align: str) -> str:
    """``align``: one letter per column, l or r."""
    columns = [{"l": "left", "r": "right"}[letter] for letter in align]
    return tabulate(rows, headers, tablefmt="github", colalign=columns, disable_numparse=True)


def _percent(value: float) -> str:
    # A cell that a fit meets is off by rounding alone, whose sign means nothing.
    return "0.0" if abs(value) < 0.0005 else f"{100 * value:+.1f}"


def _mean(results: Iterable[Result]) -> str:
    return f"{100 * mean_error(results):.1f}"


def _without_bytescheduler(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if result.cell.method != _NOT_MODELLED]


def groups(replay: Replay) -> str:
    results = replay.results(replay.both)
    tested = [result for result in results if result.tested]

    def by(kind: str, key: Callable[[Result], object], names: Iterable[object]) -> list[tuple[str, str, list[Result]]]:
        return [(kind, str(name), [result for result in tested if key(result) == name]) for name in names]

    rows = [
        *by("method", lambda result: result.cell.method, METHODS),
        *by("model", lambda result: result.cell.model, FIT_MODELS),
        ("all", "all", tested),
        ("all", "all but ByteScheduler", _without_bytescheduler(tested)),
        ("no model", "all", [result for result in replay.baseline() if result.tested]),
        ("another model", "BERT-Large", [result for result in results if result.cell.model not in FIT_MODELS]),
    ]
    text = [[kind, name, str(len(group)), _mean(group)] for kind, name, group in rows]
    return _table(["by", "group", "cells", _ERROR_HEADER], text, "llrr")


def _parameter_cells(parameters: Parameters) -> list[str]:
    return [
        f"{8 * parameters.wire_bytes_per_s / 1e9:.2f}",
        f"{parameters.operation_ns / 1e3:.0f}",
        f"{1e3 * parameters.update_ns_per_byte:.1f}",
    ]


def fits(replay: Replay) -> str:
    tested = [result for result in replay.results(replay.both) if result.tested]
    rows = [["both models", *_parameter_cells(replay.both), "all other cells", _mean(tested)]]
    for model, other in ((RESNET, BERT), (BERT, RESNET)):
        parameters = replay.from_one(model)
        results = [result for result in replay.results(parameters) if result.cell.model == other]
        rows.append([model, *_parameter_cells(parameters), f"{other}, all {len(results)}", _mean(results)])
    return _table(["fitted on", *_PARAMETER_HEADERS, "tested on", _ERROR_HEADER], rows, "lrrrlr")


def cells(replay: Replay) -> str:
    rows = []
    for result in replay.results(replay.both):
        cell = result.cell
        measured = [f"{cell.samples_per_s:.1f}", f"{100 * cell.stddev / cell.samples_per_s:.1f}"]
        predicted = [f"{result.samples_per_s:.1f}", _percent(result.error), "fitted" if result.fitted else "tested"]
        rows.append([cell.model, cell.method, str(cell.worker_count), *measured, *predicted])
    headers = ["model", "method", "GPUs", "measured/s", "± %", "predicted/s", "error %", "cell"]
    return _table(headers, rows, "llrrrrrl")


def variants(replay: Replay) -> str:
    rows = []
    for name, parameters, results in [("the prediction", replay.both, replay.results(replay.both)), *replay.variants()]:
        tested = [result for result in results if result.tested]
        rows.append([name, *_parameter_cells(parameters), _mean(tested), _mean(_without_bytescheduler(tested))])
    return _table(["choice", *_PARAMETER_HEADERS, _ERROR_HEADER, "without ByteScheduler %"], rows, "lrrrrr")


def scaling(replay: Replay) -> str:
    """The cells of 32 GPUs from those of 8 and 16."""
    results = replay.scaled()
    rows = [
        [
            result.cell.model,
            result.cell.method,
            f"{result.slowest:.0f} to {result.fastest:.0f}",
            _percent(result.error),
            "yes" if result.inside else "no",
        ]
        for result in results
    ]
    inside = sum(result.inside for result in results)
    rows.append(["all", "mean absolute", "", _mean(results), f"{inside} of {len(results)}"])
    return _table(["model", "method", "band, samples/s", "error %", "in the band"], rows, "llrrr")


TABLES = {f"replay:{table.__name__}": table for table in (groups, fits, scaling)}  # of the page


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    replay = Replay()
    for mark, table in TABLES.items():
        show(table(replay), mark, args.refresh)
        print()
    if args.refresh is None:
        print(cells(replay), variants(replay), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
