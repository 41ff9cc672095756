"""Runs of ``gradcast doctor`` on disk: a folder with doctor.json and the trace of all ranks.

Also what readers and writers of doctor.json must agree on: file names, the parts of a step, and thresholds.
"""

import os
from pathlib import Path
from typing import Any

from gradcast import documents
from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.disk import read_text
from gradcast.documents import (
    Wrong,
    list_of,
    mapping,
    nullable,
    number,
    one_of,
    record,
    rounded,
    text,
    that,
    version,
    whole,
)
from gradcast.errors import Error

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
# Of the spans in a timeline, and of what the costs of a network rest on.
SPAN_KINDS = ("forward", "backward", "update", "wait")
BASES = ("measured", "fitted", "extrapolated")
# Times are in ms, at most about 2^53 ns as in every format of gradcast. What is left of a difference of equal times is
# rounded to 0, so that no ratio overflows.
_TIME = rounded(number(0, 1e10), 9)
_SIGNED_TIME = rounded(number(-1e10, 1e10), 9)  # what is a difference, or an instant
_STEP_TIME = number(1e-6, 1e10)
_GAIN = number(1e-9, 1e9)
_RATE = number(0, 1e9)
_COUNT = whole(0, 2**53)
_RANK = whole(0, 10**6)
_SPAN = record({"kind": one_of(SPAN_KINDS), "start_ms": _SIGNED_TIME, "end_ms": _SIGNED_TIME})
_BLOCK = record(
    {"block": _COUNT, "bytes": _COUNT} | dict.fromkeys(("ready_ms", "launch_ms", "finish_ms"), _SIGNED_TIME),
    {"first": text, "last": text},
)
_MEASURED_BLOCK = that(_BLOCK, record({"first": text, "last": text}))
_FIT = {"alpha_us": number(0, 1e13), "beta_ns_per_byte": number(1e-9, 1e16, or_zero=True)}
_PAIR_RATES = dict.fromkeys(("tcp_gbit_per_s", "tcp_streams_gbit_per_s", "gloo_gbit_per_s"), _RATE)
_NETWORK = record(
    {
        "collective": record(
            {"samples": list_of(record({"bytes": whole(1, 2**53), "ms": _STEP_TIME}), least=1)},
            {"op": text, "bus_gbit_per_s": _RATE, **_FIT},
        )
    },
    {
        "findings": list_of(record({"sentence": text})),
        "pairs": list_of(
            record({"a": _RANK, "b": _RANK}, {"latency_us": number(0, 1e13), "streams": _COUNT, **_PAIR_RATES, **_FIT})
        ),
    },
)
_SCALING = record(
    {
        "points": list_of(
            record(
                {"workers": whole(1, 10**6), "network": text, "algorithm": text, "basis": one_of(BASES)}
                | dict.fromkeys(("step_ms", "low_ms", "high_ms"), _STEP_TIME)
                | {"efficiency": number(0, 1e6)}
            ),
            least=1,
        )
    },
    {"knee_workers": whole(1, 10**6), "worth_trying": list_of(whole(1, 10**6)), "left_out": list_of(text)},
)
_PLAN_VERSION = {"version": _COUNT, "from_step": _COUNT, "policy": text, "blocks": _COUNT}
_READ = record(
    {
        "kind": one_of([KIND]),
        "version": version(VERSION),
        "world_size": whole(1, 10**6),
        "step": record({"ms": _STEP_TIME}, {"low_ms": _TIME, "high_ms": _TIME}),
        "view_rank": _RANK,
        "parts": list_of(
            record(
                {"key": one_of(PARTS), "ms": nullable(_SIGNED_TIME)}, {"low_ms": _SIGNED_TIME, "high_ms": _SIGNED_TIME}
            ),
            least=1,
        ),
        "ranks": list_of(
            record(
                {"rank": _RANK, "own_ms": _SIGNED_TIME, "parts": mapping(PARTS, _SIGNED_TIME)},
                {"host": text, "node": _RANK, "step_ms": _STEP_TIME},
            ),
            least=1,
        ),
        "verdict": record({}, {"kind": text, "sentence": text}),
    },
    {
        **dict.fromkeys(("created", "gradcast", "torch", "backend", "device", "script", "hopeless", "not_tried"), text),
        **dict.fromkeys(("launching_untold", "overlap_left_out"), text),
        "nodes": list_of(list_of(_RANK)),
        "hosts": list_of(text),
        "model": record({}, {"name": text, "tensors": _COUNT, "bytes": _COUNT}),
        "steps": record({}, dict.fromkeys(("left_out", "normal", "probe"), _COUNT)),
        "floor_ms": _TIME,
        "straggler": record({"rank": _RANK, "stage": one_of(STAGE_WORDS), "ms": _SIGNED_TIME}, {"layer": text}),
        "normal_steps": list_of(
            record({"rank": _RANK, "step_ms": list_of(_SIGNED_TIME), "wait_ms": list_of(_SIGNED_TIME)})
        ),
        "early_waits": list_of(record({"where": text, "what": text, "advice": text, "ms": nullable(_TIME)})),
        "actions": list_of(
            record({"key": text, "title": text, "how": text, "predicted_ms": _TIME}
                   | dict.fromkeys(("speedup", "low", "high"), _GAIN))
        ),
        "lint": list_of(record({"title": text, "remedy": text, "cost_ms": nullable(_SIGNED_TIME)})),
        "network": _NETWORK,
        "prediction": record({}, {"mode": text, "predicted_ms": _STEP_TIME, "measured_ms": _STEP_TIME}),
        "predicted_timeline": record({"spans": list_of(_SPAN), "blocks": list_of(_BLOCK)}),
        "timeline": list_of(record({"rank": _RANK, "spans": list_of(_SPAN), "blocks": list_of(_MEASURED_BLOCK)})),
        "bandwidth": list_of(record({"step": _COUNT, "gbit_per_s": _RATE}, {"at_ms": _SIGNED_TIME})),
        "plan_versions": list_of(
            record(_PLAN_VERSION | dict.fromkeys(("predicted_ms", "measured_ms"), _STEP_TIME))
        ),
        "scaling": _SCALING,
    },
)  # fmt: skip


