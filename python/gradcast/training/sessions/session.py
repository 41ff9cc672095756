"""A session of two or more workers. The way of one gradient, in overlap mode:

 1. step/gradient_hooks.py     A hook behind the gradient that autograd has made scales it: in ordinary steps, up to 5,
                               that of csrc/transport/torch/accumulation_hooks.cc.
 2. step/gradient_buffers.py   It lies in a flat buffer.
 3. step/parameter_state.py    The parameter's phase is TRAVELLING from now on.
 4. step/pending.py            Its ``.grad`` is pending: any use of it waits.
 5. step/gradient_exchange.py  The engine learns that the gradient is ready, and sends blocks in the order of the plan.
 6. plan/loop.py               The plan is one of the warm-up, the agreed one, or the DDP baseline.
 7. step/optimizer_steps.py    ``step()`` returns at once, and the updates are due.
 8. step/optimizer_state.py    Until they run, parameters and the optimizer's state are pending, too.
 9. step/pending.py            The next forward pass reads the parameter and waits for the blocks with its gradient.
10. step/partial_step.py       Then the user's optimizer updates it, with all others whose gradients have arrived.

In hook mode the session waits for all gradients where backward ends, and ``step()`` is the optimizer's own.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradcast.training.measure.early_waits import Cause, where
from gradcast.training.measure.step_trace import Stamp, StepRecord
from gradcast.training.sessions.base import SessionBase
from gradcast.training.sessions.kinds import Setup
from gradcast.training.step import parameter_state, pending, residuals
from gradcast.training.step.backward_passes import NO_TASK
from gradcast.training.step.early_clipping import EarlyClipping
from gradcast.training.step.gradient_listener import ForwardPass
from gradcast.training.step.module_buffers import WHAT
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.partial_step import default_context
from gradcast.training.step.weights import GivenWeights


def is_evaluation(module: nn.Module) -> bool:
    """Whether a forward pass of the module that begins now is one of evaluation."""
    return not module.training and not torch.is_grad_enabled()


class Session(SessionBase):
    """The owner of pending parameters and gradients, too (pending.Owner, gradient_listener.Listener)."""

    def __init__(self, setup: Setup, parameters: dict[str, nn.Parameter], given: GivenWeights) -> None:
        """See SessionBase."""
        super().__init__(setup, parameters, given)
        options = setup.options
        self.ddp_reduces = False  # inside ddp.join()
        self._iteration = 0  # the engine's number of the open one
        self._forward_start_ns: dict[int, int] = {}  # by id of a module: start of its last forward pass
        self._forward_end_ns = 0  # of the last forward pass
        self._forward_seen = False  # the module's own forward was called
        self._late: list[ParameterState] = []  # whose updates ran only when backward began
        if options.clips:
            self.early_clipping = EarlyClipping(options, self._steps, self._lock, self._use_gradients)
        self._handles = self._gradients.install(self)
        if self.buffers.residuals:
            self._handles.append(residuals.refuse_scalers_of(parameters.values(), self))
        self._steps.intercept(self._on_step, self.flush, lambda: self._lock)

    # --- For the handle (TrainingSession) ---

    def flush(self, limit_s: float | None = None) -> None:
        """On a device, updates may still run on the current stream afterwards; no block travels any more."""
        with self._lock, self.exchange.waiting_at_most(limit_s):
            self.reach_fence()

    def reach_fence(self) -> bool:
        with self._lock, self._waits.at(Cause.COMPLETION):
            is_complete = self._complete_step()
            if is_complete:
                self.exchange.wait_until_idle()
                if self._gradients.clipping is not None:
                    self._gradients.clipping.check_last_certificate()
            return is_complete

    def finish(self, limit_s: float | None = None) -> None:
        self.flush(limit_s)
        self.controller.log_comparison()

    def complete_due_updates(self) -> None:
        with self._lock:
            self._steps.complete_all_updates()

    def due_names(self) -> list[str]:
        with self._lock:
            return [state.name for state in self._steps.due]

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        self.flush()
        with self.exchange.watch.waiting(f"{WHAT} from rank 0"):
            super().send_buffers(buffers)
        if self._module_buffers is not None:
            self._module_buffers.on_sent()

    def close_at_exit(self, *, failed: bool) -> None:
        if not self.released:
            self._close_exchange(self.exchange, None if failed else self._finish_at_exit)

    def _finish_at_exit(self) -> bool:
        self.finish()
        return True

    # --- For the attachment ---

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [state.parameter for state in self._states]

    @property
    def long_frozen(self) -> set[int]:
        """Ids of parameters that have been frozen on all ranks for so long that they need not travel; the same on every
        rank."""
        return self._gradients.arrived.long_frozen

    def send_nothing(self) -> None:
        """Takes part in a step without a backward pass of this rank's."""
        with self._lock:
            self._gradients.send_nothing()

    @property
    def lock(self) -> threading.RLock:
        """Held while an optimizer has the parameter groups of a part."""
        return self._lock

    def leave_reduction_to_ddp(self, leave: bool) -> None:
        """``leave``: from now on DDP reduces the gradients itself. Otherwise gradcast does so again."""
        self.flush()
        self._gradients.forget_unsynchronized()
        self.ddp_reduces = leave

    def complete_step(self) -> None:
        """Waits for the open gradients and runs all due updates. torch.jit.trace() does not record that."""
        with self._lock, pending.not_traced():
            self._complete_step()

    def _complete_step(self) -> bool:
        """Returns whether everything is complete. A backward pass that runs goes on, on another thread or around a
        signal handler that calls this; its gradients are not for the caller yet."""
        self.controller.meter.interrupted = True
        self._steps.complete_all_updates()
        self._reads.completed()
        if self._gradients.passes.running != NO_TASK:
            return False
        if self._gradients.open:
            self._use_gradients()
        return True

    def abandon(self) -> None:
        """In a forked child, nothing waits any more."""
        self._lock = threading.RLock()
        parameter_state.release(self._states)
        self.released = True

    def release(self, *, leaves: bool, reusable: bool = False) -> None:
        """Removes gradcast from the module and its optimizers, and gradients from the buffers. ``leaves``: no other
        session of this module follows. ``reusable``: see Group.leave."""
        self.controller.release()
        if self._unseen is not None:
            self._unseen.release()
        self._unseen = None  # this session, which a handle keeps, must not keep the module
        self._steps.release()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._module_buffers is not None:
            self._module_buffers.release()
        parameter_state.release(self._states)
        self._states.clear()
        self._table.release()  # any reference of ours to a view would look like one of the program's
        try:
            self.buffers.move_out()  # needs memory
        finally:
            self.exchange.shutdown()
        if leaves:
            self.group.leave(reusable=reusable)
        self.released = True

    # --- Owner of pending tensors ---

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        with self._lock:
            updating = self._steps.updating
            if updating:  # by this thread, since it has the lock
                tensors = [each for each in tensors if self._table.of(each) not in updating]
                if not tensors:
                    return
            used: list[ParameterState] = []
            for tensor in tensors:
                changing = self._steps.parameters_changing(tensor)
                used += [self._table.of(tensor)] if changing is None else changing
            due = [state for state in used if state.is_update_due]
            if due:
                self._steps.stream.on_parameter_read()
                with self._waits.at(self._cause(tensors[0])):
                    self._steps.complete_updates(due)
            if self._steps.must_clip_first:
                with self._waits.at(Cause.GRADIENTS_AFTER_STEP):
                    self._steps.complete_all_updates()
            if any(pending.is_pending(each) and self._steps.parameters_changing(each) is None for each in tensors):
                self._gradients.refuse_inside_backward()
                with self._waits.at(Cause.GRADIENTS):
                    self._use_gradients()

    def _cause(self, tensor: torch.Tensor) -> Cause:
        """What a use of this tensor is, whose update is due."""
        state = self._table.of(tensor)
        if state is None:
            return Cause.STATE
        return Cause.GRADIENTS_AFTER_STEP if tensor is state.visible_grad else Cause.PARAMETERS

    def zero_later(self, tensor: torch.Tensor) -> bool:
        with self._lock:
            state = self._table.of(tensor)
            if state is None or not state.is_update_due or tensor is not state.visible_grad:
                return False
            state.zero_after_update = True
            return True

    def gradient_read(self, tensor: torch.Tensor, *, zeroing: bool) -> None:
        """If this rank has not used the parameter, whether it has a gradient is known when that has arrived. While
        another thread updates the parameter, ``.grad`` is what the optimizer is given."""
        if zeroing and not self._steps.updating:
            return
        with self._lock:
            state = self._table.of(tensor)
            if state is not None and state.locally_unused is not None and not zeroing:
                self.resolve([tensor])

    # --- Backward (gradient_listener.Listener) ---

    @property
    def sends(self) -> bool:
        return not self.ddp_reduces

    @property
    def is_synchronizing(self) -> bool:
        """Whether a forward pass that runs now is to be reduced."""
        return self.sends and not self.no_sync_blocks.is_open

    def reduces(self, forward: ForwardPass | None) -> bool:
        return self.sends and self.no_sync_blocks.reduces(forward)

    def signature(self, fingerprint: int, forward: ForwardPass | None) -> Sequence[float]:
        # A device's values are not read. In hook mode only the program knows when it updates: no pass counts on there.
        if self.exchange.on_device:
            fingerprint = self.steps if self.mode == "overlap" else self._iteration
        return self._consistency.begin_pass(self._iteration, fingerprint, forward)

    def on_backward_begin(self) -> None:
        with self._lock:
            now_ns = self.trace.now()
            self._refuse_capture()
            self.fence.refuse("backward()")
            self.stop_watching_reads()
            self._warn_if_forward_unseen()
            # As far as gradcast saw, forward has not read these. If it has after all, their gradients show it.
            self._late += self._steps.due
            for state in self._late:
                state.updated_late = True
            self._steps.on_backward_begin()
            # On a device, forward ends for the ranks when all that it reads has arrived.
            start_ns = self._host_waited_until_ns() or self._forward_end_ns or now_ns
            if self._forward_end_ns and self._forward_start_ns:
                self.trace.span("forward", min(self._forward_start_ns.values()), start_ns)
            if isinstance(began := self._forward_end_ns or now_ns, Stamp):
                start_ns = Stamp.at(start_ns, began.event)
            self._weights.receive()
            weights = self._weights.last
            self._change_layout(lambda: self.controller.begin_iteration(start_ns, weights))
            measuring, on_baseline = self.controller.warmup is not None, self.controller.phase.on_baseline
            self._waits.begin_step(now_ns, measuring=measuring, counts=self.mode == "overlap" and not on_baseline)
            self._consistency.check()
            self._weights.begin_step(len(self._states))
            self._iteration = self.exchange.begin()
            plan, profile = self.exchange.plan, self.exchange.profile
            self.trace.begin(StepRecord(self.steps, self._iteration, plan, profile, start_ns))
            self._forward_start_ns, self._forward_end_ns = {}, 0

    @property
    def times_gradients(self) -> bool:
        return self.controller.warmup is not None

    def on_gradient_sent(self, index: int, *, used: bool) -> None:
        if self.controller.warmup is not None:
            self.controller.warmup.stopwatch.ready(index, used=used)

    def on_backward_end(self) -> None:
        with self._lock:
            self.no_sync_blocks.on_reduced()
            now_ns = self.trace.now()
            self._steps.stream.follow_caller()  # autograd calls this on the stream of backward()
            self.trace.span("backward", self.trace.current.start_ns, now_ns)
            if self.controller.warmup is not None:
                self.controller.warmup.stopwatch.backward_ended()
            if self._consistency.is_comparison_due(self._iteration):
                self.exchange.wait_all()
                self._consistency.compare_ranks(self._iteration)
                self._use_gradients()
            if self.mode == "hook":
                self._await_gradients(now_ns)
                self._end_step()

    def on_backward_failure(self) -> None:
        self._consistency.on_backward_failure(self._iteration)

    def wait_for_gradients(self) -> None:
        self._refuse_capture()
        # Gradients that were used have arrived, and what that has waited is counted there.
        used = self._gradients.values_used
        counted = contextlib.nullcontext() if used else self._waits.at(Cause.SECOND_BACKWARD, in_forward=True)
        with self._lock, counted, self.trace.timed("wait"):
            self._gradients.wait_for_all()
            self._steps.clip_asked()

    def stop_watching_reads(self) -> None:
        self._reads.stop()

    # --- Forward ---

    def before_forward(self, module: nn.Module, compiled: bool) -> None:
        """``module``: that is called. ``compiled``: as a whole, and not split."""
        self._forward_seen = True
        training = module.training and torch.is_grad_enabled()
        if compiled and training and self.mode == "overlap" and self.controller.warmup is None:
            # Compiled code has fixed the class of its parameters, so nothing shows which of them it reads.
            self._warn_once(
                "%s: the model is compiled as a whole, so its forward pass waits for all parameters; pass "
                "gradcast.Options(split_compiled=True) (and torch.compile no fullgraph=True), or compile its blocks "
                "(block.compile()), so that communication overlaps with it",
                where(),
            )
        self.stop_watching_reads()  # of the loop
        if compiled or torch.jit.is_tracing():
            with self._waits.at(Cause.COMPILED if compiled else Cause.COMPLETION):
                self.complete_step()
        if self.mode == "overlap":
            self._unseen.before_forward(self.controller.unseen_reads, training)
        if training:
            self._refuse_capture()
        if torch.is_grad_enabled():
            self._gradients.before_forward()
        in_backward = torch._C._current_graph_task_id() != -1  # checkpoints run forward again
        if not in_backward:
            self._forget_late_updates()
        self._forward_start_ns[id(module)], self._forward_end_ns = time.perf_counter_ns(), 0
        if not is_evaluation(module) and not in_backward and self._module_buffers is not None:
            self._bring_buffers(module)
        if training:
            self._reads.forward_begins(compiled=compiled)
        self._waits.forward_begins()
        if is_evaluation(module):
            self.before_evaluation()

    def before_evaluation(self) -> None:
        """Nothing stays pending: if a weight were, nn.MultiheadAttention and TransformerEncoder would choose other
        kernels, with other roundings, and other values at masked places."""
        with self._lock, self._waits.at(Cause.PARAMETERS):
            self._reads.completed()
            if self._steps.due:
                self._steps.stream.on_parameter_read()
                self._steps.complete_all_updates()

    def _bring_buffers(self, module: nn.Module) -> None:
        """Rank 0's buffers, for the forward pass that begins."""
        with self._lock, self.trace.timed("wait"), pending.not_traced():
            if self._gradients.open and not self._gradients.all_sent:
                self._gradients.wait_for_all()  # the pass has failed, and other ranks wait for what it has not sent
            needed = self._gradients.passes.is_expected(module)
            synchronizing = self.is_synchronizing and torch.is_grad_enabled()
            self._module_buffers.before_forward(module, synchronizing=synchronizing, needed=needed)

    def before_borrowed_forward(self, module: nn.Module) -> None:
        """``module`` is called with other tensors in place of its own."""
        if self._module_buffers is not None and torch._C._current_graph_task_id() == -1:
            self._module_buffers.before_borrowed_forward(module)

    def after_borrowed_forward(self, module: nn.Module, output: Any) -> None:
        self._watch_output(module, output)
        if self._module_buffers is not None and torch._C._current_graph_task_id() == -1:
            self._module_buffers.after_borrowed_forward(module)

    def after_forward(self, module: nn.Module, output: Any) -> None:
        self._forward_end_ns = self.trace.now()
        if self.controller.warmup is not None:
            self.controller.warmup.forward_ended(output)
        self._watch_output(module, output)

    def after_inner_forward(self, inner: nn.Module, output: Any) -> None:
        """``inner`` was called past DDP, which does not reduce the backward pass through this output."""
        self._gradients.watch_output(inner, output, ForwardPass(synchronizes=False, training=inner.training))

    def _watch_output(self, module: nn.Module, output: Any) -> None:
        forward = ForwardPass(synchronizes=not self.no_sync_blocks.is_open, training=module.training)
        self._gradients.watch_output(module, output, forward)

    def _warn_if_forward_unseen(self) -> None:
        if not self._forward_seen:
            self._warn_once(
                "this backward pass comes from another method of the module than forward, where buffers are sent to "
                "all ranks and new parameters are noticed; call the module itself: module(...)"
            )
        self._forward_seen = True

    # --- step() ---

    def _on_step(self, number: int) -> None:
        with self._lock:
            self._steps.complete_updates_of(number)  # by a second step() with the same gradients
            has_ended = self._gradients.open and self._take_gradients(number)
            if has_ended:
                self._end_step()
            elif not self._gradients.open:
                self._steps.run_whole(number)
            with self._measured("update"):
                self._steps.call_back()
            if has_ended:
                self._reads.loop_begins()

    def _take_gradients(self, number: int) -> bool:
        if self.controller.warmup is None:
            return self._steps.take_gradients(number, synchronous=self.controller.phase.on_baseline)
        with self._reads.around_step(number):
            self._await_gradients(self.trace.now())
            warmup = self.controller.warmup
            with self._measured("update"):
                ended = self._steps.take_gradients(number, synchronous=True, parts=warmup.update_parts)
            warmup.stopwatch.updated_in(self.trace.current.update_calls)
            return ended

    def _use_gradients(self) -> None:
        """The program uses gradients between backward and ``step()``."""
        self._await_gradients(self.trace.now())
        self._gradients.values_used = True
        self._steps.clip_asked()

    def _await_gradients(self, start_ns: int) -> None:
        """Waits after backward. This never counts as compute, whether gradcast or the program needs the gradients."""
        # Wherever gradients are used first, the stream that computes is ordered behind them as well.
        with self._measured("wait"), self._steps.stream.entered(), default_context():
            self._gradients.wait_for_all()
        self.trace.span("wait", start_ns, self.trace.now())

    def _end_step(self) -> None:
        self._gradients.open = False
        self.steps += 1
        sentence = None if self._clipping is None else self._clipping.sentence_once()
        if sentence is not None:
            self.group.info("%s", sentence)
        self._forget_late_updates()  # also for a module that is trained by another method, whose forward is not seen

    def _forget_late_updates(self) -> None:
        """What forward reads from now on is up to date."""
        for state in self._late:
            state.updated_late = False
        self._late.clear()
