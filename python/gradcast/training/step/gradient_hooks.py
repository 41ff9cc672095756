"""From autograd to the network: each gradient goes into the buffer and is pending until it has arrived.

In an ordinary step the hooks do that in C++ for each gradient but the first (accumulation_hooks.h). Their views are
pending from the first one on, and the rest is made up for when backward ends, for all at once. What is not ordinary
comes to ``_on_gradient``, gradient by gradient.

Meanwhile ``.grad`` is the view of the buffer; or, for a gradient that the program keeps, the tensor that autograd has
made, into which the sum is copied when it arrives (gradient_buffers.py, "apart").

A parameter that gets no gradient in a backward pass contributes what its ``.grad`` holds, or zero, and the step message
says that this rank has not used it. If no rank has, ``.grad`` stays what it was, as with DDP's find_unused_parameters.

Thread safety: hooks run on autograd's threads, one backward pass at a time; everything else under the session's lock.
"""

import threading
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
from gradcast.training.step.clipping import NormClipping
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.gradient_listener import ForwardPass, Listener
from gradcast.training.step.module_buffers import ModuleBuffers
from gradcast.training.step.parameter_state import (
    LocallyUnused,
    ParameterState,
    ParameterStates,
    Phase,
    second_gradient,
    stale_read,
    used_inside_backward,
)
from gradcast.training.step.rank_consistency import RankConsistency
from gradcast.training.step.step_message import StepMessage
from gradcast.training.step.weights import StepWeights

_NO_TASK = -1  # autograd's task id outside of backward


class _BackwardEnd:
    """What autograd calls when the backward pass ``task`` has ended, and drops uncalled when it has failed."""

    def __init__(self, gradients: "GradientHooks", task: int) -> None:
        self._gradients, self._task, self._is_called = gradients, task, False

    def __call__(self) -> None:
        self._is_called = True
        self._gradients._on_backward_end(self._task)

    def __del__(self) -> None:
        if not self._is_called:
            self._gradients._on_backward_failure(self._task)


