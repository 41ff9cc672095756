"""Runs of ``gradcast doctor`` on disk: a folder with doctor.json and the trace of all ranks.

Also what readers and writers of doctor.json must agree on: file names, the parts of a step, and thresholds.
"""

import json
import math
from pathlib import Path
from typing import Any

from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.errors import Error
from gradcast.files import read_text

KIND = "gradcast-doctor"
VERSION = 1
RESULT = "doctor.json"
TRACE = "trace.json.gz"
WORTHWHILE_SPEEDUP = 1 + NOTICEABLE_GAIN

# The parts of a step, in the order in which they are shown and stacked, with their labels.
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "launch": "launch overhead",
    "loop": "training loop",
    "data_storage": "data: storage",
    "data_cpu": "data: preparation",
    "interconnect": "communication within hosts",
    "network": "communication between hosts",
    "waiting": "waiting for a slower rank",
    "rest": "unattributed time",
}
# The parts in which a rank can be slow, as sentences name them.
STAGE_WORDS = PARTS | {
    "loop": "the training loop's own work",
    "data_storage": "reading data",
    "data_cpu": "preparing data",
}
_REQUIRED = {"world_size": int, "step": dict, "view_rank": int, "parts": list, "ranks": list, "verdict": dict}
_REQUIRED_OF_EACH = {"parts": ("key", "ms"), "ranks": ("rank", "parts", "own_ms")}


def load_run(path: str | Path) -> dict[str, Any]:
    """Reads doctor.json, given the file or the folder that holds it. Raises Error."""
    file = Path(path) / RESULT if Path(path).is_dir() else Path(path)
    if Path(path).is_dir() and not file.exists():
        raise Error(f"{path} holds no run of gradcast doctor: {RESULT} is missing; run `gradcast doctor` first")
    return check_run(read_text(str(file), "run"), str(file))


def check_run(text: str, name: str) -> dict[str, Any]:
    """Parses the text of a doctor.json. ``name`` is the file's, for errors. Raises Error."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise Error(f"{name} is not JSON; give the {RESULT} of a run of gradcast doctor") from None
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise Error(f"{name} was not written by gradcast doctor; give the {RESULT} of one of its runs")
    if fields.get("version") != VERSION:
        raise Error(f"{name} has version {fields.get('version')}; this gradcast reads version {VERSION}")
    missing = _missing(fields)
    if missing:
        raise Error(f"{name} lacks {', '.join(missing)}: the run is incomplete; run gradcast doctor again")
    return fields


def _missing(fields: dict[str, Any]) -> list[str]:
    missing = [
        key for key, type_ in _REQUIRED.items() if not isinstance(fields.get(key), type_) or fields[key] in ([], {})
    ]
    if missing:
        return missing
    ms = fields["step"].get("ms")
    if not isinstance(ms, int | float) or not math.isfinite(ms) or ms <= 0:
        missing.append("the time of a step")
    for key, required in _REQUIRED_OF_EACH.items():
        lacking = [name for name in required if any(name not in each for each in fields[key])]
        missing += [f"{name} of its {key}" for name in lacking]
    return missing


def trace_of(path: str | Path) -> Path:
    """Returns the path of the trace beside a run's doctor.json. Raises Error if there is none."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if not (folder / TRACE).exists():
        raise Error(f"{folder} has no trace: {TRACE} is missing; run gradcast doctor again, without --no-trial")
    return folder / TRACE


def early_wait_sentences(result: dict[str, Any]) -> list[str]:
    """Sentences about the lines of the loop that would cost overlap mode noticeable time, or an unknown one."""
    return [
        f"{each['where']} {each['what']}"
        + ("" if each["ms"] is None else f", which costs overlap mode {each['ms']:.0f} ms per step")
        + f": {each['advice']}."
        for each in result.get("early_waits") or []  # missing in older runs
        if each["ms"] is None or each["ms"] >= (WORTHWHILE_SPEEDUP - 1) * result["step"]["ms"]
    ]


def helpful_actions(run: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the actions that are worth it, and a sentence that names the others."""
    listed = run.get("actions") or []
    others = [action["title"] for action in listed if action["speedup"] < WORTHWHILE_SPEEDUP]
    sentence = f"Would not help: {', '.join(others)}." if others else None
    return [action for action in listed if action["speedup"] >= WORTHWHILE_SPEEDUP], sentence


def part_ms(run: dict[str, Any], key: str) -> dict[str, Any] | None:
    """Returns one part of the step with its interval, or None if the run did not measure it."""
    return next((part for part in run["parts"] if part["key"] == key), None)
