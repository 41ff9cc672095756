"""The tables of the page, as rows; the terminal and Markdown print the same ones."""

from dataclasses import dataclass

from predict import Parameters
from results import Replay, Result, group_errors, mean_absolute_error, tested
from tabulate import tabulate


@dataclass(frozen=True)
class Table:
    key: str  # of the page's block that holds it
    title: str
    headers: list[str]
    rows: list[list[str]]
    align: str  # one letter per column: l or r

    def text(self, tablefmt: str) -> str:
        columns = [{"l": "left", "r": "right"}[letter] for letter in self.align]
        return tabulate(self.rows, self.headers, tablefmt=tablefmt, colalign=columns, disable_numparse=True)


def _percent(value: float, *, sign: bool = True) -> str:
    text = f"{100 * value:{'+' if sign else ''}.1f}"
    # A cell that a fit meets is off by rounding alone, whose sign means nothing.
    return "0.0" if float(text) == 0 else text


def _result_row(result: Result) -> list[str]:
    cell = result.cell
    return [
        cell.model,
        cell.method,
        str(cell.worker_count),
        f"{cell.samples_per_s:.1f}",
        f"{100 * cell.stddev / cell.samples_per_s:.1f}",
        f"{result.predicted_samples_per_s:.1f}",
        _percent(result.error),
        "fitted" if result.fitted else "tested",
    ]


_RESULT_HEADERS = ["model", "method", "GPUs", "measured/s", "± %", "predicted/s", "error %", "cell"]


def cells_table(replay: Replay) -> Table:
    rows = [_result_row(result) for result in replay.main_results]
    return Table("cells", "Every cell, in samples per second", _RESULT_HEADERS, rows, "llrrrrrl")


def third_table(replay: Replay) -> Table:
    rows = [_result_row(result) for result in replay.third_model]
    rows.append(
        ["mean absolute", "", "", "", "", "", _percent(mean_absolute_error(replay.third_model), sign=False), ""]
    )
    return Table("third", "BERT-Large, on which nothing was fitted", _RESULT_HEADERS, rows, "llrrrrrl")


def groups_table(replay: Replay) -> Table:
    rows = [
        [kind, name, str(count), _percent(value, sign=False)]
        for kind, name, value, count in group_errors(replay.main_results)
    ]
    baseline = tested(replay.baseline)
    rows.append(["no model", "all", str(len(baseline)), _percent(mean_absolute_error(baseline), sign=False)])
    return Table(
        "groups",
        "Mean absolute error of the tested cells",
        ["by", "group", "cells", "mean absolute error %"],
        rows,
        "llrr",
    )


def _parameter_cells(parameters: Parameters) -> list[str]:
    return [
        f"{8 * parameters.wire_bytes_per_s / 1e9:.2f}",
        f"{parameters.operation_ns / 1e3:.0f}",
        f"{1e3 * parameters.update_ns_per_byte:.1f}",
        f"{parameters.contention:.2f}",
    ]


_PARAMETER_HEADERS = ["wire Gbit/s", "start-up at 8 GPUs us", "update ps/byte", "contention"]


def fits_table(replay: Replay) -> Table:
    both = replay.both
    rows = [
        [
            "both models",
            str(len(both.cells)),
            *_parameter_cells(both.parameters),
            "all other cells",
            _percent(mean_absolute_error(tested(replay.main_results)), sign=False),
        ]
    ]
    for crossing in replay.crossings:
        fit = crossing.fit
        rows.append(
            [
                fit.name,
                str(len(fit.cells)),
                *_parameter_cells(fit.parameters),
                f"{crossing.tested_on}, all {len(crossing.results)}",
                _percent(mean_absolute_error(crossing.results), sign=False),
            ]
        )
    return Table(
        "fits",
        "Parameters by what they were fitted on",
        ["fitted on", "cells", *_PARAMETER_HEADERS, "tested on", "mean absolute error %"],
        rows,
        "lrrrrrlr",
    )


def crossings_table(replay: Replay) -> Table:
    rows = [
        [crossing.fit.name, *_result_row(result)[:4], *_result_row(result)[5:7]]
        for crossing in replay.crossings
        for result in crossing.results
    ]
    headers = ["fitted on", *_RESULT_HEADERS[:4], *_RESULT_HEADERS[5:7]]
    return Table("crossings", "Fitted on one model, tested on the other", headers, rows, "lllrrrr")


def scheduler_table(replay: Replay) -> Table:
    rows = []
    for model, parameters, results in replay.scheduler_crossings:
        for result in results:
            row = _result_row(result)
            rows.append([model, f"{parameters.scheduler_ns / 1e3:.0f}", row[0], row[2], row[6], row[7]])
    headers = ["fitted on", "scheduler us", "model", "GPUs", "error %", "cell"]
    return Table("scheduler", "ByteScheduler with a cost of its own per operation", headers, rows, "lrlrrl")


def bsp_table(replay: Replay) -> Table:
    rows = [[name, *(_percent(result.error) for result in results)] for name, results in replay.bsp_choice]
    return Table("bsp", "BSP of ResNet-50, error %", ["BSP sends", "4 GPUs", "8 GPUs"], rows, "lrr")


def variants_table(replay: Replay) -> Table:
    rows = []
    for name, parameters, results in (
        ("the prediction", replay.both.parameters, replay.main_results),
        *((variant.name, variant.parameters, variant.results) for variant in replay.variants),
    ):
        errors = {group: value for _, group, value, _ in group_errors(results)}
        rows.append(
            [
                name,
                *_parameter_cells(parameters),
                _percent(errors["all"], sign=False),
                _percent(errors["all but ByteScheduler"], sign=False),
            ]
        )
    headers = ["choice", *_PARAMETER_HEADERS, "mean absolute error %", "without ByteScheduler %"]
    return Table("variants", "What each choice is worth", headers, rows, "lrrrrrr")


def all_tables(replay: Replay) -> list[Table]:
    return [
        fits_table(replay),
        cells_table(replay),
        groups_table(replay),
        crossings_table(replay),
        bsp_table(replay),
        scheduler_table(replay),
        variants_table(replay),
        third_table(replay),
    ]
