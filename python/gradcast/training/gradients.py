"""From autograd to the network: each gradient goes into its place in the buffer and is pending until it has arrived.

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
from gradcast.training import pending
from gradcast.training.buffers import GradientBuffers
from gradcast.training.slots import Absence, Slot, second_gradient, stale_read
from gradcast.training.traffic import Traffic

_NO_TASK = -1  # what autograd says outside of backward


class Listener(Protocol):
    """The session, as the gradients see it. It owns pending gradients."""

    def synchronizing(self) -> bool: ...
    def backward_begins(self) -> None: ...
    def gradient_ready(self, slot: Slot) -> None: ...
    def backward_ended(self) -> None: ...
    def backward_failed(self) -> None: ...
    def finish_gradients(self) -> None: ...
    def views_changed(self) -> None: ...
    def stop_watching(self) -> None: ...
    def touched(self, tensors: list[torch.Tensor], function: Any) -> bool: ...


class Gradients:
    """``open``: gradients of a step exist that nobody has taken yet. ``used``: their values were looked at."""

    def __init__(self, slots: Sequence[Slot], buffers: GradientBuffers, traffic: Traffic, world_size: int) -> None:
        self._slots = slots
        self._buffers = buffers
        self._traffic = traffic
        self._scale = 1.0 / world_size
        self._ready_count = 0
        self._task = _NO_TASK  # the outermost backward pass that runs, where its end is awaited
        self._open_task = _NO_TASK  # the one that the open gradients come from
        self._used_before: set[int] = set()  # by backward passes that were not synchronized
        self._forward_on = threading.get_ident()  # the thread of the last forward pass
        self._running_on: int | None = None  # the thread of the backward pass that makes the open gradients
        self.open = False
        self.used = False

    def listen(self, listener: Listener) -> list[Any]:
        """Hooks every parameter. Returns the handles that remove the hooks."""
        self._listener = weakref.ref(listener)  # a parameter must not keep its session alive
        me = weakref.ref(self)

        def hook(slot: Slot, _: torch.Tensor) -> None:
            gradients = me()
            if gradients is not None:
                gradients._on_gradient(slot)

        return [_hooked(slot.parameter, functools.partial(hook, slot)) for slot in self._slots]

    def watch(self, output: Any) -> None:
        """Backward through what a forward pass has returned begins here, before any gradient exists.

        Where backward goes another way (a loss that the module keeps to itself), the first gradient tells.
        """
        if torch._C._current_graph_task_id() == _NO_TASK:
            self._task, self._running_on = _NO_TASK, None  # also where the last backward pass failed
            self._forward_on = threading.get_ident()
        me = weakref.ref(self)

        def hook(_: torch.Tensor) -> None:
            gradients = me()
            if gradients is not None:
                gradients._on_backward_start()

        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def in_place(self, slots: Sequence[Slot]) -> bool:
        """Whether ``.grad`` of each is what has travelled, not something that the user has put there."""
        views = self._buffers.views
        return all(slot.parameter.grad is views[slot.index] and self._buffers.is_in_place(slot.index) for slot in slots)

    def finish(self) -> None:
        """Waits until all gradients of this step have arrived. Those that backward has not made are contributed now."""
        if self._ready_count < len(self._slots):
            inside = torch._C._current_graph_task_id() != _NO_TASK and self._task == self._open_task
            if inside or self.runs_elsewhere():
                raise Error(
                    "a gradient is used inside backward, before those of all parameters exist; use it after backward",
                    "invalid_use",
                )
            # The pass has failed: what the ranks have begun is completed, and the others hear that this is no sum.
            self._listener().backward_failed()
            self._contribute_missing(failed=True)
        self._traffic.wait_all()
        for slot in self._slots:
            self.settle(slot)
            # An update still needs the value: zero_grad() has to wait for it.
            if not slot.updating:
                pending.clear(self._buffers.views[slot.index])

    @property
    def complete(self) -> bool:
        """Not after a backward pass that has failed."""
        return self._ready_count == len(self._slots)

    def runs_elsewhere(self) -> bool:
        """Whether another thread is in the backward pass of the open gradients, as far as this one can know."""
        return self._running_on is not None and self._running_on != threading.get_ident()

    def settle(self, slot: Slot) -> None:
        """The gradient has arrived: ``.grad`` is what the ranks agree on, also where this one had nothing to add."""
        view, absence = self._buffers.views[slot.index], slot.absence
        if absence is None:
            return
        slot.absence = None
        if self._buffers.used_anywhere(slot.index):
            return
        if absence.in_view:
            with torch._C.DisableTorchFunctionSubclass():
                view.copy_(absence.gradient)
            if view.is_cuda:
                absence.gradient.record_stream(torch.cuda.current_stream(view.device))  # perhaps not that it comes from
            return
        slot.gradient = absence.gradient
        if slot.parameter.grad is view:
            slot.parameter.grad = absence.gradient

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
        if self.open:
            # A second backward pass before step(). What autograd adds to has to be here before it does.
            listener.finish_gradients()

    def _await_end(self, task: int) -> None:
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._on_backward_end, task))

    def _on_gradient(self, slot: Slot) -> None:
        if slot.updating or slot.stale:
            raise stale_read(slot)
        listener = self._listener()
        if not listener.synchronizing():
            self._refuse_in_flight(slot)
            self._used_before.add(slot.index)
            return
        if not self.open or slot.ready or self._task != self._open_task:
            self._begin(slot, listener)
        self._collect(slot, listener)
        self._report(slot, listener)

    def _begin(self, slot: Slot, listener: Listener) -> None:
        if self.open:
            self._refuse_in_flight(slot)
            listener.finish_gradients()
        if self._task == _NO_TASK:
            self._await_end(torch._C._current_graph_task_id())
        listener.backward_begins()
        self._buffers.mark_all()
        self._traffic.marked()
        for each in self._slots:
            each.ready = False
        self._ready_count, self.open, self.used, self._open_task = 0, True, False, self._task
        # Hooks of tensors on a device run on a thread of autograd's own, not on that which has called backward.
        self._running_on = threading.get_ident() if slot.parameter.is_cpu else self._forward_on

    def _refuse_in_flight(self, slot: Slot) -> None:
        """Autograd has just added to this gradient: not where it travels."""
        view = self._buffers.views[slot.index]
        if self.open and pending.is_pending(view) and slot.parameter.grad is view:
            raise second_gradient(slot)

    def _report(self, slot: Slot, listener: Listener) -> None:
        slot.ready = True
        self._ready_count += 1
        listener.gradient_ready(slot)
        self._traffic.ready(slot.index)

    def _collect(self, slot: Slot, listener: Listener) -> None:
        """The gradient, divided by the number of workers as DDP does it, into its view, which becomes ``.grad``."""
        gradient = slot.parameter.grad
        view = self._buffers.views[slot.index]
        if view.data_ptr() != self._buffers.addresses[slot.index]:
            self._buffers.renew(slot.index)
            listener.views_changed()
            view = self._buffers.views[slot.index]
        if gradient is view:
            view.mul_(self._scale)
        elif gradient.is_sparse or gradient.requires_grad:
            kind = "is sparse" if gradient.is_sparse else "has a graph of its own (create_graph=True)"
            raise Error(f"the gradient of {slot.name} {kind}; gradcast needs ordinary gradients", "invalid_use")
        else:
            torch.mul(gradient, self._scale, out=view)
            slot.parameter.grad = view
        slot.gradient = view
        pending.mark(view, listener)

    def _contribute_missing(self, *, failed: bool = False) -> None:
        listener = self._listener()
        for slot in self._slots:
            if not slot.ready:
                if failed or slot.index not in self._used_before:
                    self._note_absence(slot, failed)
                if slot.parameter.grad is None:
                    view = self._buffers.views[slot.index]
                    slot.parameter.grad = view.zero_()
                self._collect(slot, listener)
                self._report(slot, listener)
        self._used_before.clear()

    def _note_absence(self, slot: Slot, failed: bool) -> None:
        gradient, view = slot.parameter.grad, self._buffers.views[slot.index]
        in_view = gradient is view
        slot.absence = Absence(view.clone() if in_view else gradient, in_view)
        if failed:
            self._buffers.mark_failed(slot.index)
        else:
            self._buffers.unmark(slot.index)

    def _on_backward_end(self, task: int) -> None:
        if task != self._task:
            return
        self._task = _NO_TASK
        if not self.open:
            return
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
