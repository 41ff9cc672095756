"""Numbers of a run, or of ``handle.stats()``, for loggers and for Prometheus. Pure, and needs neither.

``flat`` is a dict for ``wandb.log``, MLflow, TensorBoard: ``{"gradcast/step_ms": 412.0, …}``. ``prometheus`` is text
for the textfile collector of node_exporter, in seconds and bytes as Prometheus has them, with labels for rank, host and
part.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_PREFIX = "gradcast"
_HELP = {
    "step_seconds": "Median time of a step.",
    "step_low_seconds": "Lower end of the 95 % interval of the median step.",
    "step_high_seconds": "Upper end of the 95 % interval of the median step.",
    "world_size": "How many ranks train together.",
    "straggler_seconds": "How much longer the step of the slowest rank is than that of the shown one.",
    "floor_seconds": "No schedule of all-reduces is faster on this network.",
    "part_seconds": "What a part of a step takes on a rank.",
    "own_seconds": "What a rank works itself per step: everything but communication and waiting.",
    "action_speedup": "Predicted speedup of an action over the step as it is.",
    "predicted_seconds": "Predicted step of the plan in force.",
    "measured_seconds": "Measured step of the plan in force.",
    "bus_bytes_per_second": "What large collectives move over each link.",
    "info": "What was measured, in the labels; always 1.",
}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def flat(run: Mapping[str, Any]) -> dict[str, float]:
    """Of doctor.json: only numbers, only what is known."""
    step, prediction = run["step"], run.get("prediction") or {}
    collective = (run.get("network") or {}).get("collective") or {}
    values = {
        "step_ms": step["ms"], "step_low_ms": step.get("low_ms"), "step_high_ms": step.get("high_ms"),
        "floor_ms": run.get("floor_ms"), "world_size": run["world_size"],
        "predicted_ms": prediction.get("predicted_ms"), "measured_ms": prediction.get("measured_ms"),
        "straggler_ms": (run.get("straggler") or {}).get("ms"), "bus_gbit_per_s": collective.get("bus_gbit_per_s"),
    }  # fmt: skip
    values |= {f"part/{part['key']}_ms": part["ms"] for part in run["parts"]}
    values |= {f"action/{action['key']}_speedup": action["speedup"] for action in run.get("actions") or []}
    return _numbers(values)


def flat_stats(stats: Mapping[str, Any]) -> dict[str, float]:
    """Of ``handle.stats()``; yes and no become 1 and 0, words are left out."""
    return _numbers(stats)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {f"{_PREFIX}/{key}": _number(value) for key, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _number(value: Any) -> float:
    return int(value) if isinstance(value, bool) else value


def prometheus(run: Mapping[str, Any]) -> str:
    """Of doctor.json, in Prometheus' text format."""
    verdict, model = run["verdict"], run.get("model") or {}
    told = {
        "verdict": verdict.get("kind"),
        "model": model.get("name"),
        "backend": run.get("backend"),
        "device": run.get("device"),
    }
    samples = [Sample("info", {key: str(value) for key, value in told.items() if value is not None}, 1)]
    samples += [_converted(key, value, {}) for key, value in _plain(run).items()]
    for rank in run["ranks"]:
        place = {"rank": str(rank["rank"]), "host": str(rank.get("host") or "")}
        samples.append(Sample("own_seconds", place, _seconds(rank.get("own_ms"))))
        samples += [Sample("part_seconds", place | {"part": key}, _seconds(ms)) for key, ms in rank["parts"].items()]
    samples += [
        Sample("action_speedup", {"action": action["key"]}, action["speedup"]) for action in run.get("actions") or []
    ]
    return _text(samples)


def _plain(run: Mapping[str, Any]) -> dict[str, float]:
    """What has no labels, under its name in doctor.json."""
    named = {key.removeprefix(f"{_PREFIX}/"): value for key, value in flat(run).items()}
    return {key: value for key, value in named.items() if "/" not in key}


def prometheus_stats(stats: Mapping[str, Any], *, rank: int, host: str = "") -> str:
    """Of ``handle.stats()`` on one rank, in Prometheus' text format. Each rank needs a file of its own."""
    labels = {"rank": str(rank)} | ({"host": host} if host else {})
    return _text([_converted(key, _number(value), labels) for key, value in stats.items() if _is_number(value)])


def _converted(key: str, value: float, labels: dict[str, str]) -> Sample:
    """In the units that Prometheus asks for."""
    if key.endswith("_ms"):
        return Sample(f"{key.removesuffix('_ms')}_seconds", labels, value / 1e3)
    if key == "engine_us_per_block":
        return Sample("engine_seconds_per_block", labels, value / 1e6)
    if key.endswith("_gbit_per_s"):
        return Sample(f"{key.removesuffix('_gbit_per_s')}_bytes_per_second", labels, value * 1e9 / 8)
    return Sample(key, labels, value)


def _seconds(ms: float | None) -> float:
    return math.nan if ms is None else ms / 1e3


def _text(samples: Iterable[Sample]) -> str:
    """Samples of one name stand together, after what it means: readers refuse a name that comes back later."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if math.isfinite(sample.value):
            groups.setdefault(sample.name, []).append(sample)
    lines = []
    for name, members in groups.items():
        full = f"{_PREFIX}_{name}"
        if name in _HELP:
            lines.append(f"# HELP {full} {_HELP[name]}")
        lines.append(f"# TYPE {full} gauge")
        lines += [f"{full}{_labels(sample.labels)} {sample.value!r}" for sample in members]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
