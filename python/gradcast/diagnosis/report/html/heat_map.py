"""Heat map of each rank's own work in each step, against the median of all."""

import statistics
from typing import Any

from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, Scale
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import PARTS

# Shades by the excess over the median. Below the first limit, differences are noise.
SHADES = (NOTICEABLE_GAIN, 0.05, 0.10, 0.20, 0.40)
_TALL, _SMALL = 26.0, 8.0
# Only a rank's own work is shaded, because a rank that waits longer is the faster one.
_NOT_OWN = ("interconnect", "network", "waiting", "rest")


def shade(value: float, usual: float) -> int:
    """Returns 0 for at most the usual value, up to len(SHADES)."""
    return sum(value > usual * (1 + limit) for limit in SHADES) if usual > 0 else 0


def draw(run: dict[str, Any]) -> list[Markup]:
    if not run.get("normal_steps"):
        return [element("p", "This run has no times of single steps.", class_="missing"), _table(run)]
    own = {
        rank["rank"]: [step - wait for step, wait in zip(rank["step_ms"], rank["wait_ms"], strict=True)]
        for rank in run["normal_steps"]
    }
    columns = len(next(iter(own.values())))
    usual = statistics.median(value for times_ms in own.values() for value in times_ms)
    tall, every = (_TALL, 1) if len(own) <= 16 else (_SMALL, 4)
    x = Scale(0, columns)
    wide = x(1) - x(0)
    drawn = []
    for row, (rank, times_ms) in enumerate(own.items()):
        y = 8 + row * tall
        for step, value in enumerate(times_ms):
            against = _percent(value / usual - 1, "+.0%") if usual > 0 else values.UNKNOWN
            words = f"rank {rank}, step {step}: {values.ms(value)} of own work ({against} against the median)"
            drawn.append(axes.bar(x(step), y, wide - 1, tall - 1, words, f"h{shade(value, usual)}"))
        if row % every == 0:
            drawn.append(axes.text(LEFT - 10, y + tall / 2 + 4, f"rank {rank}", "end", "name"))
    bottom = 8 + tall * len(own)
    middles = [(step + 0.5, step) for step in range(0, columns, max(1, columns // 10))]
    drawn += axes.below(x, middles, bottom, "ordinary step")
    ranks_and_steps = f"{values.plural(len(own), 'rank')} in {values.plural(columns, 'step')}"
    label = f"Heat map: own work of {ranks_and_steps}; the stronger the colour, the slower."
    caption = (
        f"Each rank's own work, without communication and waiting, against the median of {values.ms(usual)}. "
        "A dark row is a slow rank, a dark column a slow step."
    )
    limits = [f"up to {_percent(SHADES[0])} more", *(f"over {_percent(limit)}" for limit in SHADES)]
    key = components.key([(f"h{index}", words) for index, words in enumerate(limits)])
    return [key, axes.figure(bottom + 40, label, caption, drawn), _table(run)]


def _percent(share: float, form: str = ".0%") -> str:
    return format(share, form).replace("%", " %")


def _table(run: dict[str, Any]) -> Markup:
    """Every part of every rank, shaded if a rank takes longer than the median of the ranks."""
    ranks = run["ranks"]
    keys = [key for key in PARTS if any(abs(rank["parts"].get(key, 0)) > 0.005 for rank in ranks)]
    usual = {key: statistics.median(rank["parts"].get(key, 0) for rank in ranks) for key in keys}
    own = statistics.median(rank["own_ms"] for rank in ranks)
    rows = [
        [f"rank\u00a0{rank['rank']}", rank.get("host") or values.UNKNOWN, _shaded(rank["own_ms"], own, own)]
        + [_shaded(rank["parts"].get(key), usual[key], own, key in _NOT_OWN) for key in keys]
        for rank in ranks
    ]
    headers = ["rank", "host", "own work", *(PARTS[key] for key in keys)]
    caption = (
        "ms per step; own work is everything but communication and waiting. Shaded like the steps if a rank takes "
        f"longer than the median by {_percent(SHADES[0])} of its own work"
    )
    return components.table(headers, rows, "ll" + "r" * (len(keys) + 1), caption)


def _shaded(value: float | None, usual: float, own: float, plain: bool = False) -> Markup:
    """Shades a cell unless it is ``plain``. A large difference in a part that is small beside ``own`` costs nothing."""
    level = shade(value or 0, usual) if (value or 0) - usual > SHADES[0] * own and not plain else 0
    return element("td", values.ms(value, unit=False), class_=f"r h{level}" if level else "r")
