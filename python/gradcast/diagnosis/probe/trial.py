"""gradcast itself for a few steps: what it measures, what it plans, and what a step then takes.

It is attached to the module inside of the user's wrapper, trains on tapes, waits between two steps as long as the
user's loop does, and is detached again. What it measures is what ``attach`` would in this training.
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

from gradcast.diagnosis.analyze import timelines
from gradcast.diagnosis.analyze.timelines import FollowedStep
from gradcast.diagnosis.probe.probes import Prober
from gradcast.diagnosis.trace.merged import RankTrace, compact
from gradcast.errors import Error
from gradcast.training.attach import attach_inside
from gradcast.training.attached_modules import attached_modules
from gradcast.training.disabled import VARIABLE as DISABLE_VARIABLE
from gradcast.training.handle import Handle
from gradcast.training.options import Options
from gradcast.training.plan.calibration import STEPS as CALIBRATION_STEPS

_FOLLOWED_STEPS = 8
_SETTLING_STEPS = 2


@dataclass
class Trial:
    """Of one rank; ``profile``, ``plan`` (the last that was followed): JSON objects, the same on every rank. ``error``:
    why there is nothing else. ``versions``: see timelines.versions. ``trace``: of the last steps, by this rank's
    clock."""

    error: str | None = None
    profile: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    versions: list[dict[str, Any]] = field(default_factory=list)
    spread: tuple[float, float] = (1.0, 1.0)
    trace: RankTrace | None = None


class _Attached:
    """What a prober runs tapes through."""

    def __init__(self, module: Any, handle: Handle) -> None:
        self._module = module
        self.no_sync = handle.no_sync

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._module(*arguments, **keywords)


def try_overlap(
    prober: Prober, wrappers: Sequence[DistributedDataParallel], optimizers: Sequence[Optimizer], pause_ms: float
) -> Trial:
    """Collective. ``wrappers``: all of the module, the user's first. ``pause_ms``: of the loop between steps. Leaves
    module and optimizers as they were, but with other values."""
    options = Options(timeline_steps=_FOLLOWED_STEPS)
    followed = CALIBRATION_STEPS + _SETTLING_STEPS + _FOLLOWED_STEPS
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
            return _found(handle, made)
        except Error as error:  # what only a step shows, as a sparse gradient
            return Trial(error=str(error))
        finally:
            with contextlib.suppress(Error):  # the same once more; the module is given back all the same
                handle.detach()


def _step(prober: Prober, attached: _Attached, handle: Handle, pause_ms: float) -> FollowedStep:
    ms = prober.step(attached, pause_ms)["step"]
    found = handle._diagnostics()
    return FollowedStep(found.open_record.step, handle.plan_version, handle.plan, ms, found.predicted_step_ns)


def _found(handle: Handle, made: Sequence[FollowedStep]) -> Trial:
    return Trial(
        profile=json.loads(handle.profile.to_json()),
        plan=json.loads(handle.plan.to_json()),
        versions=timelines.versions(made),
        spread=handle._diagnostics().variation.link,
        trace=compact(handle.timeline()),
    )


@contextlib.contextmanager
def _quietly_enabled(module: nn.Module) -> Iterator[None]:
    """What gradcast would tell a user who attaches it is not the user's business here. Around it, a doctor's script has
    gradcast disabled, so where the script has attached the module itself, nothing of gradcast is on it."""
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
