"""Which rank is slower, and when: each rank's own work in each step, against the median of all."""

import statistics
from typing import Any

from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH
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


def draw(run: dict[str, Any]) -> Markup:
    heading = "Comparison of ranks"
    ranks = [rank for rank in run.get("normal_steps") or [] if rank["step_ms"]]
    columns = min((len(rank["step_ms"]) for rank in ranks), default=0)
    if not columns:
        missing = element("p", "This run has no times of single steps.", class_="missing")
        return components.section("ranks", heading, missing, _table(run))
    own = {
        rank["rank"]: [step - wait for step, wait in zip(rank["step_ms"], rank["wait_ms"], strict=False)]
        for rank in ranks
    }
    usual = statistics.median(value for times_ms in own.values() for value in times_ms)
    tall, every = (_TALL, 1) if len(own) <= 16 else (_SMALL, 4)
    wide = (WIDTH - RIGHT - LEFT) / columns
    made = []
    for row, (rank, times_ms) in enumerate(own.items()):
        y = 8 + row * tall
        made += [
            _cell(rank, step, value, usual, LEFT + step * wide, y, (wide, tall))
            for step, value in enumerate(times_ms[:columns])
        ]
        if row % every == 0:
            made.append(axes.text(LEFT - 10, y + tall / 2 + 4, f"rank {rank}", "end", "name"))
    bottom = 8 + tall * len(own)
    for step in range(0, columns, max(1, columns // 10)):
        made.append(axes.text(LEFT + (step + 0.5) * wide, bottom + 16, step, "middle", "tick"))
    made.append(axes.text(WIDTH - RIGHT, bottom + 34, "ordinary step", "end", "tick"))
    ranks_and_steps = f"{values.plural(len(own), 'rank')} in {values.plural(columns, 'step')}"
    label = f"Heat map: own work of {ranks_and_steps}; the stronger the colour, the slower."
    caption = (
        f"Each rank's own work, without communication and waiting, against the median of {values.ms(usual)}. "
        "A dark row is a slow rank, a dark column a slow step."
    )
    limits = [f"up to {_percent(SHADES[0])} more", *(f"over {_percent(limit)}" for limit in SHADES)]
    return components.section(
        "ranks",
        heading,
        components.key([(f"h{index}", words) for index, words in enumerate(limits)]),
        components.figure(axes.svg(bottom + 40, label, made), caption),
        _table(run),
    )


def _percent(share: float, form: str = ".0%") -> str:
    return format(share, form).replace("%", " %")


def _cell(rank: int, step: int, value: float, usual: float, x: float, y: float, room: tuple[float, float]) -> Markup:
    against = _percent(value / usual - 1, "+.0%") if usual > 0 else values.UNKNOWN
    words = f"rank {rank}, step {step}: {values.ms(value)} of own work ({against} against the median)"
    return axes.bar(x, y, room[0] - 1, room[1] - 1, words, f"h{shade(value, usual)}")


def _table(run: dict[str, Any]) -> Markup:
    """Every part of every rank, shaded if a rank takes longer than the median of the ranks."""
    ranks = run["ranks"]
    keys = [key for key in PARTS if any(abs(rank["parts"].get(key) or 0) > 0.005 for rank in ranks)]
    usual = {key: statistics.median(rank["parts"].get(key) or 0 for rank in ranks) for key in keys}
    own = statistics.median(rank["own_ms"] or 0 for rank in ranks)
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
    """Shades a cell unless it is ``plain``. ``own`` is the median of all own work: a large difference in a small part
    costs nothing.
    """
    level = shade(value or 0, usual) if (value or 0) - usual > SHADES[0] * own and not plain else 0
    return element("td", values.ms(value, unit=False), class_=f"r h{level}" if level else "r")
