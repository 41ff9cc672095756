"""``optimizer.step()`` in overlap mode: a parameter is updated after its gradient has arrived and before it is read.

Thread safety: under the session's lock.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.training.compat import extension, interrupts
from gradcast.training.measure.early_waits import Cause, EarlyWaits, where
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.step import parameter_state
from gradcast.training.step.clipping import ValueClipping
from gradcast.training.step.deferred_optimizer import DeferredOptimizer
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.optimizer_state import Lock
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.partial_step import default_context, runs_hooks_inside
from gradcast.training.step.step_settings import Read, StepSettings
from gradcast.training.step.update_callbacks import UpdateCallbacks
from gradcast.training.step.update_clipping import UpdateClipping
from gradcast.training.step.update_stream import UpdateStream


class OptimizerSteps:
    """The steps of all optimizers of a session, with its ``gradients`` and ``waits``.

    A call of ``step()`` comes to ``take_gradients``, which updates synchronously or leaves the updates pending. The
    functions ``complete_updates...`` run pending updates. ``updating``: parameters that another thread than the one
    that trains is updating.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        read: Sequence[Read | None],
        gradients: GradientHooks,
        trace: StepTrace,
        waits: EarlyWaits,
        warn_once: Callable[..., None],
        values: ValueClipping | None,
        callbacks: UpdateCallbacks,
        operations_begun: Callable[[], object],
    ) -> None:
        """``read``: the settings that the step() of each optimizer reads. ``operations_begun``: see DeferredOptimizer.
        ``values``: clips each element."""
        self.optimizers = [
            DeferredOptimizer(each, its_read, gradients, warn_once, operations_begun)
            for each, its_read in zip(optimizers, read, strict=True)
        ]
        self.gradients, self._trace, self.waits = gradients, trace, waits
        self.stream = UpdateStream(gradients.exchange.buffers.flats[0].device)
        self.clipping = UpdateClipping(gradients, self.stream, values)
        self._warn_once, self._callbacks = warn_once, callbacks
        self._thread: int | None = None  # that calls step()
        self.updating: frozenset[ParameterState] = frozenset()
        self._failure: Error | None = None  # of an update; parameters are wrong since

    def intercept(self, on_step: Callable[[int], None], flush: Callable[[], None], lock: Lock) -> None:
        """Makes ``step()`` of optimizer k call ``on_step(k)``, and its state_dict() return a completed step's state."""
        for number, each in enumerate(self.optimizers):
            on_access = functools.partial(self.complete_updates_of, number, Cause.STATE)
            each.intercept(functools.partial(on_step, number), flush, on_access, lock)
        self._callbacks.in_parts = bool(self.optimizers)

    def leave(self) -> None:
        """Gives the optimizers their own ``step()`` again, until ``intercept``."""
        self._callbacks.in_parts = False
        for each in self.optimizers:
            each.leave()

    def release(self) -> None:
        for each in self.optimizers:
            each.release()

    @property
    def due(self) -> Sequence[ParameterState]:
        """Parameters whose updates are pending."""
        return extension.load().due(self.gradients.states)

    # --- step() ---

    def on_backward_begin(self) -> None:
        """Ends the open step, whose gradients are replaced; an optimizer that has not taken them never will."""
        if self.gradients.open and any(each.interception.replaced for each in self.optimizers):
            self._warn_once(
                "the optimizer's step() is called in a way that bypasses gradcast, as Accelerate does with a "
                "GradScaler: such steps wait for all gradients, without overlap with the next forward pass"
                + (", and gradcast does not clip them" if self.clipping.kinds else "")
                + ("; functions of handle.on_update() are not called" if self._callbacks else "")
            )
        self.complete_all_updates()
        for each in self.optimizers:
            each.has_stepped = False
        self.clipping.begin_step()

    def take_gradients(self, number: int, synchronous: bool, parts: int = 1) -> bool:
        """Makes a step with the gradients of the open backward pass. Returns True once every optimizer has taken them.

        ``synchronous``: waits for everything and updates now, as in the warm-up. Otherwise updates are left pending,
        unless the program's code makes that impossible. ``parts``: in which a synchronous step of the only optimizer
        updates, if it could be left pending.
        """
        self._thread = threading.get_ident()
        if not self.due:
            self.stream.move_to_caller()
        self.stream.follow_caller()
        with self.stream.entered():
            self._take_gradients(number, synchronous, parts)
        self.optimizers[number].has_stepped = True
        if not all(each.has_stepped for each in self.optimizers):
            return False
        for each in self.optimizers:
            each.has_stepped = False
        return True

    def _take_gradients(self, number: int, synchronous: bool, parts: int) -> None:
        self._refuse_after_failure()
        optimizer = self.optimizers[number]
        self.clipping.on_step(optimizer.optimizer, may_certify=self.gradients.exchange.plan.mode == "overlap")
        # The gradients have arrived by a second step with them, and nothing guards them any more.
        if synchronous or optimizer.has_stepped:
            self._step_now(number, None, parts)
            return
        settings = optimizer.settings()
        reason = self.reason_to_wait(number, settings)
        if reason is None:
            with self._trace.timed("wait"):
                is_deferred = self.clipping.may_defer()
            if is_deferred:
                self._defer(optimizer, settings)
                return
        if reason is Cause.SETTINGS:
            self._warn_once(
                "%s: step() of %s reads its %s, and nobody can tell whether the program changes that before the "
                "updates run: they run inside step(), without overlap with the next forward pass",
                where(),
                type(optimizer.optimizer).__name__,
                parameter_state.shown(settings.opaque),
            )
        self._step_now(number, reason, parts)

    def reason_to_wait(self, number: int, settings: StepSettings | None = None) -> Cause | None:
        """The reason why this optimizer's step cannot be deferred; None if it can. ``settings``: current, if known."""
        deferred = self.optimizers[number]
        optimizer = deferred.optimizer
        if (settings or deferred.settings()).opaque:
            return Cause.SETTINGS
        if deferred.guard.is_held:
            return Cause.STATE_HELD
        if runs_hooks_inside(optimizer):
            return Cause.HOOKS
        if self.stream.read_elsewhere:
            return Cause.OTHER_STREAM
        if not self.gradients.all_sent:
            return Cause.FAILED
        if self.gradients.values_used:
            return Cause.GRADIENTS
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return Cause.SCALER
        used = deferred.states if self.clipping.norm is None else self.gradients.states
        return None if self.gradients.are_in_place(used) else Cause.REPLACED

    def _step_now(self, number: int, reason: Cause | None, parts: int) -> None:
        """Makes a synchronous step. ``reason``: why it is not deferred, unless the caller has asked for that."""
        # Gradients that were used have arrived, and the wait for them is counted there.
        waits_here = reason not in (None, Cause.GRADIENTS)
        with self.waits.at(reason) if waits_here else contextlib.nullcontext(), self._trace.timed("wait"):
            self.gradients.wait_for_all()
        optimizer, arrived_ns = self.optimizers[number], self._trace.now()
        self.clipping.clip_as_they_are(optimizer.states)
        # Predictions do not know which of several optimizers a call is of: then the cost of one is not known.
        if parts > 1 and len(self.optimizers) == 1 and self.reason_to_wait(number) is None:
            optimizer.run_in_parts(parts, self._trace.count_update)
        else:
            optimizer.run_whole()
        self._callbacks.note(optimizer.states)
        self._trace.span("update", arrived_ns, self._trace.now())

    def run_whole(self, number: int) -> None:
        """Runs the optimizer's own step on the gradients as they are."""
        self._refuse_after_failure()
        self.stream.follow_caller()
        with self.stream.entered():
            self.optimizers[number].interception.run_whole()
            self._callbacks.note(self.optimizers[number].states)

    def _defer(self, optimizer: DeferredOptimizer, settings: StepSettings) -> None:
        """Leaves all updates of this optimizer pending."""
        with interrupts.after_this():
            held = optimizer.held()
            optimizer.defer(settings, self.gradients.listener)
        if self.clipping.norm is not None:
            self.gradients.arrived.note()
            self.clipping.take_norms(optimizer.states)
        if held:
            self._complete_held(held)

    def _complete_held(self, held: Sequence[ParameterState]) -> None:
        """Completes the updates of parameters whose memory the program holds: it could read that unnoticed."""
        self._warn_once(
            "%s: the program holds the memory of %s (a view or detach(), a NumPy array, DLPack, TorchScript, a graph "
            "that was kept): these are updated inside step(), without overlap with the next forward pass",
            where(),
            held[0].name + (f" and {len(held) - 1} more" if len(held) > 1 else ""),
        )
        with self.waits.at(Cause.HELD), default_context():
            self._complete_updates(held)

    # --- Pending updates ---

    def complete_updates(self, due: Sequence[ParameterState]) -> None:
        """Waits for the gradients of these parameters and updates them, together with all others that have arrived."""
        if due:
            with self.stream.entered(), default_context():
                self._complete_updates(due)
            self.call_back()

    def complete_all_updates(self) -> None:
        self.complete_updates(self.due)

    def complete_updates_of(self, number: int, cause: Cause | None = None) -> None:
        """Completes the updates of one optimizer. ``cause``: if the wait counts for the program's line."""
        with self.waits.at(cause) if cause is not None else contextlib.nullcontext():
            self.complete_updates(self.optimizers[number].due)

    def _complete_updates(self, due: Sequence[ParameterState]) -> None:
        self._refuse_after_failure()
        while due:
            self._wait_for(due)
            with interrupts.after_this():  # a handler that reads may have updated some while this has waited
                due = self._missing_where_compared()
                if not due:
                    self._update_arrived()

    def _wait_for(self, due: Sequence[ParameterState]) -> None:
        """Waits until these parameters can be updated. If nothing certifies that clipping changes nothing, that is when
        all gradients have arrived."""
        clipping = self.clipping
        can_certify = clipping.can_certify
        if can_certify or not clipping.is_norm_missing:
            with self._trace.timed("wait"):
                self.gradients.arrived.wait_for(due)
        if can_certify:
            with self._trace.timed("update"), interrupts.after_this():
                clipping.certify()
        if clipping.is_norm_missing:
            with self._trace.timed("wait"):
                self.gradients.wait_for_all()
            self.gradients.table.note_arrived(range(len(self.gradients.states)))

    def _missing_where_compared(self) -> list[ParameterState]:
        """Parameters whose gradients are missing for steps that are compared, of which a part could be updated."""
        missing: list[ParameterState] = []
        for each in self.optimizers:
            due = each.due
            ready = self.gradients.table.arrived(due)
            if ready and each.is_compared([] if self.gradients.exchange.on_device else ready) and len(ready) < len(due):
                missing += due
        return missing

    def _update_arrived(self) -> None:
        arrived_ns = self._trace.now()
        self.clipping.clip_all()
        for each in self.optimizers:
            due = each.due
            part = self.gradients.table.arrived(due)
            if part:
                self._update(each, part, last=len(part) == len(due))
        self._trace.span("update", arrived_ns, self._trace.now())

    def _update(self, optimizer: DeferredOptimizer, part: Sequence[ParameterState], *, last: bool) -> None:
        """Updates these parameters in one call of the optimizer. ``last``: no other updates of it are pending."""
        arrived = self.gradients.arrived
        arrived.settle(part)
        self.clipping.clip_part(part)
        # The thread that trains must not read half an update of this one. (On a device, optimizers choose other kernels
        # for pending parameters, and updates are in the order of a queue.)
        elsewhere = threading.get_ident() != self._thread
        hidden = elsewhere and part[0].parameter.is_cpu
        self.updating = frozenset(part if hidden else ())
        try:
            optimizer.update(part, last=last, elsewhere=elsewhere, hidden=hidden)
        except BaseException as error:
            self._fail(part, error)
            raise
        finally:
            self.updating = frozenset()
        for state in extension.load().to_zero(part):
            state.zero_after_update = False
            if state.update_grad is not None:
                state.update_grad.zero_()
        arrived.drop_released(part)
        self._trace.count_update()
        self._callbacks.note(part)
        if self.clipping.norm is not None and not self.due:
            self.clipping.end_step(self._trace.current.step)

    def call_back(self) -> None:
        """Calls the program's functions for updates since the last call. They may wait for other parameters, which
        leads here again, so nothing else may be unfinished."""
        if not self._callbacks.noted:
            return
        start_ns, record = self._trace.now(), self._trace.current
        with self.stream.entered():
            self._callbacks.run("after step()" if record is None else f"in step {record.step + 1}")
        self._trace.span("update", start_ns, self._trace.now())

    def parameters_changing(self, tensor: torch.Tensor) -> list[ParameterState] | None:
        """Parameters whose updates change this tensor of an optimizer's state; None if it is not of a state."""
        found = (each.guard.parameters_changing(tensor) for each in self.optimizers)
        return next((states for states in found if states is not None), None)

    def _fail(self, part: Sequence[ParameterState], error: BaseException) -> None:
        """Makes every later use of these parameters raise: some may be updated, others not."""
        parameter_state.fail_update(part, self.gradients.listener)
        self._failure = refused(
            f"the update of {parameter_state.names(part)} has failed on this rank ({type(error).__name__}: {error}), "
            "perhaps half-way, so its parameters differ from those of the other ranks; end the training and continue "
            "from the last checkpoint, or call handle.detach() and load one"
        )

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
