"""Traces on disk: the merged one, and one file per rank for tools that read only single ranks.

Perfetto and Holistic Trace Analysis (HTA) open .json.gz directly, which is about fifteen times smaller than plain JSON.
"""

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradcast import documents
from gradcast.disk import make_folder, read_bytes, write_file
from gradcast.documents import Wrong, list_of, number, one_of, record, text, that, whole
from gradcast.errors import Error

# HTA recognizes communication by the names of NCCL kernels, whatever the backend, and tells work from waiting by the
# stream of an event.
_HTA_BLOCK = "ncclKernel "
_HTA_COMPUTE_STREAM, _HTA_LINK_STREAM = 7, 20
_WORK = ("forward", "backward", "update")
_UNPACKED_MAX = 1 << 30  # a small file may unpack to more than any memory
_US = number(-1e15, 1e15)
_NAMED = {"ph": one_of(tuple("XMCstf")), "pid": whole(0, 10**6), "name": text}
_EVENT = record(_NAMED, {"tid": whole(0, 10**6), "ts": _US, "cat": text})
_SPAN = record({"ts": _US, "dur": number(0, 1e15), "cat": text}, {"args": record({})})


def _event(value: Any) -> dict[str, Any]:
    event: dict[str, Any] = _EVENT(value)
    return _SPAN(event) if event["ph"] == "X" else event


_READ = record(
    {
        "schemaVersion": documents.version(1),
        "distributedInfo": record({"world_size": whole(1, 10**6)}),
        "traceEvents": list_of(_event),
    }
)


def save(trace: dict[str, Any], path: str | Path) -> None:
    write_file(path, _gzip(json.dumps(trace, separators=(",", ":"))), "trace")


def load(path: str | Path) -> dict[str, Any]:
    """Reads a trace, plain or packed. Raises Error."""
    data = read_bytes(path, "trace")
    try:
        text_ = (_unpacked(data, path) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise Error(f"{path} is not a trace: {error}; it must be JSON, or JSON packed by gzip") from None
    trace = documents.parsed(text_, str(path))
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise Error(f"{path} is not a trace: it has no list traceEvents")
    return documents.checked(trace, that(_READ, _check_ranks), str(path))


def _unpacked(data: bytes, path: str | Path) -> bytes:
    with gzip.open(io.BytesIO(data)) as packed:
        found = packed.read(_UNPACKED_MAX + 1)
    if len(found) > _UNPACKED_MAX:
        raise Error(f"{path} holds more than {_UNPACKED_MAX >> 30} GiB; check that it is the right file")
    return found


def _check_ranks(trace: dict[str, Any]) -> None:
    """Refuses ranks outside of the world: the number of a rank becomes the name of a file."""
    world_size = trace["distributedInfo"]["world_size"]
    for index, event in enumerate(trace["traceEvents"]):
        if event["pid"] >= world_size:
            wrong = Wrong(f"is {event['pid']}; a rank below distributedInfo.world_size, {world_size}, is expected")
            raise wrong.inside("pid").inside(index).inside("traceEvents")


def of_rank(trace: dict[str, Any], rank: int, own: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a rank's ``own`` events in the form that HTA expects: rank number first, known names and streams."""
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
    ranks: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        ranks.setdefault(event["pid"], []).append(event)
    paths = []
    for rank in sorted(ranks):
        paths.append(Path(folder) / f"rank{rank}.json.gz")
        write_file(paths[-1], _gzip(json.dumps(of_rank(trace, rank, ranks[rank]))), "trace")
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
    return event | {"name": name, "cat": category, "args": (event.get("args") or {}) | {"stream": stream}}


def _gzip(text: str) -> bytes:
    # Without the time of day, so that the same trace gives the same file.
    return gzip.compress(text.encode("utf-8"), mtime=0)
