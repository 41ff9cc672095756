"""Where the time of a step goes: stacked bars, one per rank, and the numbers of the rank that is shown."""

from typing import Any

from gradcast.diagnosis.report.html import axes, numbers, parts
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale, ticks
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import PARTS

_ROW, _BAR = 30.0, 22.0
_SEEN = 0.01  # of the step


def draw(run: dict[str, Any]) -> Markup:
    ranks = _shown(run)
    ends = [sum(max(ms or 0, 0) for ms in rank["parts"].values()) for rank in ranks]
    scale = Scale(0, max([*ends, run["step"]["ms"]]) * 1.01, LEFT, WIDTH - RIGHT)
    bottom = 14 + _ROW * len(ranks)
    drawn = [_row(rank, 14 + _ROW * index, scale, run["view_rank"]) for index, rank in enumerate(ranks)]
    axis = axes.bottom_axis(scale, ticks(0, max(ends)), bottom, 8, "ms per step")
    label = f"Stacked step time of {numbers.plural(len(ranks), 'rank')}; the numbers are in the table below."
    picture = axes.svg(bottom + 40, label, axis, drawn)
    return parts.section(
        "step-time",
        "Where a step goes",
        parts.key([(f"p-{key}", PARTS[key]) for key in _used(run)]),
        parts.figure(picture, _caption(run, ranks)),
        _numbers(run),
    )


def _shown(run: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks where they fit; else the one that is shown, and the slowest others."""
    return parts.some_ranks(run["ranks"], lambda rank: (rank["rank"] != run["view_rank"], -(rank["own_ms"] or 0)))


def _used(run: dict[str, Any]) -> list[str]:
    return [key for key in PARTS if any((rank["parts"].get(key) or 0) > 0 for rank in run["ranks"])]


def _row(rank: dict[str, Any], y: float, scale: Scale, view_rank: int) -> Markup:
    begin, made = 0.0, []
    shown = rank["rank"] == view_rank
    for key, words in PARTS.items():
        length = rank["parts"].get(key) or 0.0
        if length <= 0:
            continue
        x, width = scale(begin), scale(begin + length) - scale(begin)
        made.append(axes.bar(x, y, width, _BAR, f"rank {rank['rank']}: {words} {numbers.ms(length)}", f"p-{key}"))
        made.append(_label(x, y, width, numbers.ms(length, unit=False)))
        begin += length
    made.append(_end(rank, y, scale))
    name = axes.text(LEFT - 10, y + 15, f"rank {rank['rank']}", "end", "name shown" if shown else "name")
    return element("g", name, *made)


def _end(rank: dict[str, Any], y: float, scale: Scale) -> Markup | None:
    """Where the step ended: parts that were measured apart may add up to more, because some of them overlap."""
    if not _over_ms(rank):
        return None
    at = scale(rank["step_ms"])
    return element("line", x1=at, x2=at, y1=y - 3, y2=y + _BAR + 3, class_="end")


def _over_ms(rank: dict[str, Any]) -> float:
    """What the parts add up to beyond the step; 0 where it is too little to be seen."""
    over_ms = -(rank["parts"].get("rest") or 0)
    return over_ms if rank.get("step_ms") and over_ms > _SEEN * rank["step_ms"] else 0.0


def _label(x: float, y: float, width: float, words: str) -> Markup | None:
    if width < axes.LETTER * len(words) + 8:
        return None
    return axes.text(x + width / 2, y + 15, words, "middle", "inside")


def _caption(run: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    left_out = len(run["ranks"]) - len(ranks)
    over_ms = max(_over_ms(rank) for rank in ranks)
    others = f" {left_out} faster ranks are left out; all are in doctor.json." if left_out else ""
    steps = (run.get("steps") or {}).get("normal", "the")
    return (
        f"Medians of {steps} normal steps, without gradcast. The verdict is about rank {run['view_rank']}, "
        f"the median of the ranks by its own work.{others}{_overlap(over_ms)}{_untold(run)}"
    )


def _untold(run: dict[str, Any]) -> str:
    why = run.get("launching_untold")
    return f" Launching and the framework are in forward, backward and update: {why}." if why else ""


def _overlap(over_ms: float) -> str:
    if over_ms <= 0:
        return ""
    return (
        f" The parts were measured apart and add up to as much as {numbers.ms(over_ms)} more than the step: some of "
        "them happen at the same time. The thick line is where the step ends."
    )


def _numbers(run: dict[str, Any]) -> Markup:
    whole_ms = run["step"]["ms"]
    rows = [
        [
            element("span", element("i", class_=f"swatch p-{part['key']}"), PARTS.get(part["key"], part["key"])),
            numbers.ms(part["ms"]),
            numbers.ms_range(part.get("low_ms"), part.get("high_ms")),
            numbers.percent(part["ms"] / whole_ms if part["ms"] is not None and whole_ms else None),
        ]
        for part in run["parts"]
        if part["ms"]
    ]
    step = run["step"]
    rows.append(["step", numbers.ms(whole_ms), numbers.ms_range(step.get("low_ms"), step.get("high_ms")), "100 %"])
    return parts.table(
        ["part", "time", "95 % interval, ms", "share"], rows, "lrrr", f"Rank {run['view_rank']}, per step"
    )
