"""From autograd to the network: each gradient goes into its place in the buffer and is pending until it has arrived.

What ``.grad`` is then is the place itself; or, where somebody keeps gradients, the tensor that autograd has made, into
which the sum is copied when it has arrived (gradient_buffers.py, apart).

A parameter that gets no gradient in a backward pass contributes what its ``.grad`` holds, or zero, and its mark says
that this rank has not used it. Where no rank has, ``.grad`` stays what it was: DDP's find_unused_parameters.

Thread safety: hooks run on autograd's threads, one backward pass at a time; everything else under the session's lock.
"""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from gradcast.errors import Error
from gradcast.training.compat import extension
from gradcast.training.step import pending
from gradcast.training.step.gradient_buffers import GradientBuffers, Usage
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.parameter_state import (
    Absence,
    ParameterState,
    second_gradient,
    stale_read,
    used_inside_backward,
)

# Longer than loops freeze parts by turns, and than measuring again takes.
_LONG_FROZEN_STEPS = 64
_NO_TASK = -1  # what autograd says outside of backward


class Listener(Protocol):
    """The session, as the gradients see it. It owns pending gradients."""

    def synchronizing(self) -> bool: ...
    def backward_begins(self) -> None: ...
    def gradient_ready(self, slot: ParameterState) -> None: ...
    def backward_ended(self) -> None: ...
    def backward_failed(self) -> None: ...
    def finish_gradients(self) -> None: ...
    def exposes(self, slot: ParameterState, tensor: torch.Tensor | None) -> None: ...
    def stop_watching(self) -> None: ...
    def touched(self, tensors: list[torch.Tensor], function: Any) -> bool: ...


class GradientHook:
    """Behind the accumulation of one parameter's gradient. A parameter must not keep its session alive."""

    def __init__(self, gradients: "GradientHooks", slot: ParameterState) -> None:
        self._gradients, self._slot = weakref.ref(gradients), slot

    def __call__(self, _: torch.Tensor) -> None:
        gradients = self._gradients()
        if gradients is not None:
            gradients._on_gradient(self._slot)


