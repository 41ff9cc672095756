"""A step of a session: backward, ``step()``, and the uses of pending tensors."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradcast.training.compat import graph_capture
from gradcast.training.measure.early_waits import Cause
from gradcast.training.measure.step_trace import Stamp, StepRecord, StepTrace
from gradcast.training.plan.loop import PlanLoop
from gradcast.training.sessions.open_blocks import Progress
from gradcast.training.sessions.warmup_reads import WarmupReads
from gradcast.training.step import pending
from gradcast.training.step.backward_passes import NO_TASK, ForwardPass
from gradcast.training.step.layout_change import change_layout
from gradcast.training.step.optimizer_steps import OptimizerSteps
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.partial_step import default_context
from gradcast.training.step.rank_consistency import RankConsistency


class FailureGuard:
    """Contexts around waits for other ranks. Default: network failures are raised. ``has_failed``: something has
    failed, and nothing is sent any more."""

    has_failed = False

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Context in which a failure is reported, and the step is given up; by default, it is raised."""
        return contextlib.nullcontext()

    def leaving(self) -> contextlib.AbstractContextManager[None]:
        """The same as ``reporting``; a session in which something has failed also ends."""
        return contextlib.nullcontext()


class ForwardTime:
    """The time of the forward passes before a backward pass. ``is_seen``: the module's own forward was called."""

    def __init__(self, trace: StepTrace, warn_once: Callable[..., None]) -> None:
        self._trace, self._warn_once = trace, warn_once
        self._end_ns, self.is_seen = 0, False
        self._starts_ns: dict[int, int] = {}  # by id of a module: of its last pass

    def begin(self, module: nn.Module) -> None:
        self._starts_ns[id(module)], self._end_ns = time.perf_counter_ns(), 0

    def end(self) -> None:
        self._end_ns = self._trace.now()

    def warn_if_unseen(self) -> None:
        if not self.is_seen:
            self._warn_once(
                "this backward pass comes from another method of the module than forward, where buffers are sent to "
                "all ranks and new parameters are noticed; call the module itself: module(...)"
            )
        self.is_seen = True

    def take(self, now_ns: int, waited_until_ns: int | None) -> int:
        """Returns when backward of the step has begun, and forgets the passes. ``waited_until_ns``: on a device,
        forward ends for the ranks when everything that it reads has arrived."""
        start_ns = waited_until_ns or self._end_ns or now_ns
        if self._end_ns and self._starts_ns:
            self._trace.span("forward", min(self._starts_ns.values()), start_ns)
        if isinstance(began := self._end_ns or now_ns, Stamp):
            start_ns = Stamp.at(start_ns, began.event)
        self._starts_ns, self._end_ns = {}, 0
        return start_ns


