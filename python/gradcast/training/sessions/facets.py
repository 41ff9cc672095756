"""The report, checkpoints and round calls of sessions without a plan; plan_facets.py and ../local/facets.py have
others. These objects never refer to their session, so that a detached module is freed at once."""

import contextlib
from typing import Any

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.errors import refused
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.plan.agreement import STATE_VERSION
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_buffers import GradientRange

_NO_ROUNDS = (
    "there are no rounds: every step averages the gradients, so all ranks have the same parameters; omit the call, "
    "or train with local steps (options.local)"
)


class Report:
    """The measurements and the plan of a session.

    ``profile``: measured by the warm-up, None before. ``plan``: the one in force; ``plan_version`` grows with each.
    ``measuring``: a warm-up is running that ends with a plan. ``layout``: the place of each gradient in the buffers, in
    the order of the plan's profile. ``trace``: the record of the last steps. ``is_sending``: blocks are in flight.
    ``released``: gradcast has been removed from the module, and only measurements are known.
    """

    profile: _core.Profile | None = None
    plan: _core.Plan | None = None
    plan_version = 0
    measuring = False
    layout: tuple[GradientRange, ...] = ()
    trace: StepTrace | None = None
    is_sending = False
    released = False

    def stats(self) -> dict[str, Any]:
        """Values of ``handle.stats()`` beyond those of every session."""
        return {}

    def alarms(self) -> list[Alarm]:
        return []

    def timeline_events(self) -> list[dict[str, Any]]:
        return []

    def plan_text(self, profile_path: str | None) -> str:
        raise refused("there is no plan: a single worker, or GRADCAST_DISABLE is set")


class Checkpoint:
    """The state of a session in checkpoints. ``saves_anew``: the state changes with each step. ``mean_weight``: of the
    last weighted step, from which the next one starts (step/weights.py)."""

    mean_weight: float | None = None
    saves_anew = False

    def __init__(self, mode: str, group: Group, report: Report) -> None:
        self._mode, self._group, self._report = mode, group, report

    def state_dict(self) -> dict[str, Any]:
        profile = None if self._report.profile is None else self._report.profile.to_json()
        own = {"mode": self._mode, "world_size": self._group.world_size, "profile": profile, "plan": None}
        return {"version": STATE_VERSION, **own}

    def saved(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Returns ``state_dict()`` for a snapshot. ``kept``: the cache of these calls, filled by the last one."""
        version = (self._report.plan_version, self._report.measuring)
        if kept.get("version") != version or self.saves_anew:
            kept.update(version=version, state=self.state_dict())
        return kept["state"] | {"mean_weight": self.mean_weight}

    def check(self, state: dict[str, Any]) -> None:
        """Raises Error(invalid_use) for a state that this rank cannot load."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follows the plan of a checkpoint if it fits. Collective."""


class Reduction:
    """The reduction of the gradients. ``by_ddp``: DDP does it for a while (handover.py)."""

    by_ddp = False

    def take_back(self) -> None:
        """Takes the reduction back from DDP, for a call of the program on every rank; the backward pass that comes next
        is gradcast's."""

    def note_reductions(self) -> None:
        """Counts the steps that DDP has reduced."""


class RoundCalls:
    """Calls for rounds of local steps."""

    lends = False  # True inside global_model(): the module has other tensors

    def end_round(self) -> None:
        raise refused(_NO_ROUNDS)

    def global_model(self) -> contextlib.AbstractContextManager[None]:
        raise refused(_NO_ROUNDS)
