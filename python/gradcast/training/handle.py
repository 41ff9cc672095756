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
from gradcast.training import preflight
from gradcast.training.acceptance import accept, unwrapped, unwrapped_optimizer
from gradcast.training.attachment import Attachment
from gradcast.training.disabled import DisabledSession, is_disabled
from gradcast.training.options import Options
from gradcast.training.plan import agreement
from gradcast.training.ranks.group import make_group, on_device, require_backend
from gradcast.training.single_worker import SingleWorkerSession
from gradcast.training.stats import stats_of
from gradcast.training.step.gradient_buffers import GradientRange

_log = logging.getLogger("gradcast")
# Each module without its wrappers, and what is attached to it: an Attachment, or the session of a single worker.
attached_modules: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]]" = weakref.WeakKeyDictionary()


def attach(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: Any = None,
    options: Options | None = None,
) -> "Handle":
    """Lets the module's gradients travel by a plan. Collective over the workers; call it before the training loop.

    ``module``: bare, or with one DistributedDataParallel around it, which may lie inside of torch.compile() or of a
    framework's wrapper; every trainable parameter on one device (docs/semantics.md: what is accepted). With
    ``optimizer`` (one, or a list of all that update the module): overlap mode, gradients of a step travel while the
    next forward pass runs, and each parameter is updated before it is read. Without: hook mode, all gradients have
    arrived when backward ends, as with DDP. A framework's wrapper around an optimizer will do: the optimizer inside is
    taken. A bare module gets rank 0's parameters and buffers now, and its buffers before each training forward pass,
    like DDP's.
    ``process_group``: the workers (default: all, or those of the DDP module).

    The training loop stays as it is. Raises gradcast.Error, on every rank, for what would give wrong numbers.
    """
    return attach_inside([], module, optimizer, process_group, options)


def attach_inside(
    idle: Sequence[DistributedDataParallel],
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    process_group: Any,
    options: Options | None,
) -> "Handle":
    """attach() for a module inside of DistributedDataParallel modules that the caller keeps ``idle``: until gradcast is
    detached nobody calls them, so they reduce nothing."""
    options = options or Options()
    _make_log_visible()
    disabled = is_disabled()
    listed = isinstance(optimizer, list | tuple)
    given = list(optimizer) if listed else [] if optimizer is None else [optimizer]
    optimizers = [unwrapped_optimizer(each) for each in given]
    refusal, accepted = None, None
    try:
        preflight.check_clipping(options.max_grad_norm, given)
        accepted = accept(module, optimizers, process_group, idle)
        if accepted.module in attached_modules:
            raise Error("gradcast is attached to this module already; call handle.detach() first", "invalid_use")
    except Error as error:
        refusal = error
    if accepted is not None and accepted.ddp is not None:
        process_group = accepted.ddp.process_group
    device = None if accepted is None else accepted.device
    if device is not None:
        require_backend(process_group, device)
    mode = "ddp" if disabled else "overlap" if optimizers else "hook"
    with on_device(device):
        preflight.check_same_call(process_group, refusal, mode, options, device)
    assert accepted is not None, "the call was refused"
    group = make_group(process_group, device, options.timeout_s, reuses=True)
    preflight.check_same_model(group, accepted.module)
    if disabled:
        attached: Any = DisabledSession(accepted, optimizers, group, options)
    elif group.world_size == 1:
        attached = SingleWorkerSession(accepted.called, accepted.parameters, optimizers, group, options)
    else:
        if accepted.ddp is None:
            tensors = [*accepted.module.parameters(), *accepted.module.buffers()]
            group.copy_from_first(tensors, "the module's parameters and buffers")
        attached = Attachment(accepted, optimizers, group, options)
    handle = Handle(accepted.module, attached)
    attached_modules[accepted.module] = weakref.ref(attached)
    return handle


def _make_log_visible() -> None:
    """Where the program has set up no logging, what gradcast expects and decides goes to standard error."""
    if _log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gradcast: %(message)s"))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)


