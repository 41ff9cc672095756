"""Compares two runs of ``gradcast doctor``: differences, and whether they exceed chance. Pure."""

from typing import Any, NamedTuple

from gradcast.diagnosis.runs import PARTS, part_ms

# What must be equal for two steps to be the same work, with its description.
_SETTING = {
    "world_size": "the number of workers",
    "backend": "the backend",
    "device": "the device",
    "torch": "the version of torch",
    "gradcast": "the version of gradcast",
}


class ComparedValue(NamedTuple):
    key: str
    words: str
    a: float | None
    b: float | None
    difference: float | None
    clear: bool | None  # the intervals do not overlap; None if one of them is unknown


class RunComparison(NamedTuple):
    """``times`` are the step, its parts and its floor, ms. ``actions`` are predicted speedups."""

    times: list[ComparedValue]
    actions: list[ComparedValue]
    verdicts: tuple[str | None, str | None]
    settings: list[str]

    @property
    def step(self) -> ComparedValue:
        return self.times[0]


def compare(a: dict[str, Any], b: dict[str, Any]) -> RunComparison:
    """Compares the fields of two doctor.json. A difference is b - a."""
    floors = [{"ms": run.get("floor_ms")} for run in (a, b)]
    times: list[tuple[str, str, Any, Any]] = [("step", "step", a["step"], b["step"])]
    times += [(key, words, part_ms(a, key), part_ms(b, key)) for key, words in PARTS.items()]
    times.append(("floor", "floor: lower bound of all schedules", floors[0], floors[1]))
    rows = [_compared(*each, ("ms", "low_ms", "high_ms")) for each in times]
    in_a, in_b = ({action["key"]: action for action in run.get("actions") or []} for run in (a, b))
    titles = {key: action["title"] for key, action in (in_b | in_a).items()}
    actions = [
        _compared(key, titles[key], in_a.get(key), in_b.get(key), ("speedup", "low", "high"))
        for key in dict.fromkeys([*in_a, *in_b])
    ]
    kinds = (a["verdict"].get("kind"), b["verdict"].get("kind"))
    return RunComparison([row for row in rows if row.a or row.b], actions, kinds, _settings(a, b))


def _compared(key: str, words: str, a: dict | None, b: dict | None, fields: tuple[str, str, str]) -> ComparedValue:
    """``fields`` are the names of a value and of the ends of its interval."""
    (first, a_low, a_high), (second, b_low, b_high) = ([(each or {}).get(name) for name in fields] for each in (a, b))
    difference = None if first is None or second is None else second - first
    is_known = difference is not None and None not in (a_low, a_high, b_low, b_high)
    clear = bool(b_low > a_high or b_high < a_low) if is_known else None
    return ComparedValue(key, words, first, second, difference, clear)


def _settings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    pairs = [(words, a.get(key), b.get(key)) for key, words in _SETTING.items()]
    models = [run.get("model") or {} for run in (a, b)]
    pairs += [("the model", models[0].get("name"), models[1].get("name"))]
    pairs += [("the bytes of gradients", models[0].get("bytes"), models[1].get("bytes"))]
    one, other = ("no" if part_ms(run, "launch") is None else "yes" for run in (a, b))
    pairs += [("whether launch overhead was measured", one, other)]
    return [f"{words} ({one} and {other})" for words, one, other in pairs if one != other]


def sentence(difference: RunComparison) -> str:
    step = difference.step
    if step.difference is None or not step.a or not step.b:
        return "One of the runs has no step time."
    slower = step.difference > 0
    factor = step.b / step.a if slower else step.a / step.b
    summary = f"B takes {step.b:.1f} ms per step, A {step.a:.1f}: B is {factor:.2f}x {'slower' if slower else 'faster'}"
    if step.clear is None:
        return f"{summary}. At least one run has no interval, so this may be chance."
    if not step.clear:
        return f"{summary}. The intervals overlap, so this may be chance."
    return f"{summary}. The intervals do not overlap.{_largest_part(difference)}"


def _largest_part(difference: RunComparison) -> str:
    sign = 1 if difference.step.difference > 0 else -1
    parts = [row for row in difference.times if row.key in PARTS and row.difference is not None]
    most = max(parts, key=lambda row: sign * row.difference, default=None)
    if most is None or sign * most.difference <= 0:
        return ""
    return f" Most of it is {most.words}: {most.difference:+.1f} ms."
