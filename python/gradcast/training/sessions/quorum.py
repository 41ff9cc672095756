"""Hook mode over process groups that change during training, for programs that continue without replicas that have
died. frameworks/torchft.py provides the groups.

There is a session per process group. It begins where forward ends, the last moment before gradients are sent. A plan
outlives its group: the replicas of a new group follow the plan of the first one among them that has one, so that a
replica that joins has it before it sends its first gradient. Each number of replicas has a plan of its own.

Network failures are reported, and the rest of the step sends nothing.
"""

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from gradcast.errors import Error, refused
from gradcast.training import preflight
from gradcast.training.acceptance import Accepted
from gradcast.training.compat import fork
from gradcast.training.compat.module_hooks import around_forward
from gradcast.training.model_layout import ModelLayout
from gradcast.training.options import Options
from gradcast.training.plan.balancing import SamplerCall
from gradcast.training.ranks import hosts
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.kinds import Setup, TrainingSession
from gradcast.training.sessions.session import Session
from gradcast.training.sessions.step_cycle import FailureGuard
from gradcast.training.step.update_callbacks import UpdateCallbacks
from gradcast.training.step.weights import GivenWeights

_log = logging.getLogger("gradcast")


class Quorum(Protocol):
    """The replicas of the open step: an interface to the library that makes the groups."""

    def process_group(self) -> Any:
        """The C++ group of this step, the same object as long as it is the same group; None if it has failed. Waits
        until the quorum is known."""

    def share(self) -> float:
        """The factor of this replica's gradients; 0 if it does not count in this step."""

    def report(self, error: Error) -> None:
        """Reports a failure: the step is not to be used, and the next one gets another group."""

    def abort(self) -> None:
        """Closes the group's connections: replicas that still wait are notified now, and not after the next quorum."""


class Plans:
    """The plan and profile that were in force last (``Handle.state_dict()``), by number of replicas; the newest is
    last. They outlive an attachment."""

    def __init__(self) -> None:
        self.by_size: dict[int, dict[str, Any]] = {}
        self._sessions: weakref.ref[QuorumSessions] | None = None

    def follow(self, sessions: "QuorumSessions") -> None:
        """Keeps the plans of these sessions. Raises Error(invalid_use) while those of another attachment are kept."""
        if (other := self._followed()) is not None and not other.released:
            raise refused("gradcast is attached with this manager already; give all modules as one list")
        self._sessions = weakref.ref(sessions)

    def _followed(self) -> "QuorumSessions | None":
        return None if self._sessions is None else self._sessions()

    def load(self, state: dict[int, dict[str, Any]]) -> None:
        self.by_size = dict(state)

    def saved(self) -> dict[int, dict[str, Any]]:
        """Returns the plans. Any thread, while no step is open: the plan does not change."""
        if (sessions := self._followed()) is not None:
            sessions.keep_plan()
        return dict(self.by_size)

    def keep(self, size: int, state: dict[str, Any]) -> None:
        self.by_size.pop(size, None)
        self.by_size[size] = state

    def for_size(self, size: int) -> dict[str, Any] | None:
        """The plan for so many replicas, or else the newest; None without any."""
        newest = next(reversed(self.by_size.values()), None)
        return self.by_size.get(size, newest)


class QuorumGuard(FailureGuard):
    """Reports failures over one process group."""

    def __init__(self, sessions: "QuorumSessions") -> None:
        self._sessions = sessions

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        with self._catching():
            yield
        if self.has_failed:
            self._sessions.quorum.abort()  # other ranks may still wait to agree on something here

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        with self._catching():
            yield
        if self.has_failed:
            self._sessions.end_session()  # nobody may wait for gradients that never arrive

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        try:
            yield
        except Error as error:
            if error.code != "communication":
                raise
            self.has_failed = True
            self._sessions.on_failure(error)


