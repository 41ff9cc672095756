"""Trains a few steps with gradcast attached: measures what it plans and how long its steps take.

gradcast is attached to the module inside the user's wrapper, trains on the recorded steps, waits between two steps as
long as the user's loop does, and is detached again. So the profile is what ``attach`` would measure in this training.
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.probe import plan_versions
from gradcast.diagnosis.probe.plan_versions import FollowedStep
from gradcast.diagnosis.probe.prober import Prober
from gradcast.diagnosis.trace.merged import RankTrace, compact
from gradcast.errors import Error
from gradcast.training.attach import attach_inside
from gradcast.training.attached_modules import attached_modules
from gradcast.training.disabled import VARIABLE as DISABLE_VARIABLE
from gradcast.training.handle import Handle
from gradcast.training.options import Options
from gradcast.training.plan.calibration import STEPS as CALIBRATION_STEPS

_FOLLOWED_STEPS = 8
_WARMUP_STEPS = 2


@dataclass
class Trial:
    """The trial on one rank. If it failed, only ``error`` is set."""

    error: str | None = None
    profile: dict[str, Any] | None = None  # JSON object, the same on every rank
    plan: dict[str, Any] | None = None  # JSON object of the last plan that was followed, the same on every rank
    versions: list[dict[str, Any]] = field(default_factory=list)  # see plan_versions.py
    spread: tuple[float, float] = (1.0, 1.0)  # low and high factor of the measured network costs
    trace: RankTrace | None = None  # of the last steps, on this rank's clock


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
            return _trial(handle, made)
        except Error as error:  # raised only by a step, for instance for a sparse gradient
            return Trial(error=str(error))
        finally:
            with contextlib.suppress(Error):  # detaching may raise the same error again, but it does detach
                handle.detach()


def _step(prober: Prober, attached: _Attached, handle: Handle, pause_ms: float) -> FollowedStep:
    ms = prober.step(attached, pause_ms)["step"]
    found = handle._diagnostics()
    return FollowedStep(found.open_record.step, handle.plan_version, handle.plan, ms, found.predicted_step_ns)


def _trial(handle: Handle, made: Sequence[FollowedStep]) -> Trial:
    return Trial(
        profile=json.loads(handle.profile.to_json()),
        plan=json.loads(handle.plan.to_json()),
        versions=plan_versions.summarize(made),
        spread=handle._diagnostics().variation.link,
        trace=compact(handle.timeline()),
    )


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
