"""Trains a few steps with gradcast attached, for its plans and their step times.

gradcast is attached to the module inside the user's wrapper, trains on the recorded steps, waits between two steps as
long as the user's loop does, and is detached again. So ``attach`` would measure the same profile in this training.
"""

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast import _core
from gradcast.diagnosis.probe.prober import Prober
from gradcast.diagnosis.trace.merged import RankTrace, compact
from gradcast.errors import Error
from gradcast.training import Handle, Options, Watch, observe

_FOLLOWED_STEPS = 8
# Uncounted steps of each version of the plan: in its first step, blocks of the version before still arrive.
_WARMUP_STEPS = 2


@dataclass
class Trial:
    """The trial on one rank. If it failed, only ``error`` is set."""

    error: str | None = None
    profile: dict[str, Any] | None = None  # JSON object, the same on every rank
    plan: dict[str, Any] | None = None  # JSON object of the last plan that was followed, the same on every rank
    versions: list[dict[str, Any]] = field(default_factory=list)  # see plan_versions
    spread: tuple[float, float] = (1.0, 1.0)  # low and high factor of the measured network costs
    trace: RankTrace | None = None  # of the last steps, on this rank's clock


class FollowedStep(NamedTuple):
    step: int  # its number
    version: int  # of the plan that it followed
    plan: _core.Plan
    ms: float
    predicted_ns: float  # of a step with this plan


class _Attached:
    """The attached module as a wrapper that a prober can run steps through."""

    def __init__(self, module: Any, handle: Handle) -> None:
        self._module = module
        self.no_sync = handle.no_sync

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._module(*arguments, **keywords)


def try_overlap(
    prober: Prober, wrappers: Sequence[DistributedDataParallel], optimizers: Sequence[Optimizer], pause_ms: float
) -> Trial:
    """Attaches gradcast, trains, and detaches it. Collective.

    ``wrappers`` are all wrappers of the module, the user's first. ``pause_ms`` is the loop's time between steps.
    Afterwards module and optimizers are as before, except for their values.
    """
    options = Options(watch=Watch(timeline_steps=_FOLLOWED_STEPS))
    followed = observe.CALIBRATION_STEPS + _WARMUP_STEPS + _FOLLOWED_STEPS
    module = wrappers[0].module
    try:
        with observe.tried(wrappers, module, optimizers, options) as handle:
            attached = _Attached(module, handle)
            prober.steps(attached, options.plan.warmup_steps, pause_ms=pause_ms)
            made = [_step(prober, attached, handle, pause_ms) for _ in range(followed)]
            handle.flush()
            return Trial(
                profile=json.loads(handle.profile.to_json()),
                plan=json.loads(handle.plan.to_json()),
                versions=plan_versions(made),
                spread=observe.variation(handle).link,
                trace=compact(handle.timeline()),
            )
    except Error as error:  # gradcast refuses the module, or a step, for instance for a sparse gradient
        return Trial(error=str(error))


def _step(prober: Prober, attached: _Attached, handle: Handle, pause_ms: float) -> FollowedStep:
    ms = prober.step(attached, pause_ms)["step"]
    now = handle.stats()
    return FollowedStep(now["step"] - 1, handle.plan_version, handle.plan, ms, 1e6 * now["predicted_ms"])


def plan_versions(steps: Sequence[FollowedStep]) -> list[dict[str, Any]]:
    """Returns the key "plan_versions" of doctor.json: per version its prediction and its steps' median time."""
    groups = [list(members) for _, members in itertools.groupby(steps, key=lambda step: step.version)]
    return [
        {
            "version": made[0].version,
            "from_step": made[0].step,
            "policy": made[0].plan.policy,
            "blocks": len(made[0].plan.blocks),
            "predicted_ms": made[-1].predicted_ns / 1e6,
            "measured_ms": statistics.median(step.ms for step in made[_WARMUP_STEPS:] or made),
        }
        for made in groups
    ]
