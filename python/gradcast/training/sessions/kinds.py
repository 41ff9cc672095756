"""What the handle needs of a session: one class for each of the four kinds.

Session              two or more workers: measures, plans, and follows the plan (session.py)
LocalStepsSession    ranks train by themselves, and average parameters every few steps (../local/session.py)
SingleWorkerSession  one worker: measures the warm-up steps; nothing is sent (single_worker.py)
DisabledSession      GRADCAST_DISABLE is set: stock DDP trains the module (disabled.py)
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.errors import Error, refused
from gradcast.training.acceptance import Accepted
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.options import Options
from gradcast.training.plan.agreement import STATE_VERSION
from gradcast.training.plan.balancing import SamplerCall
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.open_blocks import CollectiveFence, NoSyncBlocks
from gradcast.training.sessions.stats import base_stats
from gradcast.training.step.clipping import ClipOnce
from gradcast.training.step.early_clipping import EarlyClipping
from gradcast.training.step.gradient_buffers import GradientRange
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.module_buffers import WHAT
from gradcast.training.step.update_callbacks import UpdateCallbacks
from gradcast.training.step.weights import check_single

_log = logging.getLogger("gradcast")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What ``attach`` gives to a session. ``callbacks``: the functions of ``handle.on_update``."""

    accepted: Accepted
    optimizers: Sequence[Optimizer]
    group: Group
    options: Options
    callbacks: UpdateCallbacks


class TrainingSession:
    """As it is for the kinds without plans, of which nothing is ever in flight; Session overrides most of it.

    ``mode``: "hook", "overlap", "local" or "ddp". ``steps``: completed so far. ``released``: gradcast has left the
    module. ``is_sending``: blocks are on the network. ``saves_anew``: ``state_dict()`` changes with each step.
    ``profile``: what the warm-up has measured, None before. ``plan``: the one in force; ``plan_version`` grows
    with each. ``measuring``: a warm-up is running that ends with a plan. ``layout``: the place of each gradient in the
    buffers, in the order of the plan's profile. ``early_clipping``: clips when the program asks for it. ``fence``: the
    program's open ``handle.collective()`` blocks. ``lends``: the module has other tensors, inside ``global_model()``.
    ``trace``: the record of the last steps.
    """

    mode = "hook"
    steps = 0
    released = False
    is_sending = False
    saves_anew = False
    profile: _core.Profile | None = None
    plan: _core.Plan | None = None
    plan_version = 0
    measuring = False
    layout: tuple[GradientRange, ...] = ()
    lends = False
    early_clipping: EarlyClipping | ClipOnce | None = None
    trace: StepTrace | None = None

    def __init__(self, group: Group, ddps: Iterable[DistributedDataParallel] = ()) -> None:
        """``ddps``: DDP modules of which no_sync() holds, too."""
        self.group, self.no_sync_blocks, self.fence = group, NoSyncBlocks(ddps), CollectiveFence()

    def continue_from(self, before: "TrainingSession") -> None:
        """Continues the counts of an earlier session of the same module."""
        self.steps, self.no_sync_blocks, self.fence = before.steps, before.no_sync_blocks, before.fence

    @property
    def session(self) -> "TrainingSession":
        """A kind without plans is attached by itself, see Attached."""
        return self

    def flush(self, limit_s: float | None = None) -> None:
        """Waits until everything in flight has arrived and all due updates have run. Raises Error(communication) after
        ``limit_s``."""

    def reach_fence(self) -> bool:
        """Flushes, for the program's own collectives. False if another thread's backward pass will send more."""
        self.flush()
        return True

    def finish(self, limit_s: float | None = None) -> None:
        """Flushes, and logs on rank 0 the expected and the measured gain if both are known."""

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        """See Attached. A single worker's mean is its own gradient."""
        check_single(n)
        return contextlib.nullcontext()

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        """See Attached. A single worker has the whole batch."""
        call()

    def complete_due_updates(self) -> None:
        """Runs all updates that are due. Unlike ``flush`` it leaves open gradients alone."""

    def due_names(self) -> list[str]:
        """Parameters whose updates are due."""
        return []

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Rank 0's values into the module's buffers of every rank. Collective."""
        self.group.copy_from_first(buffers, WHAT)

    def on_callbacks_changed(self) -> None:
        """The program has added or removed a function of ``handle.on_update``. REQUIRES: no update is due."""

    @property
    def mean_weight(self) -> float | None:
        """The mean weight of the last weighted step, which the next one starts from (see step/weights.py)."""
        return None

    def stats(self) -> dict[str, Any]:
        return base_stats(self.steps, self.mode, self.group, self.profile)

    def alarms(self) -> list[Alarm]:
        return []

    def timeline_events(self) -> list[dict[str, Any]]:
        return []

    def plan_text(self, profile_path: str | None) -> str:
        raise refused(_NO_PLAN)

    def state_dict(self) -> dict[str, Any]:
        profile = None if self.profile is None else self.profile.to_json()
        own = {"mode": self.mode, "world_size": self.group.world_size, "profile": profile, "plan": None}
        return {"version": STATE_VERSION, **own}

    def saved(self, kept: dict[str, Any]) -> dict[str, Any]:
        """``state_dict()`` for a snapshot. ``kept``: holds what the last call has made, for this one."""
        version = (self.plan_version, self.measuring)
        if kept.get("version") != version or self.saves_anew:
            kept.update(version=version, state=self.state_dict())
        return kept["state"] | {"mean_weight": self.mean_weight}

    def check(self, state: dict[str, Any]) -> None:
        """Raises Error(invalid_use) for a state that this rank cannot load."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follows the plan of a checkpoint if it fits. Collective."""

    def end_round(self) -> None:
        raise refused(_NO_ROUNDS)

    def global_model(self) -> contextlib.AbstractContextManager[None]:
        raise refused(_NO_ROUNDS)

    def close_at_exit(self, *, failed: bool) -> None:
        """The interpreter exits. ``failed``: by an error, so that other ranks may never answer."""

    def _close_exchange(self, exchange: GradientExchange, finish: Callable[[], bool] | None) -> None:
        """``finish``: completes what is in flight, and returns whether nothing has failed. None: that is given up."""
        ended_well = False
        try:
            ended_well = finish is not None and finish()
        except Error as error:
            _log.error("at the end of the program: %s", error)
        finally:
            exchange.shutdown()
            self.group.leave(reusable=ended_well)


_NO_ROUNDS = (
    "there are no rounds: every step averages the gradients, so all ranks have the same parameters; leave the call "
    "out, or train with local steps (options.local)"
)
_NO_PLAN = "there is no plan: a single worker, or GRADCAST_DISABLE is set"


class Attached(Protocol):
    """What ``attach`` has put on a module. ``session``: the current one, which changes with the module's parameters.
    ``released``: gradcast has left the module. ``callbacks``: the functions of ``handle.on_update``."""

    callbacks: UpdateCallbacks

    @property
    def session(self) -> TrainingSession: ...

    @property
    def released(self) -> bool: ...

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        """Around backward: this rank counts n in the mean."""

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        """The ranks' shares change with their speed, and their samples are their weights, unless the program gives
        others. Raises Error(invalid_use), on every rank, for what one refuses and for different calls. Collective."""

    def release(self, *, reusable: bool) -> None:
        """Gives module and optimizers back as they were. ``reusable``: see Group.leave."""


def require_attached(session: TrainingSession) -> None:
    """Raises Error(invalid_use) after ``handle.detach()``."""
    if session.released:
        raise refused("gradcast has been detached from this module; attach it again")
