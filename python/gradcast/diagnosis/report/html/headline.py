"""The top of the page: the verdict, four numbers, actions, and settings to fix."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import Scale
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import STAGE_WORDS, early_wait_sentences, helpful_actions

_BAR = 150.0
# Longer intervals are cut, because otherwise the others would shrink to dots.
_GAIN_MIN, _TIMES_BEST = 0.5, 1.5


def model_of(run: dict[str, Any]) -> str:
    return (run.get("model") or {}).get("name") or "training"


def top(run: dict[str, Any]) -> Markup:
    verdict = run["verdict"]
    kind = verdict.get("kind") or "verdict"
    return element(
        "header",
        element("p", "gradcast doctor", class_="brand"),
        element("h1", f"{model_of(run)} on {values.plural(run['world_size'], 'worker')}"),
        element("p", _origin(run), class_="origin"),
        element(
            "div",
            element("span", kind.replace("-", " "), class_=f"kind {kind}"),
            element("p", verdict.get("sentence") or "", class_="sentence"),
            element("p", run["hopeless"], class_="hopeless") if run.get("hopeless") else None,
            class_="verdict",
        ),
        element("div", [_tile(*each) for each in _tiles(run)], class_="tiles"),
    )


def _origin(run: dict[str, Any]) -> str:
    nodes = len(run.get("nodes") or [])
    # 2026-03-04T05:06:07Z becomes 2026-03-04 05:06 UTC.
    created = re.sub(r"^(\S+)T(\d\d:\d\d)(:[\d.]+)?(Z|\+00:00)$", r"\1 \2 UTC", run.get("created") or "")
    facts = [
        Path(run["script"]).name if run.get("script") else None,
        values.plural(nodes, "host") if nodes else None,
        run.get("device"),
        f"{run['backend']} backend" if run.get("backend") else None,
        f"torch {run['torch']}" if run.get("torch") else None,
        created,
    ]
    return " · ".join(each for each in facts if each)


def _tile(name: str, value: str, note: str) -> Markup:
    words = {"name": name, "value": value, "note": note}
    return element("div", [element("p", text, class_=class_) for class_, text in words.items()])


def _tiles(run: dict[str, Any]) -> list[tuple[str, str, str]]:
    step, slow = run["step"], run.get("straggler")
    interval = values.ms_range(step.get("low_ms"), step.get("high_ms"))
    tiles = [("step now", values.ms(step["ms"]), f"95 %: {interval} ms")]
    if helpful := helpful_actions(run)[0]:
        best = helpful[0]
        note = f"{best['title']}: {values.ms(best['predicted_ms'])} predicted"
        tiles.append(("best action", values.times(best["speedup"]), note))
    if run.get("floor_ms") is not None:
        note = "lower bound of all schedules of these all-reduces on this network"
        tiles.append(("floor", values.ms(run["floor_ms"]), note))
    if not slow:
        return [*tiles, ("slowest rank", "none", "no rank is much slower than the others")]
    where = f", in {slow['layer']}" if slow.get("layer") else ""
    note = f"{values.ms(slow['ms'])} later, most of it in {STAGE_WORDS[slow['stage']]}{where}"
    return [*tiles, ("slowest rank", f"rank {slow['rank']}", note)]


def actions(run: dict[str, Any]) -> list[Markup]:
    listed, others = helpful_actions(run)
    said = (run.get("overlap_left_out"), *early_wait_sentences(run), others)
    more = [element("p", each, class_="missing") for each in said if each]
    if not listed:
        words = run.get("hopeless") or "No action is predicted to make a step shorter."
        return [element("p", words, class_="missing"), *more]
    scale = _gain_scale(listed)
    rows = [
        [
            action["title"],
            element("code", action["how"]),
            values.times(action["speedup"]),
            element("td", _gain(action, scale), class_="gain"),
            values.ms(action["predicted_ms"]),
        ]
        for action in listed
    ]
    headers = ["action", "how", "speedup", "interval", "predicted step"]
    caption = f"In the order of predicted gain; a step takes {values.ms(run['step']['ms'])} now"
    return [components.table(headers, rows, "llrlr", caption), *more]


def _gain_scale(listed: list[dict[str, Any]]) -> Callable[[float], float]:
    """One scale for all rows, so that a gain of 1 is at the same place in each. Its ends cut values."""
    best = max(action["speedup"] for action in listed)
    least = max(_GAIN_MIN, min(0.95, *(action["low"] for action in listed)))
    most = min(_TIMES_BEST * best, max(1.1, *(action["high"] for action in listed)))
    scale = Scale(least, most, 4, _BAR - 4)
    return lambda gain: scale(min(max(gain, least), most))


def _gain(action: dict[str, Any], scale: Callable[[float], float]) -> Markup:
    """Draws a line from low to high with the estimate on it; the thin line marks a speedup of 1."""
    gain, low, high = (action[key] for key in ("speedup", "low", "high"))
    words = f"{values.times(gain)}, from {values.times(low)} to {values.times(high)}"
    lines = [axes.line(scale(1), 1, scale(1), 17, "grid"), axes.line(scale(low), 9, scale(high), 9, "interval")]
    return axes.svg(18, words, lines, axes.dot(scale(gain), 9, words, "measured"), width=_BAR)


def lint(run: dict[str, Any]) -> list[Markup]:
    rows = [[each["title"], values.ms(each["cost_ms"]), element("code", each["remedy"])] for each in run["lint"]]
    return [components.table(["misconfiguration", "cost per step", "fix"], rows, "lrl", "Settings that cost time")]
