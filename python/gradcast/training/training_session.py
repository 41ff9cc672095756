"""What the handle needs of a session: one protocol for the three kinds.

Session              two or more workers: measures, plans, and follows the plan (session.py)
SingleWorkerSession  one worker: measures the warm-up steps; nothing is sent (single_worker.py)
DisabledSession      GRADCAST_DISABLE is set: stock DDP trains the module (disabled.py)
"""

from typing import Any, Protocol

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.diagnostics import Diagnostics
from gradcast.training.no_sync import NoSyncBlocks
from gradcast.training.plan.agreement import STATE_VERSION
from gradcast.training.ranks.group import Group
from gradcast.training.stats import base_stats
from gradcast.training.step.gradient_buffers import GradientRange


class TrainingSession(Protocol):
    """``mode``: "hook", "overlap" or "ddp". ``steps``: completed so far. ``released``: gradcast has left the module.
    ``profile``: what the warm-up has measured, None before."""

    mode: str
    group: Group
    steps: int
    released: bool
    no_sync_blocks: NoSyncBlocks

    @property
    def profile(self) -> _core.Profile | None: ...

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; None for a kind without plans."""

    @property
    def plan_version(self) -> int:
        """Grows with each plan; 0 for a kind without plans."""

    @property
    def measuring(self) -> bool:
        """Whether a warm-up is running that ends with a plan."""

    @property
    def layout(self) -> tuple[GradientRange, ...]:
        """The place of each gradient in the buffers, in the order of the plan's profile."""

    def flush(self, limit_s: float | None = None) -> None:
        """Waits until everything in flight has arrived and all due updates have run. Raises Error(communication) after
        ``limit_s``."""

    def stats(self) -> dict[str, Any]:
        """The values of ``handle.stats()``."""

    def timeline_events(self) -> list[dict[str, Any]]:
        """Chrome trace events of the last steps."""

    def plan_text(self, profile_path: str | None) -> str:
        """The JSON text of the plan in force. Raises Error(invalid_use) for a kind without plans."""

    def state_dict(self) -> dict[str, Any]:
        """Plan and profile for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follows the plan of a checkpoint if it fits. Collective."""

    def summary(self) -> str | None:
        """The expected and the measured gain, on rank 0 and once both are known."""

    def diagnostics(self) -> Diagnostics:
        """For gradcast's own tools. Raises Error(invalid_use) for a kind without plans."""

    def close_at_exit(self, *, failed: bool) -> None:
        """The interpreter exits. ``failed``: by an error, so that other ranks may never answer."""


class Attached(Protocol):
    """What ``attach`` has put on a module. ``session``: the current one, which changes with the module's parameters."""

    @property
    def session(self) -> TrainingSession: ...

    @property
    def released(self) -> bool:
        """Whether gradcast has left the module."""

    def release(self, *, reusable: bool) -> None:
        """Gives module and optimizers back as they were. ``reusable``: see Group.leave."""


class SessionWithoutPlan:
    """The part of a TrainingSession that is the same for every kind without plans. Attached by itself, too."""

    mode: str
    group: Group
    no_sync_blocks: NoSyncBlocks
    steps = 0
    released = False
    profile: _core.Profile | None = None
    plan: _core.Plan | None = None
    plan_version = 0
    measuring = False
    layout: tuple[GradientRange, ...] = ()

    @property
    def session(self) -> "SessionWithoutPlan":
        return self

    def flush(self, limit_s: float | None = None) -> None:
        """Nothing of gradcast is ever in flight."""

    def stats(self) -> dict[str, Any]:
        return base_stats(self.steps, self.mode, self.group.world_size, self.profile)

    def timeline_events(self) -> list[dict[str, Any]]:
        return []

    def plan_text(self, profile_path: str | None) -> str:
        raise _no_plan()

    def state_dict(self) -> dict[str, Any]:
        profile = None if self.profile is None else self.profile.to_json()
        own = {"mode": self.mode, "world_size": self.group.world_size, "profile": profile, "plan": None}
        return {"version": STATE_VERSION, **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no plan to follow."""

    def summary(self) -> str | None:
        return None

    def diagnostics(self) -> Diagnostics:
        raise _no_plan()

    def close_at_exit(self, *, failed: bool) -> None:
        """Nothing of gradcast is on the network."""


def require_attached(session: TrainingSession) -> None:
    """Raises Error(invalid_use) after ``handle.detach()``."""
    if session.released:
        raise Error("gradcast has been detached from this module; attach it again", "invalid_use")


def _no_plan() -> Error:
    return Error("there is no plan: a single worker, or GRADCAST_DISABLE is set", "invalid_use")
