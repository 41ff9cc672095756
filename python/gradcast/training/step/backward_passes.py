"""Backward passes: which one runs, which one has made the open gradients, and which forward pass each belongs to.

Autograd numbers outermost backward passes: ``task``. NO_TASK stands for none.

Thread safety: autograd's threads, one backward pass at a time; otherwise under the session's lock.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradcast.errors import refused
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.step import pending

NO_TASK = -1  # autograd's number outside of backward


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """The settings of a forward pass, for the backward pass through its output. ``synchronizes``: it ended outside of
    no_sync(). ``training``: the module's flag."""

    synchronizes: bool
    training: bool


class BackwardPasses:
    """The backward passes of a session. ``running``: the pass that runs, if its end is awaited. ``opened``: the one
    that has made the open gradients. ``ended``: the last one that has ended with gradients. ``checked``: the last one
    before which accumulated gradients were checked. ``goes_on``: the open step has further passes."""

    goes_on = False

    def __init__(self, *, behind_others: bool = False) -> None:
        """``behind_others``: others end the pass in callbacks, too, and the one of ``await_end`` comes after them."""
        self.running = self.opened = self.ended = self.checked = NO_TASK
        self._behind_others = behind_others
        self._through: tuple[int, ForwardPass] | None = None  # a pass, and the forward pass that it belongs to
        self._forward_thread = threading.get_ident()  # of the last forward pass
        self._opening_thread: int | None = None  # of the pass that makes the open gradients
        # Of forward passes since the last backward pass: the module that was called, and its graph.
        self._graphs: list[tuple[nn.Module, weakref.ref]] = []

    @property
    def task(self) -> int:
        """The pass that this thread is in."""
        return current()

    def await_end(self, task: int, on_end: Callable[[], None]) -> None:
        """Calls ``on_end`` where this pass, which runs, ends; drops it uncalled if the pass fails."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        self.running = task
        queue((lambda: queue(on_end)) if self._behind_others else on_end)

    def reduces(self, listener: Any, forward: ForwardPass | None) -> bool:
        """Returns whether the pass that runs is reduced. ``forward``: whose output it goes through, if known."""
        return listener.reduces(forward)

    def watch_output(self, module: nn.Module, output: Any, on_start: WeakHook) -> None:
        """Watches the output of a forward pass of ``module``. ``on_start`` is called before backward makes a gradient.

        If backward goes another way (a loss that the module keeps to itself), the first gradient shows it.
        """
        if current() == NO_TASK:
            self.running, self._opening_thread = NO_TASK, None  # also if the last backward pass failed
            self._forward_thread = threading.get_ident()
        with_graph = [tensor for tensor in pending.tensors_in(output) if tensor.grad_fn is not None]
        for tensor in with_graph:
            tensor.register_hook(on_start)
        if with_graph:
            self._graphs.append((module, weakref.ref(on_start)))  # lives as long as the graph

    def is_expected(self, module: nn.Module) -> bool:
        """Returns whether a forward pass of ``module`` since the last backward pass has left a living graph."""
        return any(called is module for called in self._with_graph())

    @property
    def graph_count(self) -> int:
        """The number of living graphs of forward passes since the last backward pass."""
        return len(self._with_graph())

    def _with_graph(self) -> list[nn.Module]:
        self._graphs = [each for each in self._graphs if each[1]() is not None]
        return [called for called, _ in self._graphs]

    def goes_through(self, forward: ForwardPass) -> bool:
        """Notes that the current pass comes through the output of this forward pass. Returns False if that is known."""
        task = current()
        if task == self.running and self._through is not None and self._through[1] == forward:
            return False
        if self._through is None or self._through[0] != task or forward.synchronizes:
            self._through = task, forward
        return True

    @property
    def forward(self) -> ForwardPass | None:
        """The forward pass that the current pass belongs to, if it has come through its output."""
        is_known = self._through is not None and self._through[0] in (self.running, current())
        return self._through[1] if is_known else None

    def open(self) -> None:
        """Notes that the pass that runs makes the open gradients."""
        self.opened = self.running
        self._graphs.clear()

    def opened_at(self, first: nn.Parameter) -> None:
        """Notes the thread of the open pass. ``first``: the first parameter with a gradient. On a device, hooks run on
        a thread of autograd's own, not on the one that has called backward."""
        self._opening_thread = threading.get_ident() if first.is_cpu else self._forward_thread

    def end(self) -> None:
        """Notes the end of the pass that makes the open gradients."""
        self._opening_thread = None

    def refuse_inside(self) -> None:
        """Raises if the pass that makes the open gradients calls this, since it would use them too early."""
        if current() != NO_TASK and self.running == self.opened:
            raise refused(
                "a gradient is used inside backward, before those of all parameters exist; use it after backward"
            )

    def refuse_elsewhere(self) -> None:
        """Raises if another thread is in the pass that makes the open gradients, as far as this thread can know."""
        if self._opening_thread is not None and self._opening_thread != threading.get_ident():
            raise refused(
                "a gradient is used while another thread is in backward, before those of all parameters exist; use it "
                "after backward"
            )


def current() -> int:
    """The task of the backward pass that this thread is in."""
    return torch._C._current_graph_task_id()
