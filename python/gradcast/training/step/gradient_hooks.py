"""From autograd to the network: each gradient goes into the buffer and is pending until it has arrived.

Hooks in C++ do that (gradient_table.h). Python is called for the first gradient of a pass, which opens the step, where
backward ends, and for unusual gradients: ``_on_gradient``.

Meanwhile ``.grad`` is the view of the buffer; or, for a gradient that the program keeps, the tensor that autograd has
made, into which the sum is copied when it arrives (gradient_buffers.py, "separate").

A parameter that gets no gradient in a backward pass contributes its ``.grad``, or zero, and the step message says that
this rank has not used it. If no rank has, ``.grad`` stays what it was, as with DDP's find_unused_parameters.

Thread safety: hooks run on autograd's threads, one backward pass at a time; everything else under the session's lock.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradcast.errors import refused
from gradcast.training.compat import extension, interrupts
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.arrived_gradients import ArrivedGradients
from gradcast.training.step.backward_passes import NO_TASK, BackwardPasses, ForwardPass, current
from gradcast.training.step.clipping import NormClipping
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.module_buffers import ModuleBuffers
from gradcast.training.step.parameter_state import (
    LocallyUnused,
    ParameterState,
    second_gradient,
    stale_read,
    used_inside_backward,
)
from gradcast.training.step.partial_step import default_context
from gradcast.training.step.rank_consistency import RankConsistency
from gradcast.training.step.step_message import StepMessage
from gradcast.training.step.weights import StepWeights


class _BackwardEnd:
    """The callback for the end of the backward pass ``task``; autograd drops it uncalled if the pass has failed."""

    def __init__(self, gradients: "GradientHooks", task: int) -> None:
        self._gradients, self._task, self._is_called = gradients, task, False

    def __call__(self) -> None:
        self._is_called = True
        self._gradients._on_backward_end(self._task)

    def __del__(self) -> None:
        if not self._is_called:
            self._gradients._on_backward_failure(self._task)


class GradientHooks:
    """The gradients of a session, with its ``table`` (a GradientTable), ``exchange``, ``weights`` and ``clipping``.

    ``open``: gradients of a step exist that no optimizer has taken yet. ``values_used``: the program has read them.
    ``used_unsynchronized``: parameters that backward passes inside no_sync() have used.
    """

    def __init__(
        self,
        states: Sequence[ParameterState],
        table: Any,
        exchange: GradientExchange,
        message: StepMessage,
        weights: StepWeights,
        clipping: NormClipping | None,
        module_buffers: ModuleBuffers | None,
        consistency: RankConsistency,
    ) -> None:
        """``module_buffers``: those that are sent with the gradients."""
        self.states, self.table = states, table
        self.exchange, self.weights, self.clipping = exchange, weights, clipping
        self.message, self._module_buffers = message, module_buffers
        self.passes = BackwardPasses()
        self._hooked_by_program: list[ParameterState] = []
        self.used_unsynchronized: set[int] = set()
        self.open = False
        self.values_used = False
        self.arrived = ArrivedGradients(table, exchange, message, weights, consistency)

    def install(self, listener: Any) -> list[Any]:
        """Hooks every parameter. Returns the handles that remove the hooks. ``listener``: the session's StepCycle."""
        self._listener = weakref.ref(listener)  # a parameter must not keep its session alive
        norm_type = None if self.clipping is None else self.clipping.norm_type
        self.exchange.install_hooks(norm_type, WeakHook(self._on_gradient), WeakHook(self._on_placed))
        return [self.table]

    def before_forward(self) -> None:
        """Finds post-accumulate hooks of the program, whenever those were registered. They run before ours: they see
        this rank's gradient, as with DDP, and may keep it."""
        for state in self._hooked_by_program:
            state.forward_version = None
        found = self.table.refresh()
        # Once the program has removed its hooks, {} remains; None, if they are C++.
        self._hooked_by_program = [each for each in found if each.parameter._post_accumulate_grad_hooks != {}]
        self.exchange.buffers.keep_apart(state.index for state in self._hooked_by_program)

    def watch_output(self, module: nn.Module, output: Any, forward: ForwardPass) -> None:
        """Watches the output of a forward pass of ``module`` for the start of backward."""
        for state in self._hooked_by_program:
            state.forward_version = None if state.is_update_due else state.parameter._version
        self.passes.watch_output(module, output, WeakHook(self._on_backward_start, forward))

    def are_in_place(self, states: Sequence[ParameterState]) -> bool:
        """Returns whether ``.grad`` of each is the tensor that backward has put there, not one of the program's."""
        apart = self.exchange.buffers.apart
        native = extension.load()
        if not native.hold_visible(states):
            return False
        return self.exchange.buffers.are_in_place(
            None if not apart else [e.index for e in states if e.index not in apart]
        )

    def wait_for_all(self) -> None:
        """Waits until all gradients of this step have arrived, after sending those that backward has not made."""
        if not self.all_sent:
            self.passes.refuse_inside()
            self.passes.refuse_elsewhere()
            # The pass has failed. Complete the ranks' operations, and report to the others that this is no sum.
            failed = bool(self.table.idle())
            if failed:
                self.listener.on_backward_failure()
            self._send_missing(failed=failed)
        self.exchange.wait_all()
        with interrupts.after_this(), default_context():
            self.arrived.settle(self.states)

    @property
    def listener(self) -> Any:
        return self._listener()

    @property
    def all_sent(self) -> bool:
        """False after a backward pass that has failed."""
        others_sent = self.message.is_written and (self._module_buffers is None or self._module_buffers.is_written)
        return others_sent and self.table.sent_count == len(self.states)

    def _on_backward_start(self, forward: ForwardPass, _: torch.Tensor) -> None:
        listener, passes = self.listener, self.passes
        if listener is None or not passes.goes_through(forward):
            return
        reduces, task = passes.reduces(listener, forward), current()
        if task == passes.running:
            return
        listener.stop_watching_reads()
        if reduces:
            self.passes.await_end(task, _BackwardEnd(self, task))
            self._keep_accumulated_apart()
        if self.open and not passes.goes_on:
            # A second backward pass before step(): autograd adds to these gradients, so they must have arrived.
            listener.wait_for_gradients()

    def _on_gradient(self, index: int) -> None:
        state = self.states[index]
        if state.is_update_due or state.updated_late:
            raise stale_read(state)
        if state.forward_version is not None and state.parameter._version != state.forward_version:
            raise used_inside_backward(state)
        if not self.passes.reduces(self.listener, self.passes.forward):
            if self.open:
                _refuse_second(state)
            self.used_unsynchronized.add(state.index)
            return
        if state.parameter.grad is None:
            if state.parameter._post_accumulate_grad_hooks:
                raise used_inside_backward(state)
            return  # a function has returned None as this gradient, as if the pass had not reached the parameter
        is_idle = state.phase == extension.load().Phase.IDLE
        if not self.open or not is_idle or self.passes.running != self.passes.opened:
            self._begin_step(state)
            if not self.open:
                return  # the listener has given the step up
        self._place(state)

    def _begin_step(self, first: ParameterState) -> None:
        goes_on = self.open and self.passes.goes_on
        if self.open and not goes_on:
            _refuse_second(first)
            self.listener.wait_for_gradients()
        if self.passes.running == NO_TASK:
            self.passes.await_end(current(), _BackwardEnd(self, current()))
        if goes_on:
            self.passes.opened = self.passes.running
        else:
            self._open_step(first)
        if not self.open:
            return
        self.passes.opened_at(first.parameter)
        special = self.exchange.buffers.apart.union(state.index for state in self._hooked_by_program)
        # Gradients sent without Python must not be used before backward has ended.
        pending.mark(self.table.arm(self.passes.running, list(special), self.weights.scale), self.listener)

    def send_nothing(self) -> None:
        """Makes a step without backward on this rank, like a pass that reaches no parameter."""
        if self.open:
            self.listener.wait_for_gradients()
        self.passes.running = self.passes.ended = NO_TASK
        with torch.no_grad():
            self._keep_accumulated_apart()
            self._open_step()
            self._send_missing()
            self.passes.end()
            self.listener.on_backward_end()

    def _open_step(self, first: ParameterState | None = None) -> None:
        """Opens a step. ``first``: its first gradient."""
        listener = self.listener
        listener.on_backward_begin()
        self.passes.open()
        if not listener.sends:
            return  # the failure is reported, and no gradient of this step is sent
        if self.passes.running != self.passes.checked:
            self._keep_accumulated_apart(first)
        counts = first is not None and self.weights.scale != 0
        # A rank that sends nothing counts this pass, too, so that its next signature is right.
        signature = listener.signature(self.table.fingerprint(), self.passes.forward if counts else None)
        self.message.begin_pass(signature if counts else None)
        parameter_state.begin_step(self.table, WeakHook(self._on_timed) if listener.times_gradients else None)
        self.open, self.values_used, self.arrived.any_unusual = True, False, False
        if self._module_buffers is not None and self._module_buffers.on_backward_begin():
            self._send_tensor(self._module_buffers.index, listener, used=True)

    def _on_placed(self, index: int) -> None:
        """Marks a gradient that the hooks are about to send: it was in its view before, and not pending."""
        pending.mark([self.exchange.buffers.views[index]], self.listener)

    def _on_timed(self, index: int) -> None:
        self.listener.on_gradient_sent(index, used=self.states[index].locally_unused is None)

    def _clear_unsent(self) -> None:
        """Ends the pending state of views whose gradients backward has not made, or not yet: nobody uses them."""
        self.table.disarm()
        views = self.exchange.buffers.views
        if views:  # gradcast may have left the module
            pending.clear([views[state.index] for state in self.table.idle()])

    def _keep_accumulated_apart(self, first: ParameterState | None = None) -> None:
        """Gradients accumulated by earlier passes (no_sync) that the program keeps become the mean, as with DDP.
        ``first``: a gradient that autograd may still hold, because it is about to hand it over."""
        self.passes.checked = self.passes.running
        # While the open step goes on, those that are not idle have been sent, and must not be read.
        known = self.table.idle() if self.passes.goes_on else self.table.with_gradient()
        states = [state for state in known if state.index not in self.exchange.buffers.apart]
        # Reading .grad shows whether the ranks have agreed that there is none.
        found = [state for state in states if state is not first and state.parameter.grad is not None]
        views = self.exchange.buffers.views
        # A conversion of the module (.double(), .to()) gives .grad other memory. As with DDP it stays the same tensor.
        in_views = [state.index for state in found if state.parameter.grad is views[state.index]]
        self.exchange.buffers.keep_apart(index for index in in_views if not self.exchange.buffers.are_in_place([index]))
        found = [state for state in found if state.parameter.grad is not views[state.index]]
        kept = extension.load().held_elsewhere([state.parameter.grad for state in found], 0, True) if found else []
        self.exchange.buffers.keep_apart(found[position].index for position in kept)

    def _place(self, state: ParameterState) -> None:
        """Writes the gradient into its view, divided by the number of workers like DDP does, or weighted; sends it."""
        gradient, index = state.parameter.grad, state.index
        view = self.exchange.buffers.views[index]
        if gradient is not view and (gradient.is_sparse or gradient.requires_grad):
            kind = "is sparse" if gradient.is_sparse else "has a graph of its own (create_graph=True)"
            raise refused(f"the gradient of {state.name} {kind}; gradcast needs ordinary gradients")
        if not self.exchange.buffers.are_in_place([index]):
            pending.clear([view])
            self.exchange.buffers.renew(index)
            self.exchange.views_changed()
            view = self.exchange.buffers.views[index]
        is_apart = index in self.exchange.buffers.apart
        self.arrived.any_unusual |= is_apart or state.locally_unused is not None
        pending.mark([gradient if is_apart else view], self.listener)
        if not self.table.place(index, self.weights.scale, is_apart):
            self.exchange.ready(index)  # raises network failures

    def _send_tensor(self, index: int, listener: Any, *, used: bool) -> None:
        listener.on_gradient_sent(index, used=used)
        self.exchange.ready(index)

    def _send_missing(self, *, failed: bool = False, some: Sequence[ParameterState] | None = None) -> None:
        """Sends a substitute for each gradient that backward has not made, and what is sent behind all gradients.
        ``failed``: the pass has failed. ``some``: only those of these parameters, and nothing behind them."""
        self._clear_unsent()
        for state in self.table.idle() if some is None else some:
            if failed or state.index not in self.used_unsynchronized:
                self._note_unused(state, failed)
            self._substitute(state)
            self._place(state)
            if state.locally_unused is not None:  # the parameter may turn out to have no gradient
                pending.mark([state.parameter], self.listener, gradients_known=False)
        if some is not None:
            return
        if not self.message.is_written:
            self.message.write(dict(self.table.take_norms()))  # of all gradients, which have been sent
            self._send_tensor(self.message.index, self.listener, used=True)
        if self._module_buffers is not None and self._module_buffers.on_backward_end():
            self._send_tensor(self._module_buffers.index, self.listener, used=True)
        self.used_unsynchronized.clear()

    def _substitute(self, state: ParameterState) -> None:
        """Gives ``.grad`` what this rank sends of a gradient that backward has not made."""
        if state.parameter.grad is None and state.index in self.exchange.buffers.apart:
            state.parameter.grad = torch.zeros_like(state.parameter, requires_grad=False)
        elif state.parameter.grad is None:
            state.parameter.grad = self.exchange.buffers.views[state.index].zero_()

    def _note_unused(self, state: ParameterState, failed: bool) -> None:
        gradient, view = state.parameter.grad, self.exchange.buffers.views[state.index]
        was_view = gradient is view
        state.locally_unused = LocallyUnused(view.clone() if was_view else gradient, was_view)
        if failed:
            self.message.flag_failed(state.index)
        else:
            self.message.flag_unused(state.index, frozen=not state.parameter.requires_grad)
        self.exchange.keep_residual(state.index)

    def _on_backward_failure(self, task: int) -> None:
        self._clear_unsent()
        if task == self.passes.running:
            self.passes.running = NO_TASK

    def _on_backward_end(self, task: int) -> None:
        passes = self.passes
        if task != passes.running:
            return
        self._clear_unsent()
        # The pass may have made none of the gradients, while those of an earlier one wait for step().
        has_gradients = self.open and passes.ended != passes.opened
        if has_gradients:
            passes.ended = passes.opened
            self._send_missing()
        passes.running = NO_TASK  # not before: a signal handler completes what no pass runs for
        if not has_gradients:
            return
        passes.end()
        self.listener.on_backward_end()


def _refuse_second(state: ParameterState) -> None:
    """Raises if autograd has just added to a gradient that is being sent."""
    gradient = state.visible_grad
    if gradient is not None and pending.is_pending(gradient) and state.parameter.grad is gradient:
        raise second_gradient(state)
