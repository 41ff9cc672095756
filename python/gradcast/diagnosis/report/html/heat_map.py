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
    tall = _TALL if len(own) <= 16 else _SMALL
    wide = (WIDTH - RIGHT - LEFT) / columns
    cells = [
        _cell(rank, step, value, usual, LEFT + step * wide, 8 + row * tall, (wide, tall))
        for row, (rank, times_ms) in enumerate(own.items())
        for step, value in enumerate(times_ms[:columns])
    ]
    bottom = 8 + tall * len(own)
    ranks_and_steps = f"{values.plural(len(own), 'rank')} in {values.plural(columns, 'step')}"
    label = f"Heat map: own work of {ranks_and_steps}; the stronger the colour, the slower."
    picture = axes.svg(bottom + 40, label, cells, _names(list(own), tall), _steps(columns, wide, bottom))
    limits = [
        f"up to {SHADES[0]:.0%} more".replace("%", " %"),
        *(f"over {limit:.0%}".replace("%", " %") for limit in SHADES),
    ]
    return components.section(
        "ranks",
        heading,
        components.key([(f"h{index}", words) for index, words in enumerate(limits)]),
        components.figure(
            picture,
            _caption(usual),
        ),
        _table(run),
    )


def _caption(usual: float) -> str:
    return (
        f"Each rank's own work, without communication and waiting, against the median of {values.ms(usual)}. "
        "A dark row is a slow rank, a dark column a slow step."
    )


def _cell(rank: int, step: int, value: float, usual: float, x: float, y: float, room: tuple[float, float]) -> Markup:
    against = f"{value / usual - 1:+.0%}".replace("%", " %") if usual > 0 else values.UNKNOWN
    words = f"rank {rank}, step {step}: {values.ms(value)} of own work ({against} against the median)"
    return axes.bar(x, y, room[0] - 1, room[1] - 1, words, f"h{shade(value, usual)}")


def _names(ranks: list[int], tall: float) -> list[Markup]:
    every = 1 if tall == _TALL else 4
    return [
        axes.text(LEFT - 10, 8 + row * tall + tall / 2 + 4, f"rank {rank}", "end", "name")
        for row, rank in enumerate(ranks)
        if row % every == 0
    ]


def _steps(columns: int, wide: float, bottom: float) -> list[Markup]:
    every = max(1, columns // 10)
    made = [
        axes.text(LEFT + (step + 0.5) * wide, bottom + 16, step, "middle", "tick") for step in range(0, columns, every)
    ]
    return [*made, axes.text(WIDTH - RIGHT, bottom + 34, "ordinary step", "end", "tick")]


def _table(run: dict[str, Any]) -> Markup:
    """Every part of every rank, shaded if a rank takes longer than the median of the ranks."""
    ranks = run["ranks"]
    keys = [key for key in PARTS if any(abs(rank["parts"].get(key) or 0) > 0.005 for rank in ranks)]
    usual = {key: statistics.median(rank["parts"].get(key) or 0 for rank in ranks) for key in keys}
    own = statistics.median(rank["own_ms"] or 0 for rank in ranks)
    rows = [
        [f"rank\u00a0{rank['rank']}", rank.get("host") or values.UNKNOWN, _shaded(rank["own_ms"], own, own)]
        + [_plain_or_shaded(key, rank["parts"].get(key), usual[key], own) for key in keys]
        for rank in ranks
    ]
    headers = ["rank", "host", "own work", *(PARTS[key] for key in keys)]
    caption = (
        "ms per step; own work is everything but communication and waiting. Shaded like the steps if a rank takes "
        f"longer than the median by {SHADES[0]:.0%} of its own work".replace("%", " %")
    )
    return components.table(headers, rows, "ll" + "r" * (len(keys) + 1), caption)


def _plain_or_shaded(key: str, value: float | None, usual: float, own: float) -> Markup | str:
    """Shades only a rank's own work, because a rank that waits longer is the faster one."""
    if key in ("interconnect", "network", "waiting", "rest"):
        return values.ms(value, unit=False)
    return _shaded(value, usual, own)


def _shaded(value: float | None, usual: float, own: float) -> Markup:
    """``own`` is the median of all own work: a large difference in a small part costs nothing."""
    level = shade(value or 0, usual) if (value or 0) - usual > SHADES[0] * own else 0
    return element("td", values.ms(value, unit=False), class_=f"r h{level}" if level else "r")
