"""The parts of a step: stacked bars per rank, and the numbers of the shown rank."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import PARTS

_ROW, _BAR = 30.0, 22.0
_SEEN = 0.01  # share of the step below which an excess is not visible


def draw(run: dict[str, Any]) -> list[Markup]:
    # All ranks if they fit; else the shown rank and the slowest others.
    ranks = components.some_ranks(run["ranks"], lambda rank: (rank["rank"] != run["view_rank"], -rank["own_ms"]))
    ends = [sum(max(ms, 0) for ms in rank["parts"].values()) for rank in ranks]
    scale = Scale(0, max([*ends, run["step"]["ms"]]) * 1.01)
    bottom = 14 + _ROW * len(ranks)
    drawn = [_row(rank, 14 + _ROW * index, scale, run["view_rank"]) for index, rank in enumerate(ranks)]
    axis = axes.bottom_axis(scale, ticks(0, max(ends)), bottom, 8, "ms per step")
    used = [key for key in PARTS if any(rank["parts"].get(key, 0) > 0 for rank in run["ranks"])]
    label = f"Stacked step time of {values.plural(len(ranks), 'rank')}; the numbers are in the table below."
    return [
        components.key([(f"p-{key}", PARTS[key]) for key in used]),
        axes.figure(bottom + 40, label, _caption(run, ranks), axis, drawn),
        _numbers(run),
    ]


def _row(rank: dict[str, Any], y: float, scale: Scale, view_rank: int) -> Markup:
    begin, drawn = 0.0, []
    for key, name in PARTS.items():
        length = rank["parts"].get(key, 0.0)
        if length <= 0:
            continue
        x, width = scale(begin), scale(begin + length) - scale(begin)
        drawn.append(axes.bar(x, y, width, _BAR, f"rank {rank['rank']}: {name} {values.ms(length)}", f"p-{key}"))
        words = values.ms(length, unit=False)
        if width >= axes.LETTER * len(words) + 8:
            drawn.append(axes.text(x + width / 2, y + 15, words, "middle", "inside"))
        begin += length
    if _over_ms(rank):  # its parts, which were measured separately, add up to more, because they overlap
        end = scale(rank["step_ms"])
        drawn.append(axes.line(end, y - 3, end, y + _BAR + 3, "end"))
    class_ = "name shown" if rank["rank"] == view_rank else "name"
    return element("g", axes.text(LEFT - 10, y + 15, f"rank {rank['rank']}", "end", class_), drawn)


def _over_ms(rank: dict[str, Any]) -> float:
    """Returns the ms by which the parts exceed the step; 0 if it is too little to be visible."""
    over_ms = -rank["parts"].get("rest", 0)
    return over_ms if rank.get("step_ms") and over_ms > _SEEN * rank["step_ms"] else 0.0


def _caption(run: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    left_out = len(run["ranks"]) - len(ranks)
    over_ms = max(map(_over_ms, ranks))
    caption = (
        f"Medians of {(run.get('steps') or {}).get('normal', 'the')} ordinary steps, without gradcast. The verdict is "
        f"about rank {run['view_rank']}, whose own work is the median of the ranks."
    )
    if left_out:
        caption += f" {left_out} faster ranks are omitted; all are in doctor.json."
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

    def row(name: Any, part: dict[str, Any]) -> list[Any]:
        share = "100 %" if part is run["step"] else values.percent(part["ms"] / whole_ms)
        return [name, values.ms(part["ms"]), values.ms_range(part.get("low_ms"), part.get("high_ms")), share]

    named = [
        (element("span", element("i", class_=f"swatch p-{part['key']}"), PARTS[part["key"]]), part)
        for part in run["parts"]
        if part["ms"]
    ]
    rows = [row(*each) for each in [*named, ("step", run["step"])]]
    headers = ["part", "time", "95 % interval, ms", "share"]
    return components.table(headers, rows, "lrrr", f"Rank {run['view_rank']}, per step")
