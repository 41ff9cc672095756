"""What each version of the plan promised in a trial, and how long its steps took. Pure."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradcast import _core

_MS = 1e6
# Uncounted steps of each version: in its first step, blocks of the version before still arrive.
_WARMUP_STEPS = 2


class FollowedStep(NamedTuple):
    step: int  # its number
    version: int  # of the plan that it followed
    plan: _core.Plan
    ms: float
    predicted_ns: float  # of a step with this plan


def summarize(steps: Sequence[FollowedStep]) -> list[dict[str, Any]]:
    """Returns the key "plan_versions" of doctor.json: per version its prediction and its steps' median time."""
    found = []
    for version, members in itertools.groupby(steps, key=lambda step: step.version):
        made = list(members)
        plan = made[0].plan
        found.append(
            {
                "version": version,
                "from_step": made[0].step,
                "policy": plan.policy,
                "blocks": len(plan.blocks),
                "predicted_ms": made[-1].predicted_ns / _MS,
                "measured_ms": statistics.median(step.ms for step in made[_WARMUP_STEPS:] or made),
            }
        )
    return found
