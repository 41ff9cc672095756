"""The parts of a training for the doctor, the laboratory and loggers: its steps, and trials of gradcast."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training.attach import attach_inside
from gradcast.training.attached_modules import attached_modules
from gradcast.training.compat.sharding import is_part
from gradcast.training.early_uses import EarlyUses
from gradcast.training.handle import Handle
from gradcast.training.options import Options
from gradcast.training.plan.calibration import STEPS as CALIBRATION_STEPS
from gradcast.training.plan.expectation import StepVariation
from gradcast.training.sessions.disabled import VARIABLE
from gradcast.training.sessions.session import Session
from gradcast.training.step_stream import Step, steps_of

__all__ = ["CALIBRATION_STEPS", "EarlyUses", "Step", "is_part", "last_steps", "leave_to_ddp", "tried", "variation"]


def last_steps(handle: Handle, count: int) -> list[Step]:
    """The last complete steps, at most ``count``. REQUIRES: a plan is followed."""
    session = handle._training.session
    return steps_of(session, session.report.trace.complete[-count:])


def variation(handle: Handle) -> StepVariation:
    """The variation of the steps that the plan was made from. Known on rank 0 only. REQUIRES: as ``last_steps``."""
    session = handle._training.session
    assert isinstance(session, Session), "a plan is followed"
    return session.controller.agreed.variation


def leave_to_ddp() -> None:
    """Makes ``attach`` leave the modules of this process to stock DDP, from now on."""
    os.environ[VARIABLE] = "1"


@contextlib.contextmanager
def tried(
    idle: Sequence[DistributedDataParallel],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    options: Options,
) -> Iterator[Handle]:
    """Attaches gradcast inside the block, without its log, also after ``leave_to_ddp``: the program's attachments since
    then are inactive, and put aside. ``idle``: wrappers of the module, that nobody calls. Collective."""
    log = logging.getLogger("gradcast")
    before, log.disabled = log.disabled, True
    disabled = os.environ.pop(VARIABLE, None)
    by_program = attached_modules.pop(module, None) if disabled is not None else None
    try:
        handle = attach_inside(idle, module, list(optimizers), idle[0].process_group, options)
        try:
            yield handle
        finally:
            with contextlib.suppress(Error):  # what has failed inside, again; gradcast leaves all the same
                handle.detach()
    finally:
        log.disabled = before
        if by_program is not None:
            attached_modules[module] = by_program
        if disabled is not None:
            os.environ[VARIABLE] = disabled
