"""Runs of ``gradcast doctor`` on disk: a folder with doctor.json and the trace of all ranks."""

import json
from pathlib import Path
from typing import Any

from gradcast.errors import Error
from gradcast.files import read_text

KIND = "gradcast-doctor"
VERSION = 1
RESULT = "doctor.json"
# The packed form first: it is what is written now.
TRACES = ("trace.json.gz", "trace.json")

# In the order in which they are shown and stacked; each with the words for people.
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "loop": "loop and launch",
    "data_storage": "data: storage",
    "data_cpu": "data: preparation",
    "interconnect": "traffic inside hosts",
    "network": "traffic between hosts",
    "waiting": "waiting for a slower rank",
    "rest": "rest",
}
_NEEDED = ("world_size", "step", "parts", "ranks", "verdict")


def is_run(path: str | Path) -> bool:
    """Whether a path is meant as a run: a folder, or JSON that says so."""
    if Path(path).is_dir():
        return True
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("kind") == KIND


def load_run(path: str | Path) -> dict[str, Any]:
    """The fields of doctor.json, from the file itself or from the folder that holds it."""
    file = Path(path) / RESULT if Path(path).is_dir() else Path(path)
    if Path(path).is_dir() and not file.exists():
        raise Error(f"{path} is no run of gradcast doctor: it has no {RESULT}; `gradcast doctor` makes such a folder")
    return check_run(read_text(str(file), "run"), str(file))


def check_run(text: str, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise Error(f"{name} is not JSON; it has to be the {RESULT} of a run of gradcast doctor") from None
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise Error(f"{name} is not of gradcast doctor; it has to be the {RESULT} of one of its runs")
    if fields.get("version") != VERSION:
        raise Error(f"{name} is of version {fields.get('version')}; this gradcast reads version {VERSION}")
    missing = [key for key in _NEEDED if not fields.get(key)]
    if missing:
        raise Error(f"{name} lacks {', '.join(missing)}: the run did not end well; run gradcast doctor again")
    return fields


def trace_of(path: str | Path) -> Path:
    """The trace beside a run's doctor.json."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    found = next((folder / name for name in TRACES if (folder / name).exists()), None)
    if found is None:
        raise Error(f"{folder} has no trace: neither {' nor '.join(TRACES)}; run gradcast doctor again")
    return found


def part_ms(run: dict[str, Any], key: str) -> dict[str, Any] | None:
    """One part of the step, with its interval."""
    return next((part for part in run["parts"] if part["key"] == key), None)
