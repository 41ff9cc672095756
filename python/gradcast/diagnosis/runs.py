"""Runs of ``gradcast doctor`` on disk: a folder with doctor.json and the trace of all ranks."""

import json
import math
from pathlib import Path
from typing import Any

from gradcast.errors import Error
from gradcast.files import read_text

KIND = "gradcast-doctor"
VERSION = 1
RESULT = "doctor.json"
TRACE = "trace.json.gz"
# Of an action's speedup: less is within what a cluster varies from one step to the next.
WORTH = 1.02

# In the order in which they are shown and stacked; each with the words for people.
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "launch": "launching and framework",
    "loop": "the loop itself",
    "data_storage": "data: storage",
    "data_cpu": "data: preparation",
    "interconnect": "traffic inside hosts",
    "network": "traffic between hosts",
    "waiting": "waiting for a slower rank",
    "rest": "rest",
}
# What every reader relies on.
_NEEDED = {"world_size": int, "step": dict, "view_rank": int, "parts": list, "ranks": list, "verdict": dict}
_NEEDED_OF = {"parts": ("key", "ms"), "ranks": ("rank", "parts", "own_ms")}


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
    missing = _missing(fields)
    if missing:
        raise Error(f"{name} lacks {', '.join(missing)}: the run did not end well; run gradcast doctor again")
    return fields


def _missing(fields: dict[str, Any]) -> list[str]:
    missing = [
        key for key, type_ in _NEEDED.items() if not isinstance(fields.get(key), type_) or fields[key] in ([], {})
    ]
    if missing:
        return missing
    ms = fields["step"].get("ms")
    if not isinstance(ms, int | float) or not math.isfinite(ms) or ms <= 0:
        missing.append("the time of a step")
    for key, needed in _NEEDED_OF.items():
        lacking = [name for name in needed if any(name not in each for each in fields[key])]
        missing += [f"{name} of its {key}" for name in lacking]
    return missing


def trace_of(path: str | Path) -> Path:
    """The trace beside a run's doctor.json."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / TRACE).exists():
        raise Error(f"{folder} has no trace: {TRACE} is missing; run gradcast doctor again, without --no-trial")
    return folder / TRACE


def actions_by_worth(run: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Those that help, and a sentence that names the others."""
    listed = run.get("actions") or []
    others = [action["title"] for action in listed if action["speedup"] < WORTH]
    sentence = f"Would not help: {', '.join(others)}." if others else None
    return [action for action in listed if action["speedup"] >= WORTH], sentence


def part_ms(run: dict[str, Any], key: str) -> dict[str, Any] | None:
    """One part of the step, with its interval."""
    return next((part for part in run["parts"] if part["key"] == key), None)
