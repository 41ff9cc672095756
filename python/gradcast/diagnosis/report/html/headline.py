"""What a reader wants first: the verdict, four numbers, what to do about it, and what to mend."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradcast.diagnosis.analyze.step_breakdown import STAGE_WORDS
from gradcast.diagnosis.report.html import axes, numbers, parts
from gradcast.diagnosis.report.html.axes import Scale
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import actions_by_worth

_BAR = 150.0
# An interval that reaches further, or down to less, is cut: the others would be dots beside it.
_GAIN_MIN, _TIMES_BEST = 0.5, 1.5


def top(run: dict[str, Any]) -> Markup:
    verdict = run["verdict"]
    kind = verdict.get("kind") or "verdict"
    model = (run.get("model") or {}).get("name") or "training"
    return element(
        "header",
        element("p", "gradcast doctor", class_="brand"),
        element("h1", f"{model} on {numbers.plural(run['world_size'], 'worker')}"),
        element("p", _origin(run), class_="origin"),
        element(
            "div",
            element("span", kind.replace("-", " "), class_=f"kind {kind}"),
            element("p", verdict.get("sentence") or "", class_="sentence"),
            element("p", run["hopeless"], class_="hopeless") if run.get("hopeless") else None,
            class_="verdict",
        ),
        _tiles(run),
    )


def _origin(run: dict[str, Any]) -> str:
    nodes = len(run.get("nodes") or [])
    told = [
        Path(run["script"]).name if run.get("script") else None,
        numbers.plural(nodes, "host") if nodes else None,
        run.get("device"),
        f"{run['backend']} backend" if run.get("backend") else None,
        f"torch {run['torch']}" if run.get("torch") else None,
        _when(run.get("created") or "") or None,
    ]
    return " · ".join(each for each in told if each)


def _when(created: str) -> str:
    """2026-03-04T05:06:07Z as people write it; fractions of a second tell nobody anything."""
    return re.sub(r"^(\S+)T(\d\d:\d\d)(:[\d.]+)?(Z|\+00:00)$", r"\1 \2 UTC", created)


def _tiles(run: dict[str, Any]) -> Markup:
    step = run["step"]
    made = [
        _tile(
            "step now", numbers.ms(step["ms"]), f"95 %: {numbers.ms_range(step.get('low_ms'), step.get('high_ms'))} ms"
        )
    ]
    helpful, _ = actions_by_worth(run)
    if helpful:
        best = helpful[0]
        note = f"{best['title']}: {numbers.ms(best['predicted_ms'])} predicted"
        made.append(_tile("best action", numbers.times(best["speedup"]), note))
    if run.get("floor_ms") is not None:
        made.append(
            _tile(
                "floor",
                numbers.ms(run["floor_ms"]),
                "no schedule of all-reduces of these bytes is faster on this network",
            )
        )
    slow = run.get("straggler")
    if slow:
        where = f", in {slow['layer']}" if slow.get("layer") else ""
        note = f"{numbers.ms(slow['ms'])} later, most of it in {STAGE_WORDS.get(slow['stage'], slow['stage'])}{where}"
        made.append(_tile("slowest rank", f"rank {slow['rank']}", note))
    else:
        made.append(_tile("slowest rank", "none", "no rank is slower than the others by much"))
    return element("div", made, class_="tiles")


def _tile(name: str, value: str, note: str) -> Markup:
    return element(
        "div", element("p", name, class_="name"), element("p", value, class_="value"), element("p", note, class_="note")
    )


def actions(run: dict[str, Any]) -> Markup:
    listed, others = actions_by_worth(run)
    more = [element("p", each, class_="missing") for each in (run.get("overlap_left_out"), others) if each]
    if not listed:
        words = run.get("hopeless") or "Nothing that was tried is predicted to make a step shorter."
        return parts.section("actions", "What to do", element("p", words, class_="missing"), more)
    scale = _gain_scale(listed)
    rows = [
        [
            action["title"],
            element("code", action["how"]),
            numbers.times(action["speedup"]),
            element("td", _gain(action, scale), class_="gain"),
            numbers.ms(action["predicted_ms"]),
        ]
        for action in listed
    ]
    headers = ["action", "how", "speedup", "with its interval", "predicted step"]
    caption = f"In order of predicted gain, over {numbers.ms(run['step']['ms'])} now"
    return parts.section("actions", "What to do", parts.table(headers, rows, "llrlr", caption), more)


def _gain_scale(listed: list[dict[str, Any]]) -> Callable[[float], float]:
    """One for all rows, so that no gain is at the same place in each. Beyond its ends is drawn at its ends."""
    best = max(action["speedup"] for action in listed)
    least = max(_GAIN_MIN, min(0.95, *(_interval(action)[0] for action in listed)))
    most = min(_TIMES_BEST * best, max(1.1, *(_interval(action)[1] for action in listed)))
    scale = Scale(least, most, 4, _BAR - 4)
    return lambda gain: scale(min(max(gain, least), most))


def _interval(action: dict[str, Any]) -> tuple[float, float]:
    return action["low"] or action["speedup"], action["high"] or action["speedup"]


def _gain(action: dict[str, Any], scale: Callable[[float], float]) -> Markup:
    """A line from low to high with the estimate on it; the thin line is no gain."""
    low, high = _interval(action)
    words = f"{numbers.times(action['speedup'])}, from {numbers.times(low)} to {numbers.times(high)}"
    return axes.svg(
        18,
        words,
        element("line", x1=scale(1), x2=scale(1), y1=1, y2=17, class_="grid"),
        element("line", x1=scale(low), x2=scale(high), y1=9, y2=9, class_="interval"),
        axes.dot(scale(action["speedup"]), 9, words, "measured"),
        width=_BAR,
    )


def lint(run: dict[str, Any]) -> Markup | None:
    found = run.get("lint") or []
    if not found:
        return None
    rows = [[each["title"], numbers.ms(each.get("cost_ms")), element("code", each["remedy"])] for each in found]
    return parts.section(
        "lint",
        "What to mend",
        parts.table(["found", "costs per step", "remedy"], rows, "lrl", "Settings that cost time"),
    )