class StepCycle:
    """The listener of the gradients (GradientHooks), and the owner of pending tensors (pending.Owner). ``ddp_reduces``:
    DDP does, for a while (handover.py). ``awaits_in_backward``: it waits for the gradients, and ``step()`` is the
    optimizer's own."""

    def __init__(
        self,
        steps: OptimizerSteps,
        controller: PlanLoop,
        consistency: RankConsistency,
        progress: Progress,
        guard: FailureGuard,
        warn_once: Callable[..., None],
    ) -> None:
        self.steps, self.gradients, self.controller = steps, steps.gradients, controller
        self.consistency, self.progress, self.guard = consistency, progress, guard
        self.trace, self.waits = controller.meter.trace, steps.waits
        self.reads = WarmupReads(controller, steps)
        self.forward_time = ForwardTime(self.trace, warn_once)
        self.lock = threading.RLock()
        self.ddp_reduces = False
        self.awaits_in_backward = True  # until ``intercept_steps``
        self._iteration = 0  # the engine's number of the open one
        self._late: list[ParameterState] = []  # whose updates ran only when backward began

    def flush(self, limit_s: float | None = None) -> None:
        """See TrainingSession. On a device, updates may still run on the current stream afterwards."""
        with self.lock, self.gradients.exchange.waiting_at_most(limit_s):
            self.reach_fence()

    def reach_fence(self) -> bool:
        """See TrainingSession."""
        with self.guard.leaving(), self.lock, self.waits.at(Cause.COMPLETION):
            is_complete = self.complete()
            if is_complete:
                self.gradients.exchange.wait_until_idle()
                if self.gradients.clipping is not None:
                    self.gradients.clipping.check_last_certificate()
            return is_complete
        return True  # nothing is in flight

    def complete(self) -> bool:
        """Waits for the open gradients and runs all pending updates. Returns whether everything is complete. A backward
        pass that runs, on another thread or around a signal handler that calls this, continues; its gradients are not
        for the caller yet."""
        self.controller.meter.interrupted = True
        self.steps.complete_all_updates()
        self.reads.completed()
        passes, is_open = self.gradients.passes, self.gradients.open
        if passes.running != NO_TASK or (is_open and passes.goes_on):
            return False
        if is_open:
            self.use_gradients()
        return True

    # --- Owner of pending tensors ---

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        with self.guard.leaving(), self.lock:
            updating = self.steps.updating
            if updating:  # by this thread, since it has the lock
                tensors = [each for each in tensors if self.gradients.table.of(each) not in updating]
                if not tensors:
                    return
            used: list[ParameterState] = []
            for tensor in tensors:
                changing = self.steps.parameters_changing(tensor)
                used += [self.gradients.table.of(tensor)] if changing is None else changing
            due = [state for state in used if state.is_update_due]
            if due:
                self.steps.stream.on_parameter_read()
                with self.waits.at(_cause(tensors[0], self.gradients.table.of(tensors[0]))):
                    self.steps.complete_updates(due)
            if self.steps.clipping.is_norm_missing and self.steps.due:
                with self.waits.at(Cause.GRADIENTS_AFTER_STEP):
                    self.steps.complete_all_updates()
            if any(pending.is_pending(each) and self.steps.parameters_changing(each) is None for each in tensors):
                self.gradients.passes.refuse_inside()
                with self.waits.at(Cause.GRADIENTS):
                    self.use_gradients()

    def zero_later(self, tensor: torch.Tensor) -> bool:
        with self.lock:
            state = self.gradients.table.of(tensor)
            if state is None or not state.is_update_due or tensor is not state.visible_grad:
                return False
            state.zero_after_update = True
            return True

    def gradient_read(self, tensor: torch.Tensor, *, zeroing: bool) -> None:
        """Waits if this rank has not used the parameter: only its arrived gradient shows whether it has one. While
        another thread updates the parameter, ``.grad`` is the input of the optimizer."""
        if zeroing and not self.steps.updating:
            return
        with self.lock:
            state = self.gradients.table.of(tensor)
            if state is not None and state.locally_unused is not None and not zeroing:
                self.resolve([tensor])

    # --- Backward (called by GradientHooks) ---

    @property
    def sends(self) -> bool:
        """False while DDP reduces the gradients, and after a failure that ends the session."""
        return not self.guard.has_failed and not self.ddp_reduces

    def reduces(self, forward: ForwardPass | None) -> bool:
        """Returns whether the running backward pass is reduced. ``forward``: whose output it goes through, if known."""
        return self.sends and self.progress.no_sync_blocks.reduces(forward)

    def signature(self, fingerprint: int, forward: ForwardPass | None) -> Sequence[float]:
        """The signature of a backward pass that begins (rank_consistency.py). ``fingerprint``: of the parameters."""
        # A device's values are not read. In hook mode only the program knows when it updates: passes are not counted.
        if self.gradients.exchange.on_device:
            fingerprint = self.progress.steps if self.controller.proposer.mode == "overlap" else self._iteration
        return self.consistency.begin_pass(self._iteration, fingerprint, forward)

    def on_backward_begin(self) -> None:
        """Opens an iteration: the first gradient of a step exists."""
        if self.guard.has_failed:  # while it waited for gradients of the previous pass
            return
        with self.guard.reporting(), self.lock:
            now_ns, controller, weights = self.trace.now(), self.controller, self.gradients.weights
            graph_capture.refuse_capture(controller.group.device)
            self.progress.fence.refuse("backward()")
            self.stop_watching_reads()
            self.forward_time.warn_if_unseen()
            # As far as gradcast saw, forward has not read these. If it has after all, their gradients show it.
            self._late += self.steps.due
            for state in self._late:
                state.updated_late = True
            self.steps.on_backward_begin()
            start_ns = self.forward_time.take(now_ns, self._host_waited_until_ns())
            weights.receive()
            states, last = self.gradients.states, weights.last
            change_layout(
                states,
                self.gradients.exchange,
                lambda: controller.begin_iteration(start_ns, last),
                tells=controller.group.rank == 0,
            )
            self.intercept_steps()
            measuring, on_baseline = controller.warmup is not None, controller.phase.on_baseline
            counts = controller.proposer.mode == "overlap" and not on_baseline
            self.waits.begin_step(now_ns, measuring=measuring, counts=counts)
            self.consistency.check()
            weights.begin_step(len(states))
            self._iteration = self.gradients.exchange.begin()
            plan, profile = self.gradients.exchange.plan, self.gradients.exchange.profile
            self.trace.begin(StepRecord(self.progress.steps, self._iteration, plan, profile, start_ns))

    def intercept_steps(self) -> None:
        """Takes ``step()`` over, but not in hook mode, nor while the plan loop rests, unless gradcast clips in it."""
        rests = self.controller.rests and not self.steps.clipping.kinds
        before, self.awaits_in_backward = self.awaits_in_backward, rests or self.controller.proposer.mode == "hook"
        if before and not self.awaits_in_backward:
            self.steps.intercept(self.on_step, self.flush, lambda: self.lock)
        elif self.awaits_in_backward and not before:
            self.steps.leave()

    def _host_waited_until_ns(self) -> int | None:
        """Waits for blocks still in flight: forward needed none of their tensors, or on a device they may stay in
        flight unless their times count. Returns the end of the wait; None without such blocks."""
        start_ns, exchange = time.perf_counter_ns(), self.gradients.exchange
        times_blocks = self.controller.phase.times_blocks
        if not (exchange.wait_until_idle() if times_blocks else exchange.wait_for_turn()):
            return None
        end_ns = time.perf_counter_ns()
        self.trace.span("wait", start_ns, end_ns)
        return end_ns

    @property
    def times_gradients(self) -> bool:
        """True if ``on_gradient_sent`` must be called for each gradient."""
        return self.controller.warmup is not None

    def on_gradient_sent(self, index: int, *, used: bool, together_with: int | None = None) -> None:
        """Notes that a gradient, or a tensor sent with them, is in the buffer. ``used``: backward has made it.
        ``together_with``: the first of those that it has made at the same time."""
        if self.controller.warmup is not None:
            self.controller.warmup.stopwatch.ready(index, used=used, together_with=together_with)

    def on_backward_end(self) -> None:
        """Ends a backward pass: all gradients of the step have been sent."""
        with self.guard.leaving(), self.lock:
            self.progress.no_sync_blocks.on_reduced()
            now_ns = self.trace.now()
            self.steps.stream.follow_caller()  # autograd calls this on the stream of backward()
            self.trace.span("backward", self.trace.current.start_ns, now_ns)
            if self.controller.warmup is not None:
                self.controller.warmup.stopwatch.backward_ended()
            if self.consistency.is_comparison_due(self._iteration):
                self.gradients.exchange.wait_all()
                self.consistency.compare_ranks(self._iteration)
                self.use_gradients()
            if self.awaits_in_backward:
                self._await_gradients(now_ns)
                self._end_step()

    def on_backward_failure(self) -> None:
        """Notes that the backward pass of the open step has failed before all gradients existed."""
        self.consistency.on_backward_failure(self._iteration)

    def wait_for_gradients(self) -> None:
        """Waits until all gradients of the open step have arrived."""
        graph_capture.refuse_capture(self.controller.group.device)
        # Gradients that were used have arrived, and the wait for them is counted there.
        used = self.gradients.values_used
        counted = contextlib.nullcontext() if used else self.waits.at(Cause.SECOND_BACKWARD, in_forward=True)
        with self.guard.reporting(), self.lock, counted, self.trace.timed("wait"):
            self.gradients.wait_for_all()
            self.steps.clipping.clip_asked()
        if self.guard.has_failed:
            self.gradients.open = False

    def stop_watching_reads(self) -> None:
        """Ends the watch: reads of parameters are no longer those of forward, or of the loop."""
        self.reads.stop()

    # --- step() ---

    def on_step(self, number: int) -> None:
        """Handles ``step()`` of this optimizer, in place of the update."""
        with self.lock:
            self.steps.complete_updates_of(number)  # by a second step() with the same gradients
            has_ended = self.gradients.open and self._take_gradients(number)
            if has_ended:
                self._end_step()
            elif not self.gradients.open:
                self.steps.run_whole(number)
            with _measured(self.controller, "update"):
                self.steps.call_back()
            if has_ended:
                self.reads.loop_begins()

    def _take_gradients(self, number: int) -> bool:
        if self.controller.warmup is None:
            return self.steps.take_gradients(number, synchronous=self.controller.phase.on_baseline)
        with self.reads.around_step(number):
            self._await_gradients(self.trace.now())
            warmup = self.controller.warmup
            with _measured(self.controller, "update"):
                ended = self.steps.take_gradients(number, synchronous=True, parts=warmup.update_parts)
            warmup.stopwatch.updated_in(self.trace.current.update_calls)
            return ended

    def use_gradients(self) -> None:
        """Waits for gradients that the program uses between backward and ``step()``, and clips if requested."""
        self._await_gradients(self.trace.now())
        self.gradients.values_used = True
        self.steps.clipping.clip_asked()

    def _await_gradients(self, start_ns: int) -> None:
        """Waits after backward. This never counts as compute, whether gradcast or the program needs the gradients."""
        # Wherever gradients are used first, the stream that computes is ordered behind them as well.
        with _measured(self.controller, "wait"), self.steps.stream.entered(), default_context():
            self.gradients.wait_for_all()
        self.trace.span("wait", start_ns, self.trace.now())

    def _end_step(self) -> None:
        self.gradients.open = False
        self.progress.steps += 1
        clipping = self.gradients.clipping
        sentence = None if clipping is None else clipping.record.sentence_once()
        if sentence is not None:
            self.controller.group.info("%s", sentence)
        self.forget_late_updates()  # also for a module that is trained by another method, whose forward is not seen

    def forget_late_updates(self) -> None:
        """Forgets late updates: forward reads current values from now on."""
        for state in self._late:
            state.updated_late = False
        self._late.clear()


def _cause(tensor: torch.Tensor, state: ParameterState | None) -> Cause:
    """The kind of use of this tensor, whose update is pending. ``state``: of its parameter; None if it is of an
    optimizer's state."""
    if state is None:
        return Cause.STATE
    return Cause.GRADIENTS_AFTER_STEP if tensor is state.visible_grad else Cause.PARAMETERS


def _measured(controller: PlanLoop, category: str) -> contextlib.AbstractContextManager[Any]:
    """Context around work that is not compute in the sense of a profile; ``category``: see Stopwatch.timed."""
    warmup = controller.warmup
    return contextlib.nullcontext() if warmup is None else warmup.stopwatch.timed(category)
