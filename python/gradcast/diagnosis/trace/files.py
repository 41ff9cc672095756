"""Traces on disk: the merged one, and one file per rank for tools that read only single ranks.

Perfetto and Holistic Trace Analysis (HTA) open .json.gz directly, which is about fifteen times smaller than plain JSON.
"""

import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradcast.errors import Error
from gradcast.files import make_folder, write_atomically

# HTA recognizes communication by the names of NCCL kernels, whatever the backend, and tells work from waiting by the
# stream of an event.
_HTA_BLOCK = "ncclKernel "
_HTA_COMPUTE_STREAM, _HTA_LINK_STREAM = 7, 20
_WORK = ("forward", "backward", "update")


def save(trace: dict[str, Any], path: str | Path) -> None:
    write_atomically(path, _gzip(json.dumps(trace, separators=(",", ":"))), "trace")


def load(path: str | Path) -> dict[str, Any]:
    """Reads a trace, plain or packed. Raises Error."""
    try:
        data = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise Error(f"the trace {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, EOFError):
        raise Error(f"{path} is not a trace; it must be JSON, or JSON packed by gzip") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise Error(f"{path} is not a trace: it has no list traceEvents")
    return trace


def of_rank(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """Returns what one rank did in the form that HTA expects: its rank number first, and known names and streams."""
    own = [event for event in trace["traceEvents"] if event["pid"] == rank]
    others = [event for event in own if event.get("cat") != "compute"]
    compute = _flattened(event for event in own if event.get("cat") == "compute")
    events = [_in_hta_form(event) for event in [*others, *compute]]
    world_size = trace["distributedInfo"]["world_size"]
    # First in the file, and written with spaces, because HTA searches for the number line by line with a pattern.
    return {
        "schemaVersion": trace["schemaVersion"],
        "distributedInfo": {"rank": rank, "world_size": world_size},
        "traceEvents": events,
    }


def save_per_rank(trace: dict[str, Any], folder: str | Path) -> list[Path]:
    """Writes one ``rankN.json.gz`` per rank, for ``hta.trace_analysis.TraceAnalysis(trace_dir=folder)``."""
    make_folder(folder)
    ranks = sorted({event["pid"] for event in trace["traceEvents"]})
    paths = [Path(folder) / f"rank{rank}.json.gz" for rank in ranks]
    for rank, path in zip(ranks, paths, strict=True):
        write_atomically(path, _gzip(json.dumps(of_rank(trace, rank))), "trace")
    return paths


def _flattened(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cuts nested events into pieces without others inside: HTA counts a kernel as work from its start to its end."""
    pieces: list[dict[str, Any]] = []
    open_events: list[tuple[dict[str, Any], float]] = []  # with their end times; the innermost is last
    now_us = 0.0

    def run_until(time_us: float) -> None:
        nonlocal now_us
        while open_events and now_us < time_us:
            event, end_us = open_events[-1]
            stop_us = min(end_us, time_us)
            if stop_us > now_us:
                pieces.append(event | {"ts": now_us, "dur": stop_us - now_us})
                now_us = stop_us
            if end_us <= time_us:
                open_events.pop()
        now_us = time_us

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        run_until(event["ts"])
        open_events.append((event, event["ts"] + event["dur"]))
    run_until(math.inf)
    return pieces


def _in_hta_form(event: dict[str, Any]) -> dict[str, Any]:
    if event["ph"] != "X":
        return event
    if event["cat"] == "block":
        stream, name, category = _HTA_LINK_STREAM, _HTA_BLOCK + event["name"], "kernel"
    elif event["name"] in _WORK:
        stream, name, category = _HTA_COMPUTE_STREAM, event["name"], "kernel"
    else:
        return event | {"cat": "user_annotation"}
    return event | {"name": name, "cat": category, "args": event.get("args", {}) | {"stream": stream}}


def _gzip(text: str) -> bytes:
    # Without the time of day, so that the same trace gives the same file.
    return gzip.compress(text.encode("utf-8"), mtime=0)
