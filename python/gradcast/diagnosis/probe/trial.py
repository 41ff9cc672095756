"""Trains a few steps with gradcast attached, for its plans and their step times.

gradcast is attached to the module inside the user's wrapper, trains on the recorded steps, waits between two steps as
long as the user's loop does, and is detached again. So ``attach`` would measure the same profile in this training.
"""

import contextlib
import itertools
import json
import logging
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast import _core
from gradcast.diagnosis.probe.prober import Prober
from gradcast.diagnosis.trace.merged import RankTrace, compact
from gradcast.errors import Error
from gradcast.training.attach import attach_inside
from gradcast.training.attached_modules import attached_modules
from gradcast.training.handle import Handle
from gradcast.training.options import Options
from gradcast.training.plan.calibration import STEPS as CALIBRATION_STEPS
from gradcast.training.sessions.disabled import VARIABLE as DISABLE_VARIABLE

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
    options = Options(timeline_steps=_FOLLOWED_STEPS)
    followed = CALIBRATION_STEPS + _WARMUP_STEPS + _FOLLOWED_STEPS
    module, process_group = wrappers[0].module, wrappers[0].process_group
    with _quietly_enabled(module):
        try:
            handle = attach_inside(wrappers, module, list(optimizers), process_group, options)
        except Error as error:
            return Trial(error=str(error))
        try:
            attached = _Attached(module, handle)
            prober.steps(attached, options.warmup_steps, pause_ms=pause_ms)
            made = [_step(prober, attached, handle, pause_ms) for _ in range(followed)]
            handle.flush()
            return Trial(
                profile=json.loads(handle.profile.to_json()),
                plan=json.loads(handle.plan.to_json()),
                versions=plan_versions(made),
                spread=handle._view().variation.link,
                trace=compact(handle.timeline()),
            )
        except Error as error:  # raised only by a step, for instance for a sparse gradient
            return Trial(error=str(error))
        finally:
            with contextlib.suppress(Error):  # detaching may raise the same error again, but it does detach
                handle.detach()


def _step(prober: Prober, attached: _Attached, handle: Handle, pause_ms: float) -> FollowedStep:
    ms = prober.step(attached, pause_ms)["step"]
    found = handle._view()
    return FollowedStep(found.open_record.step, handle.plan_version, handle.plan, ms, found.predicted_step_ns)


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


@contextlib.contextmanager
def _quietly_enabled(module: nn.Module) -> Iterator[None]:
    """Enables gradcast without its log, which is meant for users who attach it.

    ``gradcast doctor`` disables gradcast for the script. If the script has attached this module itself, that attachment
    is inactive; it is put aside meanwhile.
    """
    log = logging.getLogger("gradcast")
    before, log.disabled = log.disabled, True
    disabled = os.environ.pop(DISABLE_VARIABLE, None)
    by_script = attached_modules.pop(module, None) if disabled is not None else None
    try:
        yield
    finally:
        log.disabled = before
        if by_script is not None:
            attached_modules[module] = by_script
        if disabled is not None:
            os.environ[DISABLE_VARIABLE] = disabled
