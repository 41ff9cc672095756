"""Forward passes of a session: the waits before one begins, and the backward pass that belongs to it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gradcast.training.compat import graph_capture
from gradcast.training.measure.early_waits import Cause, where
from gradcast.training.sessions.step_cycle import StepCycle
from gradcast.training.step import pending
from gradcast.training.step.backward_passes import NO_TASK, ForwardPass, current
from gradcast.training.step.module_buffers import ModuleBuffers
from gradcast.training.step.unseen_waits import UnseenWaits


def is_evaluation(module: nn.Module) -> bool:
    """Returns whether a forward pass of the module that begins now is one of evaluation."""
    return not module.training and not torch.is_grad_enabled()


class ForwardPasses:
    """The hooks around the forward passes of one session. ``module_buffers``: those that gradcast sends; None without
    any."""

    def __init__(
        self,
        module: nn.Module,
        cycle: StepCycle,
        module_buffers: ModuleBuffers | None,
        warn_once: Callable[..., None],
        *,
        is_bare: bool,
    ) -> None:
        """``is_bare``: there is no DDP module, which says when buffers are sent."""
        self._own_buffers = module_buffers if is_bare else None
        self._cycle, self._controller, self._gradients = cycle, cycle.controller, cycle.gradients
        self.module_buffers, self._warn_once = module_buffers, warn_once
        self._unseen: UnseenWaits | None = UnseenWaits(module, cycle.steps, lambda: cycle.lock, warn_once)

    def leave(self) -> None:
        """Removes the hooks of modules and drops buffers that have arrived, until the next forward pass."""
        self._unseen.release()
        if self.module_buffers is not None:
            self.module_buffers.leave()

    def release(self) -> None:
        self._unseen.release()
        self._unseen = None  # the session, which a handle keeps, must not keep the module
        if self.module_buffers is not None:
            self.module_buffers.release()

    @property
    def is_synchronizing(self) -> bool:
        """True if the gradients of a forward pass that runs now are to be reduced."""
        return self._cycle.sends and not self._cycle.progress.no_sync_blocks.is_open

    def before(self, module: nn.Module, compiled: bool) -> None:
        """Prepares a forward pass of ``module``. ``compiled``: it is compiled as a whole, and not split."""
        cycle, controller = self._cycle, self._controller
        cycle.forward_time.is_seen = True
        training = module.training and torch.is_grad_enabled()
        if compiled and training and controller.proposer.mode == "overlap" and controller.warmup is None:
            # Compiled code has fixed the class of its parameters, so nothing shows which of them it reads.
            self._warn_once(
                "%s: the model is compiled as a whole, so its forward pass waits for all parameters; pass "
                "gradcast.Options(split_compiled=True) (and torch.compile no fullgraph=True), or compile its blocks "
                "(block.compile()), so that communication overlaps with it",
                where(),
            )
        cycle.stop_watching_reads()  # of the loop
        if compiled or torch.jit.is_tracing():
            with cycle.waits.at(Cause.COMPILED if compiled else Cause.COMPLETION):
                self.complete_step()
        if not cycle.awaits_in_backward:
            self._unseen.before_forward(controller.unseen_reads, training)
        if training:
            graph_capture.refuse_capture(controller.group.device)
        if torch.is_grad_enabled():
            self._gradients.before_forward()
        in_backward = current() != NO_TASK  # checkpoints run forward again
        if not in_backward:
            cycle.forget_late_updates()
        cycle.forward_time.begin(module)
        if not is_evaluation(module) and not in_backward and self._own_buffers is not None:
            self._bring_buffers(module)
        if training:
            cycle.reads.forward_begins(compiled=compiled)
        cycle.waits.forward_begins()
        if is_evaluation(module):
            self.before_evaluation()

    def complete_step(self) -> None:
        """Waits for the open gradients and runs all pending updates. torch.jit.trace() does not record that."""
        with self._cycle.lock, pending.not_traced():
            self._cycle.complete()

    def before_evaluation(self) -> None:
        """Runs all pending updates: with a pending weight, nn.MultiheadAttention and TransformerEncoder would choose
        other kernels, with other roundings, and other values at masked places."""
        cycle = self._cycle
        with cycle.lock, cycle.waits.at(Cause.PARAMETERS):
            cycle.reads.completed()
            if cycle.steps.due:
                cycle.steps.stream.on_parameter_read()
                cycle.steps.complete_all_updates()

    def _bring_buffers(self, module: nn.Module) -> None:
        """Copies rank 0's buffers for the forward pass that begins."""
        with self._waiting_for_buffers():
            needed = self._gradients.passes.is_expected(module)
            synchronizing = self.is_synchronizing and torch.is_grad_enabled()
            self._own_buffers.before_forward(module, synchronizing=synchronizing, needed=needed)

    def bring_buffers_of_ddp(self, *, is_usual: bool) -> bool:
        """Copies rank 0's buffers where DDP's forward sends them. Returns False if DDP has to, with nothing in flight.
        ``is_usual``: DDP would send the module's own buffers from rank 0."""
        if current() != NO_TASK:  # a checkpoint of the whole model: it has made no gradient yet
            return False
        with self._waiting_for_buffers():
            if self.module_buffers is not None and is_usual:
                self.module_buffers.in_place_of_ddp(now=self._controller.warmup is not None)
                return True
            if self._gradients.exchange.busy:
                if self._controller.proposer.mode == "overlap":
                    self._warn_once(
                        "DDP sends buffers in forward in a way of the program's (a buffer hook, or broadcast_buffers "
                        "set after attach), so forward waits for all gradients"
                    )
                self._gradients.exchange.wait_all()
            if self.module_buffers is not None:
                self.module_buffers.on_sent()
            return False

    @contextlib.contextmanager
    def _waiting_for_buffers(self) -> Iterator[None]:
        gradients = self._gradients
        with self._cycle.lock, self._cycle.trace.timed("wait"), pending.not_traced():
            if gradients.open and not gradients.all_sent:
                gradients.wait_for_all()  # the pass has failed, and other ranks wait for gradients that it has not sent
            yield

    def before_borrowed(self, module: nn.Module) -> None:
        """Prepares a call of ``module`` with other tensors in place of its own."""
        if self._own_buffers is not None and current() == NO_TASK:
            self._own_buffers.before_borrowed_forward(module)

    def after_borrowed(self, module: nn.Module, output: Any) -> None:
        self._watch_output(module, output)
        if self._own_buffers is not None and current() == NO_TASK:
            self._own_buffers.after_borrowed_forward(module)

    def after(self, module: nn.Module, output: Any) -> None:
        self._cycle.forward_time.end()
        if self._controller.warmup is not None:
            self._controller.warmup.forward_ended(output)
        self._watch_output(module, output)

    def after_inner(self, inner: nn.Module, output: Any) -> None:
        """Notes a call of ``inner`` that bypassed DDP, which does not reduce the backward pass through this output."""
        self._gradients.watch_output(inner, output, ForwardPass(synchronizes=False, training=inner.training))

    def _watch_output(self, module: nn.Module, output: Any) -> None:
        synchronizes = not self._cycle.progress.no_sync_blocks.is_open
        self._gradients.watch_output(module, output, ForwardPass(synchronizes, module.training))
