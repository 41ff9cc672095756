"""The four kinds of session, as the handle uses them: one class for each.

Session              two or more workers: measures, plans, and follows the plan (session.py)
LocalStepsSession    ranks train by themselves, and average parameters every few steps (../local/session.py)
SingleWorkerSession  one worker: measures the warm-up steps; nothing is sent (single_worker.py)
DisabledSession      GRADCAST_DISABLE is set: stock DDP trains the module (disabled.py)
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.training.acceptance import Accepted
from gradcast.training.options import Options
from gradcast.training.plan.balancing import SamplerCall
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.facets import Checkpoint, Reduction, Report, RoundCalls
from gradcast.training.sessions.open_blocks import Progress
from gradcast.training.sessions.stats import base_stats
from gradcast.training.step.clipping import ClipOnce
from gradcast.training.step.early_clipping import EarlyClipping
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.module_buffers import WHAT
from gradcast.training.step.update_callbacks import UpdateCallbacks
from gradcast.training.step.weights import check_single

_log = logging.getLogger("gradcast")


@dataclasses.dataclass(frozen=True)
class Setup:
    """The arguments of a session, from ``attach``. ``callbacks``: the functions of ``handle.on_update``. ``replica``:
    the ranks with the other shards of the module, None if gradcast sends nothing between them."""

    accepted: Accepted
    optimizers: Sequence[Optimizer]
    group: Group
    options: Options
    callbacks: UpdateCallbacks
    replica: Group | None = None


class TrainingSession:
    """Default for sessions that send nothing.

    ``mode``: "hook", "overlap", "local" or "ddp". ``released``: gradcast has been removed from the module.
    ``early_clipping``: clips when the program asks for it.
    """

    released = False
    early_clipping: EarlyClipping | ClipOnce | None = None

    def __init__(self, group: Group, mode: str = "hook", progress: Progress | None = None) -> None:
        """``progress``: of the previous session, or with DDP modules."""
        self.group, self.mode, self.progress = group, mode, progress or Progress()
        self.report = Report()
        self.checkpoint = Checkpoint(mode, group, self.report)
        self.rounds = RoundCalls()
        self.reduction = Reduction()

    @property
    def session(self) -> "TrainingSession":
        """The session itself: kinds without plans serve as their own Attached."""
        return self

    def stats(self) -> dict[str, Any]:
        self.reduction.note_reductions()
        return base_stats(self.progress.steps, self.mode, self.group, self.report.profile) | self.report.stats()

    def flush(self, limit_s: float | None = None) -> None:
        """Waits until everything in flight has arrived and all pending updates have run. Raises Error(communication)
        after ``limit_s``."""

    def reach_fence(self) -> bool:
        """Flushes, for the program's own collectives. False if another thread's backward pass will send more."""
        self.flush()
        return True

    def finish(self, limit_s: float | None = None) -> None:
        """Flushes, and logs on rank 0 the expected and the measured gain if both are known."""

    def complete_updates(self) -> None:
        """Runs all pending updates. Unlike ``flush`` it leaves open gradients alone."""

    def pending_names(self) -> list[str]:
        """Parameters whose updates are pending."""
        return []

    def on_callbacks_changed(self) -> None:
        """The program has added or removed a function of ``handle.on_update``. REQUIRES: no update is pending."""

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        """See Attached. A single worker's mean is its own gradient."""
        check_single(n)
        return contextlib.nullcontext()

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        """See Attached. A single worker has the whole batch."""
        call()

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Copies rank 0's values into the module's buffers of every rank. Collective."""
        self.group.copy_from_first(buffers, WHAT)

    def close_at_exit(self, *, failed: bool) -> None:
        """Ends the session at interpreter exit. ``failed``: by an error, so that other ranks may never answer."""

    def _close_exchange(self, exchange: GradientExchange, finish: Callable[[], bool] | None) -> None:
        """``finish``: completes blocks in flight, and returns whether nothing has failed. None: they are given up."""
        ended_well = False
        try:
            ended_well = finish is not None and finish()
        except Error as error:
            _log.error("at the end of the program: %s", error)
        finally:
            exchange.shutdown()
            self.group.leave(reusable=ended_well)


class Attached(Protocol):
    """gradcast's attachment to a module. ``session``: the current one, which changes with the module's parameters.
    ``released``: gradcast has been removed from the module. ``callbacks``: the functions of ``handle.on_update``."""

    callbacks: UpdateCallbacks

    @property
    def session(self) -> TrainingSession: ...

    @property
    def released(self) -> bool: ...

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        """Context around backward, in which this rank counts n in the mean."""

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        """Adapts the ranks' shares to their speed. Their samples are their weights, unless the program gives others.
        Raises Error(invalid_use), on every rank, if one refuses the call or the calls differ. Collective."""

    def release(self, *, reusable: bool) -> None:
        """Restores module and optimizers. ``reusable``: see Group.leave."""


def require_attached(session: TrainingSession | Report) -> None:
    """Raises Error(invalid_use) after ``handle.detach()``."""
    if session.released:
        raise refused("gradcast has been detached from this module; attach it again")
