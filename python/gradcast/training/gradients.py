"""From autograd to the network: each gradient goes into its place in the buffer and is pending until it has arrived.

Thread safety: hooks run on autograd's threads, one backward pass at a time; everything else under the session's lock.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gradcast.errors import Error
from gradcast.training import pending
from gradcast.training.buffers import GradientBuffers
from gradcast.training.slots import Slot, missing_gradient, stale_read
from gradcast.training.traffic import Traffic


class Listener(Protocol):
    """The session, as the gradients see it. It owns pending gradients."""

    def synchronizing(self) -> bool: ...
    def backward_begins(self) -> None: ...
    def gradient_ready(self, slot: Slot) -> None: ...
    def backward_ended(self) -> None: ...
    def touched(self, tensors: list[torch.Tensor], function: Any) -> bool: ...


class Gradients:
    """``open``: gradients of a step exist that nobody has taken yet. ``used``: their values were looked at."""

    def __init__(self, slots: Sequence[Slot], buffers: GradientBuffers, traffic: Traffic, world_size: int) -> None:
        self._slots = slots
        self._buffers = buffers
        self._traffic = traffic
        self._scale = 1.0 / world_size
        self._ready_count = 0
        self._callback_queued = False
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

        return [
            slot.parameter.register_post_accumulate_grad_hook(functools.partial(hook, slot)) for slot in self._slots
        ]

    def missing(self) -> list[Slot]:
        return [slot for slot in self._slots if not slot.ready]

    def in_place(self, slots: Sequence[Slot]) -> bool:
        """Whether ``.grad`` of each is what has travelled, not something that the user has put there."""
        return all(slot.parameter.grad is self._buffers.views[slot.index] for slot in slots)

    def finish(self) -> None:
        """Waits until all gradients of this step have arrived. Raises if one does not exist."""
        if torch._C._current_graph_task_id() != -1 and self._ready_count < len(self._slots):
            raise Error(
                "a gradient is used inside backward, before those of all parameters exist; use it after backward",
                "invalid_use",
            )
        if self._ready_count < len(self._slots):
            raise missing_gradient(self.missing())
        self._traffic.wait_all()
        for slot in self._slots:
            pending.clear(self._buffers.views[slot.index])

    def _on_gradient(self, slot: Slot) -> None:
        if slot.updating or slot.stale:
            raise stale_read(slot)
        listener = self._listener()
        if not listener.synchronizing():
            return
        if not self.open or slot.ready:
            self._begin(slot, listener)
        if not self._callback_queued:
            self._callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._collect(slot, listener)
        slot.ready = True
        self._ready_count += 1
        listener.gradient_ready(slot)
        self._traffic.ready(slot.index)

    def _begin(self, slot: Slot, listener: Listener) -> None:
        view = self._buffers.views[slot.index]
        if self.open:
            # A second backward pass before step(): the sum travels once more, as with DDP, if it is intact.
            if pending.is_pending(view) and slot.parameter.grad is view:
                raise Error(
                    f"{slot.name} got a second gradient while its first one was on the network, so both are lost; put "
                    "all backward passes before step() but the last one under handle.no_sync()",
                    "invalid_use",
                )
            self.finish()
        listener.backward_begins()
        for each in self._slots:
            each.ready = False
        self._ready_count, self.open, self.used = 0, True, False

    def _collect(self, slot: Slot, listener: Listener) -> None:
        """The gradient, divided by the number of workers as DDP does it, into its view, which becomes ``.grad``."""
        gradient, view = slot.parameter.grad, self._buffers.views[slot.index]
        if gradient is view:
            view.mul_(self._scale)
        elif gradient.is_sparse or gradient.requires_grad:
            kind = "is sparse" if gradient.is_sparse else "has a graph of its own (create_graph=True)"
            raise Error(f"the gradient of {slot.name} {kind}; gradcast needs ordinary gradients", "invalid_use")
        else:
            torch.mul(gradient, self._scale, out=view)
            slot.parameter.grad = view
        pending.mark(view, listener)

    def _on_backward_end(self) -> None:
        self._callback_queued = False
        # Fewer: the inner pass of a checkpoint, or a gradient that never comes; whoever needs it says so.
        if self.open and self._ready_count == len(self._slots):
            self._listener().backward_ended()
