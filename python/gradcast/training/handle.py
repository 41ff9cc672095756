"""``attach`` and the handle that it returns."""

import atexit
import contextlib
import json
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast import _core
from gradcast.errors import Error
from gradcast.files import write_text
from gradcast.training import checks, ddp, planning, updates
from gradcast.training.buffers import Place
from gradcast.training.group import make_group, require_backend
from gradcast.training.options import Options
from gradcast.training.report import stats_of
from gradcast.training.session import Session
from gradcast.training.solo import SoloSession

_log = logging.getLogger("gradcast")
# Modules alone: a handle holds its module, and would keep it here for ever.
_attached: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def attach(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: Any = None,
    options: Options | None = None,
) -> "Handle":
    """Lets the module's gradients travel by a plan. Collective over the workers; call it before the training loop.

    ``module``: bare or wrapped in DistributedDataParallel, every trainable parameter on one device. With ``optimizer``
    (one, or a list of all that update the module): overlap mode, gradients of a step travel while the next forward pass
    runs, and each parameter is updated before it is read. Without: hook mode, all gradients have arrived when backward
    ends, as with DDP. A bare module gets rank 0's parameters and buffers now, and its buffers before each training
    forward pass, like DDP's. ``process_group``: the workers (default: all, or those of the DDP module).

    The training loop stays as it is. Raises gradcast.Error, on every rank, for what would give wrong numbers.
    """
    options = options or Options()
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or [])
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    refusal = None
    parameters: dict[str, nn.Parameter] = {}
    try:
        parameters = _checked(module, inner, optimizers, process_group)
    except Error as error:
        refusal = error
    if isinstance(module, DistributedDataParallel):
        process_group = module.process_group
    if parameters:
        require_backend(process_group, next(iter(parameters.values())).device)
    checks.check_same_call(process_group, refusal, "overlap" if optimizers else "hook", options.warmup_steps)
    group = make_group(process_group, next(iter(parameters.values())).device, options.timeout_s)
    checks.check_same_model(group, parameters, dict(inner.named_buffers()))
    if group.world_size == 1:
        session: Any = SoloSession(module, parameters, optimizers, group, options)
    else:
        if not isinstance(module, DistributedDataParallel):
            group.copy_from_first([*inner.parameters(), *inner.buffers()], "the module's parameters and buffers")
        session = Session(module, parameters, optimizers, group, options)
    handle = Handle(module, session)
    _attached.add(inner)
    return handle


def _checked(
    module: nn.Module, inner: nn.Module, optimizers: Sequence[Optimizer], process_group: Any
) -> dict[str, nn.Parameter]:
    """What this rank can see by itself. The trainable parameters."""
    parameters = checks.trainable(module)
    if inner in _attached:
        raise Error("gradcast is attached to this module already; call handle.detach() first", "invalid_use")
    checks.check_optimizers(optimizers, parameters)
    for each in optimizers:
        updates.refuse_unsplittable(each)
    if isinstance(module, DistributedDataParallel):
        checks.check_ddp(module, process_group)
    return parameters


class Handle:
    """What ``attach`` returns. Need not be kept: training goes on without it."""

    def __init__(self, module: nn.Module, session: Any) -> None:
        self._session = session
        self._module = weakref.ref(module)
        self._taken_over = None
        if isinstance(module, DistributedDataParallel) and session.group.world_size > 1:
            self._taken_over = ddp.take_over(module)
        _at_exit(session)

    @property
    def mode(self) -> str:
        """ "hook" or "overlap"."""
        return self._session.mode

    @property
    def rank(self) -> int:
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        return self._session.group.world_size

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; during warm-up a plain one. None with a single worker."""
        return None if self.world_size == 1 else self._live.plan

    @property
    def plan_version(self) -> int:
        """Grows with each plan, the plain ones of the warm-up included."""
        return 0 if self.world_size == 1 else self._live.traffic.plan_version

    @property
    def profile(self) -> _core.Profile | None:
        """What the warm-up has measured, the same on every rank; None before."""
        return self._session.profile

    @property
    def layout(self) -> tuple[Place, ...]:
        """Where each gradient lies in the buffers, in the order of the plan's profile."""
        return () if self.world_size == 1 else self._live.buffers.layout

    def flush(self) -> None:
        """Waits until every gradient in flight has arrived and every update that waits for it has run.

        Needed only before parameters are read in ways that PyTorch's own checks do not see: DLPack, raw pointers.
        """
        if not self._session.released:
            self._session.flush()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here stay on this worker and add up, as with DDP's no_sync()."""
        self._live.no_sync(True)
        try:
            yield
        finally:
            self._session.no_sync(False)

    def stats(self) -> dict[str, Any]:
        """What has been going on lately; times in ms, sizes in bytes, None for what is not known yet."""
        return stats_of(self._session)

    def timeline(self) -> dict[str, Any]:
        """The last steps of this rank as a Chrome trace; ui.perfetto.dev opens it."""
        events = []
        if self.world_size > 1:
            events = self._session.trace.events(self.rank, self._session.traffic.timeline())
        return {"traceEvents": events, "distributedInfo": {"rank": self.rank, "world_size": self.world_size}}

    def save_timeline(self, path: str) -> None:
        write_text(path, json.dumps(self.timeline()), "timeline")

    def save_profile(self, path: str) -> None:
        """What has been measured, for ``gradcast simulate`` and ``gradcast plan``."""
        if self.profile is None:
            raise Error("the profile is not measured yet; save it after the warm-up steps", "invalid_use")
        write_text(path, self.profile.to_json(), "profile")

    def save_plan(self, path: str, profile_path: str | None = None) -> None:
        """The plan in force; ``Options(plan=path)`` follows it again. ``profile_path``: noted for ``gradcast plot``."""
        if self.world_size == 1:
            raise Error("a single worker has no plan", "invalid_use")
        agreed = self._live.traffic.agreed
        write_text(path, planning.plan_text(agreed.plan, agreed.profile, profile_path), "plan")

    def detach(self) -> None:
        """Finishes what is in flight and gives back module and optimizers as they were. Collective. Idempotent."""
        if self._session.released:
            return
        try:
            self._session.flush()
        finally:
            # Also where what is in flight never arrives: the module is then an ordinary one that can be read and saved.
            self._give_back()

    def _give_back(self) -> None:
        self._session.release()
        module = self._module()
        if module is not None:
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            _attached.discard(inner)
            if self._taken_over is not None:
                ddp.give_back(module, self._taken_over)

    @property
    def _live(self) -> Any:
        if self._session.released:
            raise Error("gradcast has been detached from this module; attach it again", "invalid_use")
        return self._session


def _at_exit(session: Any) -> None:
    reference = weakref.ref(session)

    def leave() -> None:
        session = reference()
        if session is None or session.group.world_size == 1 or session.released:
            return
        try:
            # After an error the other ranks may never join in: give up what is in flight instead of waiting for them.
            if getattr(sys, "last_value", None) is None:
                session.flush()
        except Error as error:
            _log.error("at the end of the program: %s", error)
        finally:
            session.traffic.shutdown()

    atexit.register(leave)
