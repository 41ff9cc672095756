"""``gradcast dev link fit``: fits a link model to measured times of collective operations."""

import argparse
import json
from typing import Any

from gradcast import _core
from gradcast.cli import common
from gradcast.disk import check_writable, read_text, write_file
from gradcast.documents import number, shown, table_number, table_rows, whole
from gradcast.errors import Error
from gradcast.units import format_percent, format_size

_EXAMPLE = "gradcast dev link fit samples.csv -o link.json"
_OPS = ("all_reduce", "reduce_scatter", "all_gather")
_CODE = "invalid_link"
_TIME_NS = number(1e-3, 2.0**53)
# A link whose costs are wrong by more predicts nothing. On published and measured networks it is below 3 %.
_ERROR_MAX = 0.5

Samples = dict[str, list[tuple[int, float]]]


def add_parser(commands: Any) -> None:
    common.command_group(commands, "link", "fit a link model to measured times", _EXAMPLE, (_add_fit,))


def _add_fit(commands: Any) -> None:
    parser = common.command(
        commands,
        "fit",
        "fit start-up and per-byte costs to samples",
        "The CSV has the columns bytes and time_ns, and optionally op: all_reduce (the default), reduce_scatter or "
        "all_gather.",
        _EXAMPLE,
    )
    parser.add_argument("csv", metavar="CSV", help="the samples")
    method = "robust tolerates up to a quarter of outliers"
    common.option(parser, "--method", None, method, default="robust", choices=["robust", "least_squares"])
    common.option(parser, "--max-pieces", "N", "largest number of linear pieces", common.whole_number(1, 8), "3")
    common.option(parser, "-o, --output", "JSON", "write the link model to this file, for --link", common.not_empty)
    common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    samples = read_samples(args.csv)
    if args.output:
        check_writable(args.output, "link")
    fits = {}
    for op, points in samples.items():
        try:
            fits[op] = _core.fit_op_cost(points, method=args.method, max_pieces=args.max_pieces)
        except Error as error:
            raise Error(f"{args.csv}, {op}: {error}", error.code) from None
        _check_fit(op, fits[op], args.csv)
    text = json.dumps(_as_json(fits, samples), indent=1) + "\n"
    if args.output:
        if "all_reduce" not in fits:
            raise Error(f"{args.csv} has no samples of all_reduce, which every link needs; measure these too")
        write_file(args.output, text, "link")
    if args.json:
        print(text, end="")
        return
    for op, fit in fits.items():
        _print(op, fit, len(samples[op]))
    if args.output:
        print(f"The link is in {args.output}; use it with --link {args.output}.")


def read_samples(path: str) -> Samples:
    samples: Samples = {}
    for where, row in table_rows(read_text(path, "table of samples"), path, ("bytes", "time_ns"), _CODE):
        op = row.get("op") or "all_reduce"
        if op not in _OPS:
            raise Error(f"{where}: op is {shown(op)}; it must be one of {', '.join(_OPS)}", _CODE)
        size_bytes = table_number(row, "bytes", whole(1, 2**53), where, _CODE)
        samples.setdefault(op, []).append((size_bytes, table_number(row, "time_ns", _TIME_NS, where, _CODE)))
    if not samples:
        raise Error(f"{path} has no samples; add lines of bytes,time_ns", _CODE)
    return samples


def _check_fit(op: str, fit: _core.LinkFit, path: str) -> None:
    if fit.relative_error_median > _ERROR_MAX:
        raise Error(
            f"{path}, {op}: no costs fit these times: the best are off by {format_percent(fit.relative_error_median)} "
            f"in the median, {format_percent(_ERROR_MAX)} are the most. Times that grow with the size are expected; "
            "measure again, more often, on an idle network",
            _CODE,
        )


def _print(op: str, fit: _core.LinkFit, sample_count: int) -> None:
    print(
        f"{op}: {sample_count} samples, off by {format_percent(fit.relative_error_median)} in the median, "
        f"{format_percent(fit.relative_error_max)} at most"
    )
    rows = []
    for piece in fit.cost.pieces:
        end = "any" if piece.up_to_bytes is None else format_size(piece.up_to_bytes)
        beta = piece.beta_ns_per_byte
        bandwidth = "-" if beta == 0 else f"{format_size(1e9 / beta)}/s"
        rows.append([end, f"{piece.alpha_ns / 1e3:.1f}", f"{beta:.4f}", bandwidth])
    common.print_table(rows, ["up to", "alpha us", "beta ns per byte", "bandwidth"], "rrrr")
    print()


def _as_json(fits: dict[str, _core.LinkFit], samples: Samples) -> dict[str, Any]:
    """Returns a link as ``--link`` reads it, with a field about the fit that readers of links ignore."""
    fields: dict[str, Any] = {"version": 1}
    for op, fit in fits.items():
        # Written as an all-reduce, because a link with only this operation would be rejected.
        alone = _core.LinkModel(all_reduce=list(fit.cost.pieces))
        fields[op] = json.loads(alone.to_json())["all_reduce"]
    fields["fit"] = {
        op: {
            "samples": len(samples[op]),
            "relative_error_median": fit.relative_error_median,
            "relative_error_max": fit.relative_error_max,
        }
        for op, fit in fits.items()
    }
    return fields
