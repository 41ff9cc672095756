"""The parts of a training for snapshots and samplers: its state, the time when that is complete, and its ranks."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from gradcast import _core
from gradcast.errors import refused
from gradcast.host_traffic import leaving_share
from gradcast.training.attached_modules import attached_to
from gradcast.training.compat.sharding import has_parts, is_sharded
from gradcast.training.plan.balancing import SamplerCall, ShareSchedule
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.kinds import Attached, TrainingSession, require_attached
from gradcast.training.sessions.session import Session
from gradcast.training.step.update_callbacks import UpdateCallback, UpdateRegistration

__all__ = ["PredictedStep", "SamplerCall", "ShareSchedule", "TrainingState", "UpdateCallback"]


class PredictedStep(NamedTuple):
    """The predicted step of the plan in force. ``leaving_share``: of a block's bytes, those that leave a host."""

    mode: str
    timeline: _core.Timeline
    link: _core.LinkModel
    leaving_share: float


class TrainingState:
    """The state of what gradcast is attached to. ``module``: without DDP's wrapper. ``called``: the modules whose
    forward the program calls. ``optimizers``: those that attach was given."""

    def __init__(
        self,
        attached: Attached,
        module: nn.Module,
        called: Sequence[nn.Module] = (),
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.attached, self.module = attached, weakref.ref(module)
        self._called = [weakref.ref(each) for each in called]
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._kept: tuple[TrainingSession, dict[str, Any]] | None = None

    @staticmethod
    def of(handle: Any, what: str) -> "TrainingState":
        """Raises Error(invalid_use) for anything else than a handle. ``what``: its receiver, for the error."""
        found = getattr(handle, "_training", None)
        if not isinstance(found, TrainingState):
            raise refused(f"{what} got a {type(handle).__name__} as handle; pass what gradcast.attach() returned")
        return found

    def require_whole(self, what: str) -> None:
        """Raises Error(invalid_use) for a module in parts. ``what``: takes all ranks' parameters for equal."""
        module = self.module()
        if module is not None and (is_sharded(module) or has_parts(module)):
            raise refused(
                f"{what} does not know sharded modules (FSDP, DTensors): it takes the ranks' parameters for "
                "equal; save shards with torch.distributed.checkpoint, and give all ranks the same number of samples"
            )

    @classmethod
    def of_module(cls, module: nn.Module) -> "TrainingState | None":
        """None if gradcast is not attached to the module. Otherwise nothing is in flight afterwards."""
        attached = attached_to(module)
        if attached is None:
            return None
        require_attached(attached.session)
        attached.session.flush()
        return cls(attached, module)

    @property
    def called(self) -> list[nn.Module]:
        return [each() for each in self._called]

    @property
    def optimizers(self) -> list[Optimizer]:
        return [each() for each in self._optimizers]

    @property
    def session(self) -> TrainingSession:
        """The present one (sessions/kinds.py), for its ``mode``, ``early_clipping`` and facets (sessions/facets.py)."""
        return self.attached.session

    @property
    def group(self) -> Group:
        return self.session.group

    def follow(self, callback: UpdateCallback) -> UpdateRegistration:
        return UpdateRegistration(self.attached, callback)

    def predicted_step(self) -> PredictedStep | None:
        """None if no link is measured, or if no block leaves a host."""
        session, hosts = self.session, self.group.hosts
        if not isinstance(session, Session) or hosts.count == 1:
            return None
        agreed, exchange = session.controller.agreed, session.exchange
        link = agreed.profile.link
        if link is None:  # a warm-up's plan, or a pinned one
            return None
        timeline = _core.play(agreed.profile, link, agreed.in_force)
        return PredictedStep(session.mode, timeline, link, leaving_share(hosts, exchange.form, exchange.buffers.wire))

    def saved(self) -> dict[str, Any]:
        """``handle.state_dict()``, whose large parts are made again only when they have changed; with local steps in
        memory that stays, without what the module's state dict has."""
        if self._kept is None or self._kept[0] is not self.session:
            self._kept = self.session, {}
        return self.session.checkpoint.saved(self._kept[1])

    def load(self, state: dict[str, Any]) -> None:
        """Loads a state. Collective, as ``handle.load_state_dict()``."""
        require_attached(self.session)
        self.session.checkpoint.load_state_dict(state)

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        """Lets the ranks' shares follow their speed. Collective."""
        require_attached(self.session)
        self.attached.balance(call)
