"""Two runs of ``gradcast doctor`` beside each other: what differs, and whether by more than chance. Pure."""

from typing import Any, NamedTuple

from gradcast.diagnosis.runs import PARTS, part_ms

# What has to be the same for two steps to be the same work; with the words for it.
_SETTING = {
    "world_size": "the number of workers",
    "backend": "the backend",
    "device": "the device",
    "torch": "the version of torch",
    "gradcast": "the version of gradcast",
}


class Row(NamedTuple):
    """``clear``: the intervals lie apart (of times 95 %, of gains their ranges); None where one is not known."""

    key: str
    words: str
    a: float | None
    b: float | None
    difference: float | None
    clear: bool | None


class Difference(NamedTuple):
    """``times`` in ms: the step, its floor, every part; ``actions``: predicted speedups."""

    times: list[Row]
    actions: list[Row]
    verdicts: tuple[str | None, str | None]
    settings: list[str]

    @property
    def step(self) -> Row:
        return self.times[0]


def compare(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    """``a`` and ``b``: the fields of doctor.json of each; a difference is what b has more."""
    times = [_row("step", "step", a["step"], b["step"], "ms", ("low_ms", "high_ms"))]
    floors = [{"ms": run.get("floor_ms")} for run in (a, b)]
    times += [
        _row(key, words, part_ms(a, key), part_ms(b, key), "ms", ("low_ms", "high_ms")) for key, words in PARTS.items()
    ]
    times.append(_row("floor", "floor: no schedule is faster", *floors, "ms", ("low_ms", "high_ms")))
    kinds = (a["verdict"].get("kind"), b["verdict"].get("kind"))
    return Difference([row for row in times if row.a or row.b], _actions(a, b), kinds, _settings(a, b))


def _actions(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    mine, yours = ({action["key"]: action for action in run.get("actions") or []} for run in (a, b))
    keys = list(dict.fromkeys([*mine, *yours]))
    titles = {key: (mine.get(key) or yours[key])["title"] for key in keys}
    return [_row(key, titles[key], mine.get(key), yours.get(key), "speedup", ("low", "high")) for key in keys]


def _row(key: str, words: str, a: dict | None, b: dict | None, field: str, ends: tuple[str, str]) -> Row:
    a, b = a or {}, b or {}
    first, second = a.get(field), b.get(field)
    difference = None if first is None or second is None else second - first
    return Row(key, words, first, second, difference, None if difference is None else _apart(a, b, ends))


def _apart(a: dict[str, Any], b: dict[str, Any], ends: tuple[str, str]) -> bool | None:
    low, high = ends
    if any(side.get(end) is None for side in (a, b) for end in ends):
        return None
    return bool(b[low] > a[high] or b[high] < a[low])


def _settings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Sentences about what else is not the same."""
    pairs = [(words, a.get(key), b.get(key)) for key, words in _SETTING.items()]
    models = [run.get("model") or {} for run in (a, b)]
    pairs += [("the model", models[0].get("name"), models[1].get("name"))]
    pairs += [("the bytes of gradients", models[0].get("bytes"), models[1].get("bytes"))]
    launching = ["no" if part_ms(run, "launch") is None else "yes" for run in (a, b)]
    pairs += [("whether launching is told apart from computing", *launching)]
    return [f"{words} ({one} and {other})" for words, one, other in pairs if one != other]


def sentence(difference: Difference) -> str:
    """What to keep of it."""
    step = difference.step
    if step.difference is None or not step.a or not step.b:
        return "One of the runs has no step time."
    slower = step.difference > 0
    factor = step.b / step.a if slower else step.a / step.b
    told = f"B takes {step.b:.1f} ms per step, A {step.a:.1f}: {factor:.2f} times as {'slow' if slower else 'fast'}"
    if step.clear is None:
        return f"{told}; at least one run has no interval, so this may be chance."
    if not step.clear:
        return f"{told}, but the intervals overlap: this may be chance."
    return f"{told}, which is more than the intervals.{_biggest(difference)}"


def _biggest(difference: Difference) -> str:
    """The part that explains most of it."""
    sign = 1 if difference.step.difference > 0 else -1
    parts = [row for row in difference.times if row.key in PARTS and row.difference is not None]
    most = max(parts, key=lambda row: sign * row.difference, default=None)
    if most is None or sign * most.difference <= 0:
        return ""
    return f" Most of it is {most.words}: {most.difference:+.1f} ms."