class Handle:
    """What ``attach`` returns. Need not be kept: training goes on without it."""

    def __init__(self, module: nn.Module, attached: Any) -> None:
        """``module``: without DDP's wrapper. ``attached``: an Attachment, or with one worker a SoloSession."""
        self._attached = attached
        self._module = weakref.ref(module)
        _at_exit(attached)

    @property
    def _session(self) -> Any:
        return self._attached.session

    @property
    def mode(self) -> str:
        """ "hook" or "overlap"; "ddp" where GRADCAST_DISABLE leaves everything to it."""
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
        return self._live.plan if self._session.has_plan else None

    @property
    def plan_version(self) -> int:
        """Grows with each plan, the plain ones of the warm-up included."""
        return self._live.controller.version if self._session.has_plan else 0

    @property
    def profile(self) -> _core.Profile | None:
        """What the warm-up has measured, the same on every rank; None before."""
        return self._session.profile

    @property
    def measuring(self) -> bool:
        """Whether the steps of now are the warm-up's, or those of a warm-up after a change."""
        return self._session.has_plan and self._live.controller.warmup is not None

    @property
    def layout(self) -> tuple[GradientRange, ...]:
        """Where each gradient lies in the buffers, in the order of the plan's profile."""
        return self._live.buffers.layout if self._session.has_plan else ()

    def flush(self) -> None:
        """Waits until every gradient in flight has arrived, and runs every update that waits for it (on a device: puts
        it on the current stream).

        Needed only before parameters are read in ways that nobody sees: raw pointers, to_dlpack(), TorchScript.
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
        if self._session.has_plan:
            events = self._session.trace.events(self.rank, self._session.exchange.timeline())
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
        if not self._session.has_plan:
            raise Error("there is no plan: a single worker, or GRADCAST_DISABLE is set", "invalid_use")
        agreed = self._live.controller.agreed
        write_text(path, agreement.plan_text(self._session.plan, agreed.profile, profile_path), "plan")

    def state_dict(self) -> dict[str, Any]:
        """Plan and profile, for a checkpoint: a dict of strings and numbers."""
        return self._live.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the plan of a checkpoint instead of measuring, where model, mode and number of workers are the
        same; otherwise the warm-up goes on. Collective; rank 0's state counts. Not between backward and step()."""
        self._live.load_state_dict(state)

    def detach(self, *, wait_s: float | None = None) -> None:
        """Finishes what is in flight and gives back module and optimizers as they were. Collective. Idempotent.

        ``wait_s``: for after an error, where other ranks may never join in: raises Error(communication) when that takes
        longer. The module is given back then, too, and its parameters may lack an update.
        """
        try:
            if not self._attached.released:
                _detach(self._attached, wait_s)
        finally:
            module = self._module()
            if module is not None:
                attached_modules.pop(module, None)

    @property
    def _live(self) -> Any:
        if self._session.released:
            raise Error("gradcast has been detached from this module; attach it again", "invalid_use")
        return self._session


def detach_left(module: nn.Module) -> None:
    """Detaches what a training that ended with an error has left on the module. Collective, as the error was."""
    left = attached_modules.pop(unwrapped(module), None)
    attached = None if left is None else left()
    if attached is not None and not attached.released:
        _detach(attached)


def _detach(attached: Any, wait_s: float | None = None) -> None:
    flushed = False
    try:
        if not attached.session.released:  # not where a session has ended and the next one could not begin
            attached.session.flush(wait_s)
            _tell_summary(attached.session)
            flushed = True
    finally:
        # Also where what is in flight never arrives: the module is then an ordinary one that can be read and saved.
        attached.release(reusable=flushed)


def _tell_summary(session: Any) -> None:
    summary = session.controller.summary() if session.has_plan and session.group.rank == 0 else None
    if summary is not None:
        _log.info("%s", summary)


def _at_exit(attached: Any) -> None:
    reference = weakref.ref(attached)

    def leave() -> None:
        attached = reference()
        if attached is None or not attached.session.has_plan or attached.session.released:
            return
        ended_well = False
        try:
            # After an error the other ranks may never join in: give up what is in flight instead of waiting for them.
            if getattr(sys, "last_value", None) is None:
                attached.session.flush()
                _tell_summary(attached.session)
                ended_well = True
        except Error as error:
            _log.error("at the end of the program: %s", error)
        finally:
            attached.session.exchange.shutdown()
            attached.session.group.leave(reusable=ended_well)

    atexit.register(leave)
