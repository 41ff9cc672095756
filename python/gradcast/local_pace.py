"""Number of steps between averages for ``LocalSteps(every="auto")``: the most that skewed data allow.

After SkewScout ("The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020, arXiv 1910.00189, section 7):
hill climbing, a step at a time, on the sum of the costs of skewed data in accuracy and of averages in bytes. SkewScout
sends models to other ranks' data. Here each rank evaluates, on data like its own, its own model and then the global
copy, so nothing is sent: where ranks have learned different things, the global copy is worse on each rank's data.

Thread safety: pure; any thread.
"""

from collections.abc import Sequence

FIRST = 8  # few enough for skewed data, and an eighth of the bytes from the start
LIMIT = 64
# Of a gap, by what is measured: how much costs nothing, and the weight of the rest beside bytes, which are 1 where the
# ranks average in every step. That is worth 2 points of accuracy, or a tenth of a nat of a cross-entropy.
_PRICES = {"accuracy": (0.005, 50.0), "loss": (0.02, 10.0)}
METRICS = tuple(_PRICES)
# A gap is measured after so many rounds, and so many steps: it costs two evaluations, and a round while training waits.
_ROUNDS, _STEPS = 8, 64


def is_due(every: int, steps_since: int) -> bool:
    """Returns True if the end of this round, so many steps after the last measurement, is to be measured."""
    return steps_since >= max(_ROUNDS * every, _STEPS)


def gap_of(metric: str, own: Sequence[float], common: Sequence[float]) -> float:
    """Returns the mean loss of the global copy against the ranks' own models; below 0 if it is better.

    ``own``, ``common``: the results of each rank's ``evaluate`` for them.
    """
    difference = (sum(own) - sum(common)) / len(own)
    return difference if metric == "accuracy" else -difference


def next_every(metric: str, every: int, gap: float, limit: int) -> tuple[int, str]:
    """Returns half of ``every``, itself, or twice as many, from 1 to ``limit``, and a sentence with the reason.

    A gap is taken to grow with the number of local steps.
    """
    free, weight = _PRICES[metric]

    def cost(candidate: int) -> float:
        return weight * max(0.0, gap * candidate / every - free) + 1 / candidate

    best = min((max(1, every // 2), every, min(limit, 2 * every)), key=cost)
    size = f"{100 * abs(gap):.2f} points" if metric == "accuracy" else f"{abs(gap):.4f}"
    found = f"the global copy is {size} {'better' if gap < 0 else 'worse'} than the ranks' own models"
    if best == every:
        return best, f"{found}, so they go on averaging every {_steps(every)}"
    often = "more" if best < every else "less"
    return best, f"{found}, so they average {often} often, every {_steps(best)} instead of {every}"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
