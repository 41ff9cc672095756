"""The top of the page: the verdict, four numbers, what to do, and what to fix."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import Scale
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import STAGE_WORDS, helpful_actions

_BAR = 150.0
# Longer intervals are cut, because otherwise the others would shrink to dots.
_GAIN_MIN, _TIMES_BEST = 0.5, 1.5


def top(run: dict[str, Any]) -> Markup:
    verdict = run["verdict"]
    kind = verdict.get("kind") or "verdict"
    model = (run.get("model") or {}).get("name") or "training"
    return element(
        "header",
        element("p", "gradcast doctor", class_="brand"),
        element("h1", f"{model} on {values.plural(run['world_size'], 'worker')}"),
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
    facts = [
        Path(run["script"]).name if run.get("script") else None,
        values.plural(nodes, "host") if nodes else None,
        run.get("device"),
        f"{run['backend']} backend" if run.get("backend") else None,
        f"torch {run['torch']}" if run.get("torch") else None,
        _when(run.get("created") or "") or None,
    ]
    return " · ".join(each for each in facts if each)


def _when(created: str) -> str:
    """Formats 2026-03-04T05:06:07Z for people, without seconds."""
    return re.sub(r"^(\S+)T(\d\d:\d\d)(:[\d.]+)?(Z|\+00:00)$", r"\1 \2 UTC", created)


def _tiles(run: dict[str, Any]) -> Markup:
    step, slow = run["step"], run.get("straggler")
    interval = values.ms_range(step.get("low_ms"), step.get("high_ms"))
    tiles = [("step now", values.ms(step["ms"]), f"95 %: {interval} ms")]
    helpful, _ = helpful_actions(run)
    if helpful:
        best = helpful[0]
        note = f"{best['title']}: {values.ms(best['predicted_ms'])} predicted"
        tiles.append(("best action", values.times(best["speedup"]), note))
    if run.get("floor_ms") is not None:
        note = "lower bound of all schedules of these all-reduces on this network"
        tiles.append(("floor", values.ms(run["floor_ms"]), note))
    if slow:
        where = f", in {slow['layer']}" if slow.get("layer") else ""
        note = f"{values.ms(slow['ms'])} later, most of it in {STAGE_WORDS.get(slow['stage'], slow['stage'])}{where}"
        tiles.append(("slowest rank", f"rank {slow['rank']}", note))
    else:
        tiles.append(("slowest rank", "none", "no rank is much slower than the others"))
    classes = ("name", "value", "note")
    made = [[element("p", words, class_=each) for words, each in zip(tile, classes, strict=True)] for tile in tiles]
    return element("div", [element("div", tile) for tile in made], class_="tiles")


def actions(run: dict[str, Any]) -> Markup:
    listed, others = helpful_actions(run)
    more = [element("p", each, class_="missing") for each in (run.get("overlap_left_out"), others) if each]
    if not listed:
        words = run.get("hopeless") or "No action is predicted to make a step shorter."
        return components.section("actions", "What to do", element("p", words, class_="missing"), more)
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
    return components.section("actions", "What to do", components.table(headers, rows, "llrlr", caption), more)


def _gain_scale(listed: list[dict[str, Any]]) -> Callable[[float], float]:
    """Returns one scale for all rows, so that a gain of 1 is at the same place in each. Values beyond its ends are
    drawn at them.
    """
    best = max(action["speedup"] for action in listed)
    least = max(_GAIN_MIN, min(0.95, *(_interval(action)[0] for action in listed)))
    most = min(_TIMES_BEST * best, max(1.1, *(_interval(action)[1] for action in listed)))
    scale = Scale(least, most, 4, _BAR - 4)
    return lambda gain: scale(min(max(gain, least), most))


def _interval(action: dict[str, Any]) -> tuple[float, float]:
    return action["low"] or action["speedup"], action["high"] or action["speedup"]


def _gain(action: dict[str, Any], scale: Callable[[float], float]) -> Markup:
    """Draws a line from low to high with the estimate on it; the thin line marks a speedup of 1."""
    low, high = _interval(action)
    words = f"{values.times(action['speedup'])}, from {values.times(low)} to {values.times(high)}"
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
    rows = [[each["title"], values.ms(each.get("cost_ms")), element("code", each["remedy"])] for each in found]
    table = components.table(["misconfiguration", "cost per step", "fix"], rows, "lrl", "Settings that cost time")
    return components.section("lint", "What to fix", table)
