"""Predicts published training throughput and says how far off it is: ``python benchmarks/replay``.

docs/evaluation/predictions.md explains the method and holds these tables.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
from pathlib import Path

from results import Replay, Result, group_errors, mean_absolute_error, tested
from tables import Table, all_tables


def block(table: Table) -> str:
    """The table between the marks by which the page is kept up to date."""
    return f"<!-- replay:{table.key} -->\n{table.text('github')}\n<!-- /replay:{table.key} -->"


def _constant(text: str, _match: re.Match[str]) -> str:
    return text


def refreshed(page: str, tables: list[Table]) -> str:
    """The page with its tables replaced. Tables without marks in it are left out."""
    for table in tables:
        pattern = rf"<!-- replay:{table.key} -->\n.*?<!-- /replay:{table.key} -->"
        # As a function, since a plain replacement would have its backslashes read.
        page = re.sub(pattern, functools.partial(_constant, block(table)), page, flags=re.DOTALL)
    return page


def _cell_json(result: Result) -> dict[str, object]:
    return {
        **dataclasses.asdict(result.cell),
        "predicted_samples_per_s": result.predicted_samples_per_s,
        "error": result.error,
        "fitted": result.fitted,
    }


def as_json(replay: Replay) -> dict[str, object]:
    fits = [("both", replay.both, replay.main_results)]
    fits += [(crossing.fit.name, crossing.fit, crossing.results) for crossing in replay.crossings]
    return {
        "version": 1,
        "fits": [
            {
                "fitted_on": name,
                "parameters": dataclasses.asdict(fit.parameters),
                "at_limit": list(fit.at_limit),
                "fitted_cells": len(fit.cells),
                "mean_absolute_error": mean_absolute_error(tested(results)),
                "cells": [_cell_json(result) for result in results],
            }
            for name, fit, results in fits
        ],
        "groups": [
            {"by": kind, "group": name, "mean_absolute_error": value, "cells": count}
            for kind, name, value, count in group_errors(replay.main_results)
        ],
        "scheduler": [
            {
                "fitted_on": model,
                "scheduler_ns": parameters.scheduler_ns,
                "cells": [_cell_json(result) for result in results],
            }
            for model, parameters, results in replay.scheduler_crossings
        ],
        "variants": [
            {
                "choice": variant.name,
                "parameters": dataclasses.asdict(variant.parameters),
                "mean_absolute_error": mean_absolute_error(tested(variant.results)),
            }
            for variant in replay.variants
        ],
        "third_model": [_cell_json(result) for result in replay.third_model],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/replay", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--refresh", metavar="PAGE", help="renew the tables in docs/evaluation/predictions.md")
    args = parser.parse_args(arguments)
    replay = Replay()
    if args.json:
        print(json.dumps(as_json(replay), indent=2))
        return 0
    tables = all_tables(replay)
    if args.refresh:
        page = Path(args.refresh)
        page.write_text(refreshed(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        return 0
    for table in tables:
        print(f"{table.title}\n\n{table.text('simple')}\n")
    print("Rows of parameter-server methods in the published table are left out: only all-reduces are modelled.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
