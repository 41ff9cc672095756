"""What a reader wants first: the verdict, four numbers, what to do about it, and what to mend."""

import re
from pathlib import Path
from typing import Any

from gradcast.page import axes, numbers, parts
from gradcast.page.axes import Scale
from gradcast.page.markup import Markup, element

_BAR = 150.0


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
    best = (run.get("actions") or [None])[0]
    if best is not None:
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
        where = " in " + slow["layer"] if slow.get("layer") else ""
        made.append(
            _tile("slowest rank", f"rank {slow['rank']}", f"{numbers.ms(slow['ms'])} later in {slow['stage']}{where}")
        )
    elif run["world_size"] > 1:
        made.append(_tile("slowest rank", "none", "no rank is slower than the others by much"))
    return element("div", made, class_="tiles")


def _tile(name: str, value: str, note: str) -> Markup:
    return element(
        "div", element("p", name, class_="name"), element("p", value, class_="value"), element("p", note, class_="note")
    )


def actions(run: dict[str, Any]) -> Markup:
    listed = run.get("actions") or []
    if not listed:
        return parts.missing(
            "actions",
            "What to do",
            run.get("hopeless") or "Nothing that was tried is predicted to make a step shorter.",
        )
    most = max(1.1, *(action["high"] or action["speedup"] for action in listed))
    rows = [
        [
            element("span", action["title"], element("small", action["note"]) if action.get("note") else None),
            element("code", action["how"]),
            numbers.times(action["speedup"]),
            element("td", _gain(action, most), class_="gain"),
            numbers.ms(action["predicted_ms"]),
        ]
        for action in listed
    ]
    headers = ["action", "how", "speedup", "with its interval", "predicted step"]
    caption = f"In order of predicted gain, over {numbers.ms(run['step']['ms'])} now"
    return parts.section("actions", "What to do", parts.table(headers, rows, "llrlr", caption))


def _gain(action: dict[str, Any], most: float) -> Markup:
    """A line from low to high with the estimate on it; the thin line is no gain."""
    scale = Scale(min(0.95, action["low"] or 1), most, 4, _BAR - 4)
    low, high = action["low"] or action["speedup"], action["high"] or action["speedup"]
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
