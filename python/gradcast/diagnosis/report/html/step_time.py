"""Where the time of a step goes: stacked bars per rank, and the numbers of the shown rank."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import PARTS

_ROW, _BAR = 30.0, 22.0
_SEEN = 0.01  # share of the step below which an excess is not visible


def draw(run: dict[str, Any]) -> Markup:
    # All ranks if they fit; else the shown rank and the slowest others.
    ranks = components.some_ranks(run["ranks"], lambda rank: (rank["rank"] != run["view_rank"], -(rank["own_ms"] or 0)))
    ends = [sum(max(ms or 0, 0) for ms in rank["parts"].values()) for rank in ranks]
    scale = Scale(0, max([*ends, run["step"]["ms"]]) * 1.01, LEFT, WIDTH - RIGHT)
    bottom = 14 + _ROW * len(ranks)
    drawn = [_row(rank, 14 + _ROW * index, scale, run["view_rank"]) for index, rank in enumerate(ranks)]
    axis = axes.bottom_axis(scale, ticks(0, max(ends)), bottom, 8, "ms per step")
    used = [key for key in PARTS if any((rank["parts"].get(key) or 0) > 0 for rank in run["ranks"])]
    label = f"Stacked step time of {values.plural(len(ranks), 'rank')}; the numbers are in the table below."
    picture = axes.svg(bottom + 40, label, axis, drawn)
    return components.section(
        "step-time",
        "Where the time of a step goes",
        components.key([(f"p-{key}", PARTS[key]) for key in used]),
        components.figure(picture, _caption(run, ranks)),
        _numbers(run),
    )


def _row(rank: dict[str, Any], y: float, scale: Scale, view_rank: int) -> Markup:
    begin, made = 0.0, []
    shown = rank["rank"] == view_rank
    for key, name in PARTS.items():
        length = rank["parts"].get(key) or 0.0
        if length <= 0:
            continue
        x, width = scale(begin), scale(begin + length) - scale(begin)
        made.append(axes.bar(x, y, width, _BAR, f"rank {rank['rank']}: {name} {values.ms(length)}", f"p-{key}"))
        words = values.ms(length, unit=False)
        if width >= axes.LETTER * len(words) + 8:
            made.append(axes.text(x + width / 2, y + 15, words, "middle", "inside"))
        begin += length
    if _over_ms(rank):  # its parts, which were measured separately, add up to more, because they overlap
        at = scale(rank["step_ms"])
        made.append(element("line", x1=at, x2=at, y1=y - 3, y2=y + _BAR + 3, class_="end"))
    name = axes.text(LEFT - 10, y + 15, f"rank {rank['rank']}", "end", "name shown" if shown else "name")
    return element("g", name, *made)


def _over_ms(rank: dict[str, Any]) -> float:
    """Returns the ms by which the parts exceed the step; 0 if it is too little to be visible."""
    over_ms = -(rank["parts"].get("rest") or 0)
    return over_ms if rank.get("step_ms") and over_ms > _SEEN * rank["step_ms"] else 0.0


def _caption(run: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    left_out = len(run["ranks"]) - len(ranks)
    over_ms = max(_over_ms(rank) for rank in ranks)
    caption = (
        f"Medians of {(run.get('steps') or {}).get('normal', 'the')} ordinary steps, without gradcast. The verdict is "
        f"about rank {run['view_rank']}, whose own work is the median of the ranks."
    )
    if left_out:
        caption += f" {left_out} faster ranks are left out; all are in doctor.json."
    if over_ms > 0:
        caption += (
            f" The parts were measured separately and add up to as much as {values.ms(over_ms)} more than the step: "
            "some of them overlap. The thick line marks the end of the step."
        )
    if why := run.get("launching_untold"):
        caption += f" Launch overhead is included in forward, backward and update: {why}."
    return caption


def _numbers(run: dict[str, Any]) -> Markup:
    whole_ms = run["step"]["ms"]
    rows = [
        [
            element("span", element("i", class_=f"swatch p-{part['key']}"), PARTS.get(part["key"], part["key"])),
            values.ms(part["ms"]),
            values.ms_range(part.get("low_ms"), part.get("high_ms")),
            values.percent(part["ms"] / whole_ms if part["ms"] is not None and whole_ms else None),
        ]
        for part in run["parts"]
        if part["ms"]
    ]
    step = run["step"]
    rows.append(["step", values.ms(whole_ms), values.ms_range(step.get("low_ms"), step.get("high_ms")), "100 %"])
    headers = ["part", "time", "95 % interval, ms", "share"]
    return components.table(headers, rows, "lrrr", f"Rank {run['view_rank']}, per step")