class GradientHooks:
    """``open``: gradients of a step exist that nobody has taken yet. ``used``: their values were looked at.
    ``long_frozen``: ids of parameters that have been frozen in many steps in a row, on all ranks."""

    def __init__(
        self, slots: Sequence[ParameterState], buffers: GradientBuffers, exchange: GradientExchange, world_size: int
    ) -> None:
        self._slots = slots
        self._buffers = buffers
        self._exchange = exchange
        self._scale = 1.0 / world_size
        self._ready_count = 0
        self._task = _NO_TASK  # the outermost backward pass that runs, where its end is awaited
        self._open_task = _NO_TASK  # the one that the open gradients come from
        self._ended_task = _NO_TASK  # the last one that has ended with gradients
        self._seen_task = _NO_TASK  # the one before which gradients that were there have been looked at
        self._hooked_by_others: list[ParameterState] = []
        self._used_before: set[int] = set()  # by backward passes that were not synchronized
        self._forward_on = threading.get_ident()  # the thread of the last forward pass
        self._running_on: int | None = None  # the thread of the backward pass that makes the open gradients
        self._graphs: list[weakref.ref] = []  # of forward passes since the last backward pass
        self.open = False
        self.used = False
        self.long_frozen: set[int] = set()

    def listen(self, listener: Listener) -> list[Any]:
        """Hooks every parameter. Returns the handles that remove the hooks."""
        self._listener = weakref.ref(listener)  # a parameter must not keep its session alive
        hooks = [_hooked(slot.parameter, GradientHook(self, slot)) for slot in self._slots]
        self._hook_ids = [hook.id for hook in hooks]
        return hooks

    def forward_begins(self) -> None:
        """The program's own hooks behind a gradient run before ours and see this rank's gradient, as with DDP, whenever
        they were registered. They may keep it, too."""
        self._hooked_by_others = []
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that are pending, too
            for slot, own in zip(self._slots, self._hook_ids, strict=True):
                hooks = slot.parameter._post_accumulate_grad_hooks
                slot.version = None
                if len(hooks) > 1:
                    hooks[own] = hooks.pop(own)  # autograd goes by insertion, not by OrderedDict's order
                    self._hooked_by_others.append(slot)
        self._buffers.keep_apart(slot.index for slot in self._hooked_by_others)

    def watch(self, output: Any) -> None:
        """Backward through what a forward pass has returned begins here, before any gradient exists.

        Where backward goes another way (a loss that the module keeps to itself), the first gradient tells.
        """
        if torch._C._current_graph_task_id() == _NO_TASK:
            self._task, self._running_on = _NO_TASK, None  # also where the last backward pass failed
            self._forward_on = threading.get_ident()
        for slot in self._hooked_by_others:
            slot.version = None if slot.updating else slot.parameter._version
        me = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            gradients = me()
            if gradients is not None:
                gradients._on_backward_start()

        with_graph = [tensor for tensor in _tensors_in(output) if tensor.grad_fn is not None]
        for tensor in with_graph:
            tensor.register_hook(hook)
        if with_graph:
            self._graphs.append(weakref.ref(hook))  # which lives as long as the graph does

    def awaits_backward(self) -> bool:
        """A forward pass since the last backward pass has left a graph that somebody still has."""
        self._graphs = [graph for graph in self._graphs if graph() is not None]
        return len(self._graphs) > 0

    def in_place(self, slots: Sequence[ParameterState]) -> bool:
        """Whether ``.grad`` of each is what has travelled, not something that the user has put there."""
        apart, is_in_place = self._buffers.apart, self._buffers.is_in_place
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that are pending, too
            unchanged = [slot for slot in slots if slot.parameter.grad is slot.exposed]
        return len(unchanged) == len(slots) and all(
            slot.index in apart or is_in_place(slot.index) for slot in unchanged
        )

    def refuse_inside_backward(self) -> None:
        """Before the gradients are used: not inside of the pass that makes them."""
        if torch._C._current_graph_task_id() != _NO_TASK and self._task == self._open_task:
            raise Error(
                "a gradient is used inside backward, before those of all parameters exist; use it after backward",
                "invalid_use",
            )

    def finish(self) -> None:
        """Waits until all gradients of this step have arrived. Those that backward has not made are contributed now."""
        if self._ready_count < len(self._slots):
            self.refuse_inside_backward()
            if self.runs_elsewhere():
                raise Error(
                    "a gradient is used while another thread is in backward, before those of all parameters exist; use "
                    "it after backward",
                    "invalid_use",
                )
            # The pass has failed: what the ranks have begun is completed, and the others hear that this is no sum.
            self._listener().backward_failed()
            self._contribute_missing(failed=True)
        self._exchange.wait_all()
        self.settle(self._slots)
        for slot in self._slots:
            # An update still needs the value: zero_grad() has to wait for it.
            if not slot.updating:
                pending.clear(slot.exposed)

    @property
    def listener(self) -> Listener:
        return self._listener()

    @property
    def complete(self) -> bool:
        """Not after a backward pass that has failed."""
        return self._ready_count == len(self._slots)

    def runs_elsewhere(self) -> bool:
        """Whether another thread is in the backward pass of the open gradients, as far as this one can know."""
        return self._running_on is not None and self._running_on != threading.get_ident()

    def settle(self, slots: Sequence[ParameterState]) -> None:
        """These gradients have arrived: ``.grad`` is what the ranks agree on, also where this one has none."""
        absent = [slot for slot in slots if slot.absence is not None]
        for slot, usage in zip(absent, self._buffers.usage([slot.index for slot in absent]), strict=True):
            absence, slot.absence = slot.absence, None
            if not slot.updating:
                pending.clear(slot.parameter)
            self._count_frozen(slot, usage)
            if usage is not Usage.USED:
                slot.owed = False
                self._restore(slot, absence)
        for slot in slots:
            self.receive(slot)

    def receive(self, slot: ParameterState) -> None:
        """What has arrived is in ``.grad``, also where that lies apart."""
        if slot.owed:
            slot.owed = False
            _copy(self._buffers.views[slot.index], into=slot.exposed)

    def _count_frozen(self, slot: ParameterState, usage: Usage) -> None:
        slot.frozen_steps = slot.frozen_steps + 1 if usage is Usage.FROZEN else 0
        if slot.frozen_steps == _LONG_FROZEN_STEPS:
            self.long_frozen.add(id(slot.parameter))
        elif slot.frozen_steps == 0:
            self.long_frozen.discard(id(slot.parameter))

    def _restore(self, slot: ParameterState, absence: Absence) -> None:
        """Nobody has used the parameter."""
        if absence.in_view:
            _copy(absence.gradient, into=slot.exposed)
            return
        slot.gradient = absence.gradient
        if slot.parameter.grad is slot.exposed:
            slot.parameter.grad = absence.gradient

    def let_go(self, slot: ParameterState) -> None:
        """Memory apart from the buffer that the program has given up, zero_grad(), is not held here either."""
        if slot.index in self._buffers.apart and slot.parameter.grad is not slot.exposed:
            slot.gradient = None
            self.listener.exposes(slot, None)

    def forget(self) -> None:
        """What backward passes have used while nothing was to be sent."""
        self._used_before.clear()

    def _on_backward_start(self) -> None:
        listener = self._listener()
        task = torch._C._current_graph_task_id()
        if listener is None or task == self._task:
            return
        listener.stop_watching()
        if listener.synchronizing():
            self._await_end(task)
            self._keep_accumulated_apart()
        if self.open:
            # A second backward pass before step(). What autograd adds to has to be here before it does.
            listener.finish_gradients()

    def _await_end(self, task: int) -> None:
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._on_backward_end, task))

    def _on_gradient(self, slot: ParameterState) -> None:
        if slot.updating or slot.stale:
            raise stale_read(slot)
        if slot.version is not None and slot.parameter._version != slot.version:
            raise used_inside_backward(slot)
        listener = self._listener()
        if not listener.synchronizing():
            self._refuse_in_flight(slot)
            self._used_before.add(slot.index)
            return
        if slot.parameter.grad is None:
            if len(slot.parameter._post_accumulate_grad_hooks) > 1:
                raise used_inside_backward(slot)
            return  # a function has returned None for it: as if the pass had not come to it
        if not self.open or slot.ready or self._task != self._open_task:
            self._begin(slot, listener)
        self._collect(slot, listener)
        self._report(slot, listener)

    def _begin(self, slot: ParameterState, listener: Listener) -> None:
        if self.open:
            self._refuse_in_flight(slot)
            listener.finish_gradients()
        if self._task == _NO_TASK:
            self._await_end(torch._C._current_graph_task_id())
        listener.backward_begins()
        self._graphs.clear()
        if self._task != self._seen_task:
            self._keep_accumulated_apart(slot)
        self._buffers.mark_all()
        self._exchange.marked()
        for each in self._slots:
            each.ready = False
        self._ready_count, self.open, self.used, self._open_task = 0, True, False, self._task
        # Hooks of tensors on a device run on a thread of autograd's own, not on that which has called backward.
        self._running_on = threading.get_ident() if slot.parameter.is_cpu else self._forward_on

    def _keep_accumulated_apart(self, first: ParameterState | None = None) -> None:
        """Gradients of earlier passes (no_sync) that somebody keeps become what they become with DDP: the mean.
        ``first``: one that autograd is about to hand over, and may still hold."""
        self._seen_task = self._task
        others = [slot for slot in self._slots if slot is not first and slot.index not in self._buffers.apart]
        found = [slot for slot in others if slot.parameter.grad is not None]
        found = [slot for slot in found if slot.parameter.grad is not self._buffers.views[slot.index]]
        kept = extension.load().held_elsewhere([slot.parameter.grad for slot in found], 0, True) if found else []
        self._buffers.keep_apart(found[position].index for position in kept)

    def _refuse_in_flight(self, slot: ParameterState) -> None:
        """Autograd has just added to this gradient: not where it travels."""
        if not self.open or slot.exposed is None:
            return
        if pending.is_pending(slot.exposed) and slot.parameter.grad is slot.exposed:
            raise second_gradient(slot)

    def _report(self, slot: ParameterState, listener: Listener) -> None:
        slot.ready = True
        if slot.absence is None:
            self._count_frozen(slot, Usage.USED)
        self._ready_count += 1
        listener.gradient_ready(slot)
        self._exchange.ready(slot.index)

    def _collect(self, slot: ParameterState, listener: Listener) -> None:
        """The gradient, divided by the number of workers as DDP does it, into its view."""
        gradient = slot.parameter.grad
        view = self._buffers.views[slot.index]
        if not self._buffers.is_in_place(slot.index):
            self._buffers.renew(slot.index)
            view = self._buffers.views[slot.index]
        if gradient is view:
            view.mul_(self._scale)
        elif gradient.is_sparse or gradient.requires_grad:
            kind = "is sparse" if gradient.is_sparse else "has a graph of its own (create_graph=True)"
            raise Error(f"the gradient of {slot.name} {kind}; gradcast needs ordinary gradients", "invalid_use")
        else:
            torch.mul(gradient, self._scale, out=view)
        slot.owed = slot.index in self._buffers.apart
        if not slot.owed:
            slot.parameter.grad = gradient = view
        slot.gradient = gradient
        listener.exposes(slot, gradient)
        pending.mark(gradient, listener)

    def _contribute_missing(self, *, failed: bool = False) -> None:
        listener = self._listener()
        for slot in self._slots:
            if not slot.ready:
                if failed or slot.index not in self._used_before:
                    self._note_absence(slot, failed)
                if slot.parameter.grad is None and slot.index in self._buffers.apart:
                    slot.parameter.grad = torch.zeros_like(slot.parameter, requires_grad=False)
                elif slot.parameter.grad is None:
                    slot.parameter.grad = self._buffers.views[slot.index].zero_()
                self._collect(slot, listener)
                self._report(slot, listener)
                if slot.absence is not None:  # whether there is a gradient at all is not known yet
                    pending.mark(slot.parameter, listener)
        self._used_before.clear()

    def _note_absence(self, slot: ParameterState, failed: bool) -> None:
        gradient, view = slot.parameter.grad, self._buffers.views[slot.index]
        in_view = gradient is view
        slot.absence = Absence(view.clone() if in_view else gradient, in_view)
        if failed:
            self._buffers.mark_failed(slot.index)
        else:
            self._buffers.unmark(slot.index, frozen=not slot.parameter.requires_grad)

    def _on_backward_end(self, task: int) -> None:
        if task != self._task:
            return
        self._task = _NO_TASK
        # The pass may have come to none of the gradients, while those of an earlier one wait for step().
        if not self.open or self._ended_task == self._open_task:
            return
        self._ended_task = self._open_task
        self._contribute_missing()
        self._running_on = None
        self._listener().backward_ended()


def _hooked(parameter: torch.nn.Parameter, hook: Any) -> Any:
    """Also where it is frozen now: torch refuses a hook on what needs no gradient."""
    needs_gradient = parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(needs_gradient)


def _copy(value: torch.Tensor, into: torch.Tensor) -> None:
    """Into what may be pending."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        into.copy_(value)
    if into.is_cuda:  # perhaps not the stream that these come from
        stream = torch.cuda.current_stream(into.device)
        value.record_stream(stream)
        into.record_stream(stream)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """However deep in lists, tuples, dicts and dataclasses, as modules return them."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, dict):
        parts: Any = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).values()
    else:
        return
    for part in parts:
        yield from _tensors_in(part)
