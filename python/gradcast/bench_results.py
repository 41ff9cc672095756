"""The output of ``gradcast-bench --json``: its fields, its table as gradcast-bench prints it, and a summary. Pure."""

import json
from typing import Any

from gradcast import _core
from gradcast.documents import Wrong, checked, list_of, number, one_of, record, text, that, truth, version, whole
from gradcast.errors import Error

KIND = "gradcast-bench"
_TIME_NS = number(0, 2.0**53)
_MEASURED_NS = number(1e-3, 2.0**53)
_SWEEP = record(
    {
        "op": one_of(("all_reduce", "reduce_scatter", "all_gather")),
        "size_bytes": whole(1, 2**53),
        "errors": whole(0, 2**63),
        **dict.fromkeys(("time_ns", "low_ns", "high_ns"), _MEASURED_NS),
    },
    {
        "dtype": one_of(("float32", "float64", "bfloat16", "float16")),
        "in_place": truth,
        **dict.fromkeys(("p50_ns", "p90_ns", "p99_ns"), _MEASURED_NS),
        **dict.fromkeys(("stream_ns", "algbw_gb_per_s", "busbw_gb_per_s"), _TIME_NS),
    },
)
# As nccl-tests names types, and their bytes.
_TYPES = {"float32": ("float", 4), "float64": ("double", 8), "bfloat16": ("bfloat16", 2), "float16": ("half", 2)}
_COLUMNS = "{:>12} {:>12} {:>8} {:>6} {:>14} {:>5} {:>11} {:>9} {:>9} {:>7} {:>11} {:>11} {:>11}"
_SCHEDULE = record(
    {
        "policy": text,
        "prediction_error": number(-1e15, 1e15),
        **dict.fromkeys(("step_ns", "low_ns", "high_ns"), _MEASURED_NS),
        **dict.fromkeys(("compute_ns", "predicted_ns", "bound_ns"), _TIME_NS),
    }
)


def _check_link(fields: dict[str, Any]) -> None:
    try:
        _core.LinkModel.from_json(json.dumps(fields))
    except Error as error:
        raise Wrong(f"is wrong: {error}") from None


def _check_parts(results: dict[str, Any]) -> None:
    if not results.get("sweep") and not results.get("schedule"):
        raise Wrong("has neither a sweep nor a schedule: nothing to draw")
    if results.get("schedule"):
        record({"profile": text, "mode": text})(results)


_READ = that(
    record(
        {"version": version(1), "transport": text, "world_size": whole(1, 10**6)},
        {
            "sweep": list_of(_SWEEP),
            "schedule": list_of(_SCHEDULE),
            "link": that(record({}), _check_link),
            "profile": text,
            "mode": text,
        },
    ),
    _check_parts,
)


def check_results(fields: Any, path: str) -> dict[str, Any]:
    """Raises Error unless these are the fields of the output."""
    return checked(fields, _READ, path)


def header() -> str:
    names = ("size", "count", "type", "redop", "operation", "place", "time", "algbw", "busbw", "errors")
    units = ("(B)", "(elements)", "", "", "", "", "(us)", "(GB/s)", "(GB/s)", "")
    return "\n".join(
        _COLUMNS.format(*first, *others)
        for first, others in ((names, ("p50", "p90", "p99")), (units, ("(us)", "(us)", "(us)")))
    )


def line(row: dict[str, Any]) -> str:
    """A row of the table: of a sweep that has all its fields."""
    type_, element_bytes = _TYPES[row["dtype"]]
    return _COLUMNS.format(
        row["size_bytes"],
        row["size_bytes"] // element_bytes,
        type_,
        "none" if row["op"] == "all_gather" else "sum",
        row["op"],
        "in" if row["in_place"] else "out",
        f"{row['time_ns'] / 1e3:.1f}",
        f"{row['algbw_gb_per_s']:.3f}",
        f"{row['busbw_gb_per_s']:.3f}",
        row["errors"],
        *(f"{row[f'{name}_ns'] / 1e3:.1f}" for name in ("p50", "p90", "p99")),
    )


def wrong_sums(results: dict[str, Any]) -> str | None:
    """Returns a sentence if sums were wrong."""
    wrong = sum(row["errors"] for row in results.get("sweep") or [])
    return f"{wrong} elements of the sums were wrong: do not train over this transport." if wrong else None


def sentences(results: dict[str, Any]) -> list[str]:
    wrong = wrong_sums(results)
    found = [] if wrong is None else [wrong]
    rows = results.get("schedule") or []
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
