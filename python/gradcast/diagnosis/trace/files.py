"""Traces on disk: the merged one, and one file per rank for tools that read only such.

Perfetto and Holistic Trace Analysis open .json.gz as it is, and a trace is some fifteen times smaller so: that is the
form to keep. Names without .gz are written as plain JSON.
"""

import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradcast.atomic import write_atomically
from gradcast.errors import Error

# HTA tells traffic from compute by the names of NCCL's kernels, whatever the backend was, and work from waiting by the
# stream that an event says it ran on.
_HTA_BLOCK = "ncclKernel "
_HTA_COMPUTE_STREAM, _HTA_LINK_STREAM = 7, 20
_WORK = ("forward", "backward", "update")


def save(trace: dict[str, Any], path: str | Path) -> None:
    write_atomically(path, _packed(trace, path), "trace")


def load(path: str | Path) -> dict[str, Any]:
    try:
        data = Path(path).read_bytes()
        trace = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except OSError as error:
        raise Error(f"the trace {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, EOFError):
        raise Error(f"{path} is no trace; it has to be JSON, or JSON packed by gzip") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise Error(f"{path} is no trace: it has no list traceEvents")
    return trace


def of_rank(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """What one rank did, as HTA wants it: of one rank, with its number, names and streams that it knows."""
    own = [event for event in trace["traceEvents"] if event["pid"] == rank]
    if not own:
        raise Error(f"the trace has no rank {rank}")
    others = [event for event in own if event.get("cat") != "compute"]
    compute = _apart(event for event in own if event.get("cat") == "compute")
    events = [_as_hta_knows(event) for event in [*others, *compute]]
    world_size = trace["distributedInfo"]["world_size"]
    # First in the file, and written with spaces: HTA looks for the number with a pattern, line by line.
    return {
        "schemaVersion": trace["schemaVersion"],
        "distributedInfo": {"rank": rank, "world_size": world_size},
        "traceEvents": events,
    }


def ranks(trace: dict[str, Any]) -> list[int]:
    return sorted({event["pid"] for event in trace["traceEvents"]})


def save_per_rank(trace: dict[str, Any], folder: str | Path) -> list[Path]:
    """One ``rankN.json.gz`` per rank, for ``hta.trace_analysis.TraceAnalysis(trace_dir=folder)``."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"the folder {folder} cannot be made: {(error.strerror or str(error)).lower()}") from None
    paths = [Path(folder) / f"rank{rank}.json.gz" for rank in ranks(trace)]
    for rank, path in zip(ranks(trace), paths, strict=True):
        write_atomically(path, _gzip(json.dumps(of_rank(trace, rank))), "trace")
    return paths


def _apart(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nested events of a lane, each in the pieces in which nothing lies inside of it: HTA takes a kernel for work from
    its start to its end, and forward holds waits and updates."""
    pieces: list[dict[str, Any]] = []
    open_events: list[tuple[dict[str, Any], float]] = []  # with their ends; the innermost last
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


def _as_hta_knows(event: dict[str, Any]) -> dict[str, Any]:
    if event["ph"] != "X":
        return event
    if event["cat"] == "block":
        stream, name, category = _HTA_LINK_STREAM, _HTA_BLOCK + event["name"], "kernel"
    elif event["name"] in _WORK:
        stream, name, category = _HTA_COMPUTE_STREAM, event["name"], "kernel"
    else:
        return event | {"cat": "user_annotation"}
    return event | {"name": name, "cat": category, "args": event.get("args", {}) | {"stream": stream}}


def _packed(trace: dict[str, Any], path: str | Path) -> bytes:
    text = json.dumps(trace, separators=(",", ":"))
    return _gzip(text) if str(path).endswith(".gz") else text.encode("utf-8")


def _gzip(text: str) -> bytes:
    # Without the time of day: the same trace gives the same file.
    return gzip.compress(text.encode("utf-8"), mtime=0)
