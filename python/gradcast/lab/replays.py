"""Replays measured steps with ``play``, each with the compute and the network time that were measured in it.

A prediction is made before the steps that it is compared with, and the machine may be faster or slower by then. A
replay has the steps' own compute and network times, so it shows the error of the model alone.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradcast import _core
from gradcast.intervals import busy_periods_ns
from gradcast.training.measure import compute_cost
from gradcast.training.measure.compute_cost import Compute
from gradcast.training.plan.calibration import planned_busy_periods_ns
from gradcast.training.plan.expectation import typical_step


class Step(NamedTuple):
    """One rank's step, from one start of backward to the next. ``link_ns``: while some block was pending."""

    step_ns: float
    compute: Compute
    link_ns: float


class Replay(NamedTuple):
    """Median step time, replayed and measured, of the same steps."""

    replayed_ms: float
    measured_ms: float


def last_steps(handle: Any, count: int) -> list[Step]:
    """Returns this rank's last ``count`` complete steps, but only those that followed the plan in force."""
    view = handle._view()
    iterations = {each.iteration: each for each in view.iterations()}
    steps = []
    for record in view.completed_records(count):
        if record.plan is not view.plan:
            continue
        step_ns = record.end_ns - record.start_ns
        blocks = iterations[record.iteration].blocks
        link_ns = sum(busy_periods_ns((block.due_ns, block.finish_ns) for block in blocks))
        steps.append(Step(step_ns, compute_cost.compute_of(record, step_ns - record.total_ns("wait")), link_ns))
    return steps


def replay(profile: _core.Profile, plan: _core.Plan, steps: Sequence[Sequence[Step]]) -> Replay | None:
    """Replays steps, by step and rank, with the network's time of the rank that waited least. None without steps."""
    if not steps:
        return None
    replayed_ns = []
    for ranks in steps:
        factors = compute_cost.compute_variation(profile, [[rank.compute for rank in ranks]])
        planned_ns = sum(planned_busy_periods_ns(plan, compute_cost.scale_compute(profile, factors[0])))
        replayed_ns.append(
            typical_step(profile, plan, factors, min(rank.link_ns for rank in ranks) / planned_ns).step_ns
        )
    measured_ns = [statistics.mean(rank.step_ns for rank in ranks) for ranks in steps]
    return Replay(statistics.median(replayed_ns) / 1e6, statistics.median(measured_ns) / 1e6)