class GradientHooks:
    """The gradients of a session, whose ``states``, ``exchange``, ``weights`` and ``clipping`` these are.

    ``open``: gradients of a step exist that no optimizer has taken yet. ``values_used``: the program has read them.
    """

    def __init__(
        self,
        states: ParameterStates,
        exchange: GradientExchange,
        message: StepMessage,
        weights: StepWeights,
        clipping: NormClipping | None,
        module_buffers: ModuleBuffers | None,
        consistency: RankConsistency,
    ) -> None:
        """``module_buffers``: those that travel with the gradients."""
        self.states, self.exchange, self.weights, self.clipping = states, exchange, weights, clipping
        self.message = message
        self._buffers, self._module_buffers = exchange.buffers, module_buffers
        self._sent_count = 0  # of gradients
        # Autograd's task ids of outermost backward passes:
        self._task = _NO_TASK  # the one that runs, if its end is awaited
        self._open_task = _NO_TASK  # the one that has made the open gradients
        self._ended_task = _NO_TASK  # the last one that has ended with gradients
        self._checked_task = _NO_TASK  # the last one before which accumulated gradients were checked
        self._through: tuple[int, ForwardPass] | None = None  # a backward pass, and the forward pass that it belongs to
        self._hooked_by_program: list[ParameterState] = []
        self._used_unsynchronized: set[int] = set()  # parameters used by backward passes inside no_sync()
        self._forward_thread = threading.get_ident()  # of the last forward pass
        self._backward_thread: int | None = None  # of the backward pass that makes the open gradients
        # Of forward passes since the last backward pass: the module that was called, and its graph.
        self._graphs: list[tuple[nn.Module, weakref.ref]] = []
        self._places: list[Any] = []  # what the hooks know of the layout
        self.open = False
        self.values_used = False
        self.arrived = ArrivedGradients(states, exchange.buffers, message, weights, consistency)

    def install(self, listener: Listener) -> list[Any]:
        """Hooks every parameter. Returns the handles that remove the hooks."""
        self._listener = weakref.ref(listener)  # a parameter must not keep its session alive
        norm_type = None if self.clipping is None else self.clipping.norm_type
        self._hooks = self.exchange.hooks(norm_type, WeakHook(self._on_gradient), WeakHook(self._on_view))
        self._hooks.install([state.parameter for state in self.states])
        return [self._hooks]

    def release(self) -> None:
        """After the hooks are removed: they keep the buffers."""
        del self._hooks

    def before_forward(self) -> None:
        """Finds post-accumulate hooks of the program, whenever those were registered. They run before ours: they see
        this rank's gradient, as with DDP, and may keep it."""
        for state in self._hooked_by_program:
            state.forward_version = None
        found = [self.states[index] for index in self._hooks.refresh()]
        # Once the program has removed its hooks, {} remains; None, if they are C++.
        self._hooked_by_program = [each for each in found if each.parameter._post_accumulate_grad_hooks != {}]
        self._buffers.keep_apart(state.index for state in self._hooked_by_program)

    def watch_output(self, module: nn.Module, output: Any, forward: ForwardPass) -> None:
        """Notices the start of backward at what a forward pass of ``module`` has returned, before any gradient exists.

        If backward goes another way (a loss that the module keeps to itself), the first gradient shows it.
        """
        if torch._C._current_graph_task_id() == _NO_TASK:
            self._task, self._backward_thread = _NO_TASK, None  # also if the last backward pass failed
            self._forward_thread = threading.get_ident()
        for state in self._hooked_by_program:
            state.forward_version = None if state.is_update_due else state.parameter._version
        hook = WeakHook(self._on_backward_start, forward)
        with_graph = [tensor for tensor in pending.tensors_in(output) if tensor.grad_fn is not None]
        for tensor in with_graph:
            tensor.register_hook(hook)
        if with_graph:
            self._graphs.append((module, weakref.ref(hook)))  # lives as long as the graph

    def is_backward_expected(self, module: nn.Module) -> bool:
        """Whether a forward pass of ``module`` since the last backward pass has left a graph that is still alive."""
        self._graphs = [each for each in self._graphs if each[1]() is not None]
        return any(called is module for called, _ in self._graphs)

    def are_in_place(self, states: list[ParameterState]) -> bool:
        """Whether ``.grad`` of each is the tensor that backward has put there, not one of the program's."""
        apart = self._buffers.apart
        native = extension.load()
        if not native.hold_gradients(native.fields(states, "parameter"), native.fields(states, "visible_grad")):
            return False
        return self._buffers.are_in_place(None if not apart else [e.index for e in states if e.index not in apart])

    def refuse_inside_backward(self) -> None:
        """Raises if the backward pass that makes the open gradients calls this, since it would use them too early."""
        if torch._C._current_graph_task_id() != _NO_TASK and self._task == self._open_task:
            raise refused(
                "a gradient is used inside backward, before those of all parameters exist; use it after backward"
            )

    def wait_for_all(self) -> None:
        """Waits until all gradients of this step have arrived, after sending those that backward has not made."""
        self.note_sent()
        if not self.all_sent:
            self.refuse_inside_backward()
            if self.is_backward_on_another_thread():
                raise refused(
                    "a gradient is used while another thread is in backward, before those of all parameters exist; use "
                    "it after backward"
                )
            # The pass has failed. Complete what the ranks have begun, and tell the others that this is no sum.
            failed = bool(extension.load().with_field(self.states, "phase", Phase.IDLE))
            if failed:
                self.listener.on_backward_failure()
            self._send_missing(failed=failed)
        self.exchange.wait_all()
        with interrupts.after_this():
            self.arrived.settle(self.states)

    @property
    def listener(self) -> Listener:
        return self._listener()

    @property
    def all_sent(self) -> bool:
        """False after a backward pass that has failed."""
        others_sent = self.message.is_written and (self._module_buffers is None or self._module_buffers.is_written)
        return others_sent and self._sent_count == len(self.states)

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward pass runs whose gradients are sent, on any thread."""
        return self._task != _NO_TASK

    def is_backward_on_another_thread(self) -> bool:
        """Whether another thread is in the backward pass of the open gradients, as far as this thread can know."""
        return self._backward_thread is not None and self._backward_thread != threading.get_ident()

    def forget_unsynchronized(self) -> None:
        self._used_unsynchronized.clear()

    def _on_backward_start(self, forward: ForwardPass, _: torch.Tensor) -> None:
        listener = self.listener
        task = torch._C._current_graph_task_id()
        if listener is None or (task == self._task and self._through is not None and self._through[1] == forward):
            return
        reduces = listener.reduces(forward)
        if self._through is None or self._through[0] != task or forward.synchronizes:
            self._through = task, forward
        if task == self._task:
            return
        listener.stop_watching_reads()
        if reduces:
            self._await_end(task)
            self._keep_accumulated_apart()
        if self.open:
            # A second backward pass before step(): autograd adds to these gradients, so they must have arrived.
            listener.wait_for_gradients()

    def _forward(self) -> ForwardPass | None:
        """The forward pass that the backward pass that runs belongs to, if it has come through its output."""
        running = self._task, torch._C._current_graph_task_id()
        return self._through[1] if self._through is not None and self._through[0] in running else None

    def _await_end(self, task: int) -> None:
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(_BackwardEnd(self, task))

    def _on_gradient(self, index: int) -> None:
        state = self.states[index]
        self.note_sent()
        if state.is_update_due or state.updated_late:
            raise stale_read(state)
        if state.forward_version is not None and state.parameter._version != state.forward_version:
            raise used_inside_backward(state)
        if not self.listener.reduces(self._forward()):
            self._refuse_travelling(state)
            self._used_unsynchronized.add(state.index)
            return
        if state.parameter.grad is None:
            if state.parameter._post_accumulate_grad_hooks:
                raise used_inside_backward(state)
            return  # a function has returned None as this gradient, as if the pass had not reached the parameter
        if not self.open or state.phase is not Phase.IDLE or self._task != self._open_task:
            self._begin_step(state)
            if not self.open:
                return  # the listener has given the step up
        self._put_into_buffer(state)
        self._send(state)

    def _begin_step(self, first: ParameterState) -> None:
        if self.open:
            self._refuse_travelling(first)
            self.listener.wait_for_gradients()
        if self._task == _NO_TASK:
            self._await_end(torch._C._current_graph_task_id())
        self._open_step(first)
        if not self.open:
            return
        # On a device, hooks run on a thread of autograd's own, not on the one that has called backward.
        self._backward_thread = threading.get_ident() if first.parameter.is_cpu else self._forward_thread
        if not self.listener.times_gradients:
            self._arm()

    def send_nothing(self) -> None:
        """A step without backward on this rank: as a pass that reaches no parameter."""
        if self.open:
            self.listener.wait_for_gradients()
        self._task = self._ended_task = _NO_TASK
        with torch.no_grad():
            self._keep_accumulated_apart()
            self._open_step()
            self._send_missing()
            self._backward_thread = None
            self.listener.on_backward_end()

    def _open_step(self, first: ParameterState | None = None) -> None:
        """Opens a step. ``first``: its first gradient."""
        listener = self.listener
        listener.on_backward_begin()
        self._graphs.clear()
        if not listener.sends:
            return  # what failed is reported, and no gradient of this step travels
        if self._task != self._checked_task:
            self._keep_accumulated_apart(first)
        counts = first is not None and self.weights.scale != 0
        # A rank that sends nothing is in this pass, too, and is told nothing wrong by the next one.
        signature = listener.signature(self._hooks.fingerprint(), self._forward() if counts else None)
        self.message.begin_pass(signature if counts else None)
        parameter_state.begin_step(self.states)
        self._sent_count, self.open, self.values_used, self._open_task = 0, True, False, self._task
        if self._module_buffers is not None and self._module_buffers.on_backward_begin():
            self._send_tensor(self._module_buffers.index, listener, used=True)

    def _arm(self) -> None:
        """Lets the hooks send what is ordinary in the backward pass that runs."""
        if self._places is not self.exchange.places:
            self._places = self.exchange.places
            self._hooks.follow_layout(self._places, self._buffers.addresses)
        special = self._buffers.apart.union(state.index for state in self._hooked_by_program)
        special.update(state.index for state in extension.load().with_field(self.states, "updated_late", True))
        scale = self.weights.scale
        if scale == 0:
            special.update(range(len(self.states)))
        # What is sent without Python must not be used before backward has ended.
        pending.mark(self._hooks.arm(self._task, self._buffers.views, list(special), scale), self.listener)

    def _on_view(self, index: int) -> None:
        """The hooks are about to send a gradient that was in its view before, and not pending."""
        pending.mark([self._buffers.views[index]], self.listener)

    def note_sent(self, *, ended: bool = False, succeeded: bool = False) -> None:
        """Makes up for what the hooks have sent without Python. ``ended``: backward has."""
        if ended:
            self._hooks.disarm()
        indices, norms = self._hooks.take_sent()
        if norms:
            self.message.own_norms |= zip(indices, norms, strict=True)
        if succeeded and not self.message.is_written and self._sent_count + len(indices) == len(self.states):
            self._send_message()  # before all else, as a block waits for it
        if indices:
            self._enter(indices)
        if ended:
            self._clear_unsent()

    def _enter(self, indices: Sequence[int]) -> None:
        sent, views, native = self.states, self._buffers.views, extension.load()
        if len(indices) < len(sent):
            sent, views = [sent[index] for index in indices], [views[index] for index in indices]
        native.set_fields(sent, "update_grad", views)
        for state in native.with_other_field(sent, "visible_grad", views):
            self.states.set_visible_grad(state, state.update_grad)
        for state in native.with_field(sent, "frozen_steps", 0, False):
            self.arrived.count_frozen(state, False)
        self._sent_count += len(sent)
        parameter_state.depart(sent, None)  # pending already

    def _clear_unsent(self) -> None:
        """Views of gradients that backward has not made, or not yet, are nobody's, and need not be pending."""
        views = self._buffers.views
        if views:  # gradcast may have left the module
            idle = extension.load().with_field(self.states, "phase", Phase.IDLE)
            pending.clear([views[state.index] for state in idle])

    def _keep_accumulated_apart(self, first: ParameterState | None = None) -> None:
        """Gradients accumulated by earlier passes (no_sync) that the program keeps become the mean, as with DDP.
        ``first``: a gradient that autograd may still hold, because it is about to hand it over."""
        self._checked_task = self._task
        states = [self.states[index] for index in self._hooks.with_gradient() if index not in self._buffers.apart]
        # Reading .grad shows whether the ranks have agreed that there is none.
        found = [state for state in states if state is not first and state.parameter.grad is not None]
        views = self._buffers.views
        # A conversion of the module (.double(), .to()) gives .grad other memory. As with DDP it stays the same tensor.
        in_views = [state.index for state in found if state.parameter.grad is views[state.index]]
        self._buffers.keep_apart(index for index in in_views if not self._buffers.are_in_place([index]))
        found = [state for state in found if state.parameter.grad is not views[state.index]]
        kept = extension.load().held_elsewhere([state.parameter.grad for state in found], 0, True) if found else []
        self._buffers.keep_apart(found[position].index for position in kept)

    def _refuse_travelling(self, state: ParameterState) -> None:
        """Raises if autograd has just added to a gradient that travels."""
        if not self.open or state.visible_grad is None:
            return
        if pending.is_pending(state.visible_grad) and state.parameter.grad is state.visible_grad:
            raise second_gradient(state)

    def _put_into_buffer(self, state: ParameterState) -> None:
        """Writes the gradient into its view: divided by the number of workers as DDP does it, or weighted."""
        gradient, scale = state.parameter.grad, self.weights.scale
        view = self._buffers.views[state.index]
        pending.clear([view])
        if not self._buffers.are_in_place([state.index]):
            self._buffers.renew(state.index)
            view = self._buffers.views[state.index]
        if gradient is not view and (gradient.is_sparse or gradient.requires_grad):
            kind = "is sparse" if gradient.is_sparse else "has a graph of its own (create_graph=True)"
            raise refused(f"the gradient of {state.name} {kind}; gradcast needs ordinary gradients")
        if scale == 0:
            view.zero_()  # a batch of nothing has NaNs
        elif gradient is view:
            view.mul_(scale)
        else:
            torch.mul(gradient, scale, out=view)
        state.copy_due = state.index in self._buffers.apart
        if not state.copy_due:
            state.parameter.grad = gradient = view
        state.update_grad = gradient
        self.states.set_visible_grad(state, gradient)

    def _send(self, state: ParameterState) -> None:
        if self.clipping is not None:
            norm = torch.linalg.vector_norm(self._buffers.views[state.index], self.clipping.norm_type)
            self.message.own_norms[state.index] = norm
        listener = self.listener
        self._sent_count += 1
        parameter_state.depart([state], listener)
        if state.locally_unused is None:
            self.arrived.count_frozen(state, False)
        self._send_tensor(state.index, listener, used=state.locally_unused is None)

    def _send_tensor(self, index: int, listener: Listener, *, used: bool) -> None:
        listener.on_gradient_sent(index, used=used)
        self.exchange.ready(index)

    def _send_missing(self, *, failed: bool = False) -> None:
        """Sends a substitute for each gradient that backward has not made. ``failed``: the pass has failed."""
        self._clear_unsent()
        for state in extension.load().with_field(self.states, "phase", Phase.IDLE):
            if failed or state.index not in self._used_unsynchronized:
                self._note_unused(state, failed)
            if state.parameter.grad is None and state.index in self._buffers.apart:
                state.parameter.grad = torch.zeros_like(state.parameter, requires_grad=False)
            elif state.parameter.grad is None:
                state.parameter.grad = self._buffers.views[state.index].zero_()
            self._put_into_buffer(state)
            self._send(state)
        if not self.message.is_written:
            self._send_message()
        if self._module_buffers is not None and self._module_buffers.on_backward_end():
            self._send_tensor(self._module_buffers.index, self.listener, used=True)
        self._used_unsynchronized.clear()

    def _send_message(self) -> None:
        """REQUIRES: all gradients have been sent."""
        self.message.write()
        self._send_tensor(self.message.index, self.listener, used=True)

    def _note_unused(self, state: ParameterState, failed: bool) -> None:
        gradient, view = state.parameter.grad, self._buffers.views[state.index]
        was_view = gradient is view
        state.locally_unused = LocallyUnused(view.clone() if was_view else gradient, was_view)
        if failed:
            self.message.flag_failed(state.index)
        else:
            self.message.flag_unused(state.index, frozen=not state.parameter.requires_grad)
        self.exchange.keep_residual(state.index)

    def _on_backward_failure(self, task: int) -> None:
        self.note_sent(ended=True)
        if task == self._task:
            self._task = _NO_TASK

    def _on_backward_end(self, task: int) -> None:
        if task != self._task:
            return
        self.note_sent(ended=True, succeeded=True)
        # The pass may have made none of the gradients, while those of an earlier one wait for step().
        has_gradients = self.open and self._ended_task != self._open_task
        if has_gradients:
            self._ended_task = self._open_task
            self._send_missing()
        self._task = _NO_TASK  # not before: a signal handler completes what no pass runs for
        if not has_gradients:
            return
        self._backward_thread = None
        self.listener.on_backward_end()
