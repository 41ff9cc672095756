"""How often a snapshot is taken, from what one costs. Pure."""

import math


def steps_between(write_s: float, cost_s: float, step_s: float, overhead: float) -> int:
    """The fewest steps from one snapshot to the next for which each is written a step before the next one begins, and
    the training is slowed by at most ``overhead``, a share of its time. In that step nothing is copied or written: with
    it the others are compared.

    ``write_s``: from the step's end until the snapshot is complete. ``cost_s``: by how much longer the steps until then
    take, all together. ``step_s``: a step without snapshots.
    """
    return max(1 + steps_of_write(write_s, step_s), math.ceil(cost_s / (overhead * step_s)))


def steps_of_write(write_s: float, step_s: float) -> int:
    return math.ceil(write_s / step_s)


def sentence(every: int, write_s: float, cost_s: float, step_s: float) -> str:
    """What snapshots cost, and what an end at any moment loses."""
    lost = every + steps_of_write(write_s, step_s) + 1
    return f"a snapshot every {every} steps costs {cost_s / (every * step_s):.1%}; at most {lost} steps are lost"