def load_run(path: str | Path) -> dict[str, Any]:
    """Reads doctor.json, given the file or the folder that holds it. Raises Error."""
    is_folder = os.path.isdir(path)
    file = os.path.join(path, RESULT) if is_folder else str(path)
    if is_folder and not os.path.exists(file):
        raise Error(f"{path} holds no run of gradcast doctor: {RESULT} is missing; run `gradcast doctor` first")
    fields = documents.parsed(read_text(file, "run"), file)
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise Error(f"{file} was not written by gradcast doctor; give the {RESULT} of one of its runs")
    return check_run(fields, file)


def check_run(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Checks the fields of a doctor.json. ``name``: the file's, for errors. Raises Error."""
    return documents.checked(fields, that(_READ, _check_steps), name)


def _check_steps(run: dict[str, Any]) -> None:
    """Checks that every rank has the same steps, with a wait for each."""
    ranks = run.get("normal_steps") or []
    for index, each in enumerate(ranks):
        for key in ("step_ms", "wait_ms"):
            count, expected = len(each[key]), len(ranks[0]["step_ms"])
            if count != expected or not count:
                wrong = Wrong(f"has {count} times; {expected or 1} are expected, as in normal_steps[0].step_ms")
                raise wrong.inside(key).inside(index).inside("normal_steps")


def trace_of(path: str | Path) -> Path:
    """Returns the path of the trace beside a run's doctor.json. Raises Error if there is none."""
    folder = Path(path) if os.path.isdir(path) else Path(path).parent
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
