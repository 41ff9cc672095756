"""Numbers of a run, or of ``handle.stats()``, for loggers and for Prometheus. Pure; needs neither installed.

``flat`` returns a dict for ``wandb.log``, MLflow or TensorBoard: ``{"gradcast/step_ms": 412.0, ...}``. ``prometheus``
returns text for node_exporter's textfile collector, in Prometheus' units (seconds and bytes), with labels for rank,
host and part.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradcast.alarms import CAUSES
from gradcast.terminal import visible

_PREFIX = "gradcast"
_HELP = {
    "step_seconds": "Median time of a step.",
    "step_low_seconds": "Lower end of the 95 % interval of the median step.",
    "step_high_seconds": "Upper end of the 95 % interval of the median step.",
    "world_size": "Number of ranks that train together.",
    "straggler_seconds": "Time by which the slowest rank's step is longer than the shown rank's.",
    "floor_seconds": "Lower bound of the step for all schedules of all-reduces on this network.",
    "part_seconds": "Time of one part of a step on a rank.",
    "own_seconds": "A rank's own work per step: everything but communication and waiting.",
    "action_speedup": "Predicted speedup of an action over the present step.",
    "predicted_seconds": "Predicted step of the plan that was followed last.",
    "measured_seconds": "Measured step of the plan that was followed last.",
    "bus_bytes_per_second": "Bus bandwidth of large collectives.",
    "alarm": "1 while steps take longer than expected for this cause.",
    "info": "Always 1; the labels describe the run.",
}
# Prometheus' unit for each of ours: multiply by the first number, divide by the second.
_UNITS = {
    "_ms": ("_seconds", 1, 1e3),
    "_us_per_block": ("_seconds_per_block", 1, 1e6),
    "_gbit_per_s": ("_bytes_per_second", 1e9, 8),
}


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def flat(run: Mapping[str, Any]) -> dict[str, float]:
    """Returns the known numbers of a doctor.json."""
    values = _without_labels(run) | {f"part/{part['key']}_ms": part["ms"] for part in run["parts"]}
    values |= {f"action/{action['key']}_speedup": action["speedup"] for action in run.get("actions") or []}
    return flat_stats(values)


def flat_stats(stats: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of ``handle.stats()``. Booleans become 1 and 0; texts are omitted."""
    causes = {f"alarm/{cause}": value for cause, value in _alarms(stats).items()}
    return {f"{_PREFIX}/{key}": value for key, value in (_numbers(stats) | causes).items()}


def _alarms(stats: Mapping[str, Any]) -> dict[str, int]:
    """Returns 1 for each cause with an active alarm, else 0; empty before alarms are watched."""
    if stats.get("alarms") is None:
        return {}
    active = {alarm["cause"] for alarm in stats["alarms"]}
    return {cause: int(cause in active) for cause in CAUSES}


def _without_labels(run: Mapping[str, Any]) -> dict[str, Any]:
    step, prediction = run["step"], run.get("prediction") or {}
    collective = (run.get("network") or {}).get("collective") or {}
    return {
        "step_ms": step["ms"], "step_low_ms": step.get("low_ms"), "step_high_ms": step.get("high_ms"),
        "floor_ms": run.get("floor_ms"), "world_size": run["world_size"],
        "predicted_ms": prediction.get("predicted_ms"), "measured_ms": prediction.get("measured_ms"),
        "straggler_ms": (run.get("straggler") or {}).get("ms"), "bus_gbit_per_s": collective.get("bus_gbit_per_s"),
    }  # fmt: skip


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {key: value for key, value in values.items() if isinstance(value, bool | int | float)}
    return {key: int(each) if isinstance(each, bool) else each for key, each in numbers.items() if math.isfinite(each)}


def prometheus(run: Mapping[str, Any]) -> str:
    """Returns the numbers of a doctor.json in Prometheus' text format."""
    facts = {
        "verdict": run["verdict"].get("kind"),
        "model": (run.get("model") or {}).get("name"),
        "backend": run.get("backend"),
        "device": run.get("device"),
    }
    samples = [Sample("info", {key: str(value) for key, value in facts.items() if value is not None}, 1)]
    samples += [_converted(key, value, {}) for key, value in _numbers(_without_labels(run)).items()]
    for rank in run["ranks"]:
        labels = {"rank": str(rank["rank"]), "host": str(rank.get("host") or "")}
        samples.append(Sample("own_seconds", labels, _seconds(rank.get("own_ms"))))
        samples += [Sample("part_seconds", labels | {"part": key}, _seconds(ms)) for key, ms in rank["parts"].items()]
    samples += [
        Sample("action_speedup", {"action": action["key"]}, action["speedup"]) for action in run.get("actions") or []
    ]
    return _text(samples)


def prometheus_stats(stats: Mapping[str, Any], *, rank: int, host: str = "") -> str:
    """Returns one rank's ``handle.stats()`` in Prometheus' text format. Each rank needs its own file."""
    labels = {"rank": str(rank)} | ({"host": host} if host else {})
    samples = [_converted(key, value, labels) for key, value in _numbers(stats).items()]
    samples += [Sample("alarm", labels | {"cause": cause}, value) for cause, value in _alarms(stats).items()]
    return _text(samples)


def _converted(key: str, value: float, labels: dict[str, str]) -> Sample:
    for suffix, (unit, factor, divisor) in _UNITS.items():
        if key.endswith(suffix):
            return Sample(key.removesuffix(suffix) + unit, labels, value * factor / divisor)
    return Sample(key, labels, value)


def _seconds(ms: float | None) -> float:
    return math.nan if ms is None else ms / 1e3


def _text(samples: Iterable[Sample]) -> str:
    """Groups the samples of each name after its description, because readers refuse a name that appears twice."""
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
    escaped = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = ",".join(f'{key}="{visible(value).translate(escaped)}"' for key, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""
