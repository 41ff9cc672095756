"""Measured steps by ``play``: each with what the ranks have computed in it and what the network has taken.

A prediction is made before the steps that it is held against, and a machine may be faster or slower by then. A replay
shares their compute and their network, so it tells how wrong the model is.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradcast import _core
from gradcast.training.measure import compute_cost
from gradcast.training.measure.compute_cost import Compute
from gradcast.training.plan import calibration
from gradcast.training.plan.expectation import usual


class Step(NamedTuple):
    """One step of one rank, from the start of backward to the start of the next. ``link_ns``: in which a block of its
    was due and not finished."""

    step_ns: float
    compute: Compute
    link_ns: float


class Replay(NamedTuple):
    """Medians of the same steps: ``replayed_ms`` by play, ``measured_ms`` by their clocks."""

    replayed_ms: float
    measured_ms: float


def last_steps(handle: Any, count: int) -> list[Step]:
    """Of one rank: those of the last ``count`` steps that have ended which followed the plan in force."""
    session = handle._session
    iterations = {each.iteration: each for each in session.exchange.timeline()}
    steps = []
    for record in session.trace.ended(count):
        if record.plan is not session.plan:
            continue
        step_ns = record.end_ns - record.start_ns
        blocks = iterations[record.iteration].blocks
        link_ns = sum(calibration.busy_periods_ns((block.due_ns, block.finish_ns) for block in blocks))
        steps.append(Step(step_ns, compute_cost.compute_of(record, step_ns - record.total_ns("wait")), link_ns))
    return steps


def replay(profile: _core.Profile, plan: _core.Plan, steps: Sequence[Sequence[Step]]) -> Replay | None:
    """``steps``: by step and rank; None where there are none. The network's time is that of the rank which waited
    least: the others' have their waiting for it in them."""
    if not steps:
        return None
    replayed_ns = []
    for ranks in steps:
        found = compute_cost.scatter(profile, [[rank.compute for rank in ranks]])
        planned_ns = sum(calibration.planned_busy_periods_ns(plan, compute_cost.scaled(profile, found[0])))
        replayed_ns.append(usual(profile, plan, found, min(rank.link_ns for rank in ranks) / planned_ns).step_ns)
    measured_ns = [statistics.mean(rank.step_ns for rank in ranks) for ranks in steps]
    return Replay(statistics.median(replayed_ns) / 1e6, statistics.median(measured_ns) / 1e6)