class QuorumSessions:
    """The attachment to a module. ``session``: that of the quorum's process group; before the first quorum, for the
    only replica, and in a step whose group has failed, one that sends nothing."""

    def __init__(self, quorum: Quorum, accepted: Accepted, options: Options, plans: Plans) -> None:
        plans.follow(self)
        self.quorum, self._accepted, self._options, self._plans = quorum, accepted, options, plans
        self.callbacks = UpdateCallbacks(accepted.parameters, in_parts=False)
        self.session = TrainingSession(Group(0, 1))
        self.released = False
        self._process_group: Any = None  # the one that the session is for
        self._failure: Error | None = None  # of this group
        self._given = GivenWeights(None)
        self._given.share = quorum.share
        self._layout = ModelLayout(accepted.whole, [], accepted.parameters.values())
        self._hooks = around_forward(accepted.called, self._before_forward, self._after_forward)

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        raise refused("with torchft each participant counts alike; omit handle.weight()")

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        raise refused("with torchft the number of replicas changes; BalancedBatchSampler needs one that does not")

    def release(self, *, reusable: bool) -> None:
        for hook in self._hooks:
            hook.remove()
        self._leave()
        self.session.released = self.released = True

    def keep_plan(self) -> None:
        session = self.session
        if isinstance(session, Session) and not session.report.measuring and session.report.profile is not None:
            self._plans.keep(session.group.world_size, session.checkpoint.state_dict())

    def _before_forward(self, called: nn.Module, _: Any, compiled: bool) -> None:
        if self.session.released:  # in a forked child
            return
        if torch.is_grad_enabled() and self._layout.changed():
            raise refused(
                "the module's parameters have changed since attach, which gradcast does not follow with torchft; call "
                "handle.detach() on all replicas before the change, and attach again after it"
            )
        if isinstance(self.session, Session):
            self.session.forward.before(called, compiled)

    def _after_forward(self, called: nn.Module, output: Any, compiled: bool) -> None:
        if self.session.released:
            return
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._follow_quorum(called, compiled)
        if isinstance(self.session, Session):
            self.session.forward.after(called, output)

    def _follow_quorum(self, called: nn.Module, compiled: bool) -> None:
        process_group = self.quorum.process_group()
        if process_group is None and self._failure is not None:  # no quorum has made another one
            self.quorum.report(self._failure)
        if process_group is self._process_group:
            return
        self._leave()
        if process_group is None:
            return
        self._process_group = process_group
        if process_group.size() > 1:
            self._begin(process_group)
        if isinstance(self.session, Session):
            self.session.forward.before(called, compiled)

    def _leave(self) -> None:
        self.keep_plan()
        self._failure = None
        self.end_session()

    def end_session(self) -> None:
        """Ends the session, of which nothing is in flight: backward waits for all."""
        ended = self.session
        if isinstance(ended, Session):
            ended.release(leaves=True)
            ended.group.shared = None  # the connections close with the last reference to the group
        self.session = TrainingSession(Group(0, 1), progress=ended.progress)
        self._process_group = None
        if self._failure is not None:
            self.quorum.abort()

    def _begin(self, process_group: Any) -> None:
        """Begins a session over the process group, with the plan of the first replica that has one. Collective."""
        accepted, options = self._accepted, self._options
        rank, size = process_group.rank(), process_group.size()
        group = Group(rank, size, process_group, process_group, None, accepted.device)
        try:
            with group.together("beginning over a quorum's process group"):
                places = preflight.check_same_call(group, "hook", options)
                start_s = time.perf_counter()  # all replicas are here
                group.hosts, _ = hosts.agreed(places)
                preflight.check_same_model(group, accepted.module)
                kept = self._plans.for_size(size)
                have = group.gather(kept is not None)
                setup = Setup(accepted, [], group, options, self.callbacks)
                given, progress = self._given, self.session.progress
                self.session = Session(setup, accepted.parameters, given, progress, QuorumGuard(self))
                self.session.exchange.watch.explains = False
                if True in have:
                    source = have.index(True)
                    self.session.checkpoint.load_state_dict(group.gather(kept if rank == source else None)[source])
                fork.watch(self.session)
        except Error as error:
            self.on_failure(error)
            self.end_session()
            is_own = error.on_all_ranks and error.__cause__ is not None  # an exception of this replica
            if error.code != "communication" or is_own:
                raise
            return
        waited_ms = 1e3 * (time.perf_counter() - start_s)
        group.info("a quorum of %d replicas has a new process group; its session took %.0f ms", size, waited_ms)

    def on_failure(self, error: Error) -> None:
        """Notes a failure: nothing more is sent over this process group."""
        self.keep_plan()
        self._failure = error
        _log.warning("this step is given up, and the next one gets another process group: %s", error)
        self.quorum.report(error)
