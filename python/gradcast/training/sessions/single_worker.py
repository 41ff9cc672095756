"""A single worker: nothing is sent. The warm-up steps are measured, so that their profile can be used to plan for more
workers (``gradcast simulate``). After them gradcast takes no part in the training loop.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import nn

from gradcast.training.compat.module_hooks import around_forward
from gradcast.training.plan.warmup import Warmup
from gradcast.training.sessions.kinds import Setup, TrainingSession
from gradcast.training.step.clipping import ClipOnce
from gradcast.training.step.gradient_buffers import GradientSizes
from gradcast.training.step.partial_step import intercepted


class SingleWorkerSession(TrainingSession):
    early_clipping: ClipOnce | None = None

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.group, "overlap" if setup.optimizers else "hook")
        accepted, options, self.callbacks = setup.accepted, setup.options, setup.callbacks
        self._module = accepted.module  # the handle refers to it
        parameters = accepted.parameters
        values = list(parameters.values())
        self._seen: set[int] = set()  # parameters that the open backward pass has reached
        sizes, order = GradientSizes(list(parameters), values, options.wire), range(len(values))
        self._warmup: Warmup | None = Warmup(sizes, accepted.module, self.group, self.mode, options, order=order)
        if options.clips:
            self.early_clipping = ClipOnce(accepted.called, options)
        self._handles = around_forward(accepted.called, self._before_forward, self._after_forward)
        for index, parameter in enumerate(values):
            hook = functools.partial(self._on_gradient, index)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._interceptions = intercepted(setup.optimizers, self._on_step)

    def release(self, *, reusable: bool) -> None:
        self._end_warmup()
        self._leave_steps()
        if self.early_clipping is not None:
            self.early_clipping.remove()
        self.released = True

    def _end_warmup(self) -> None:
        if self._warmup is not None:
            self._warmup.release()
            self._warmup = None
            for handle in self._handles:
                handle.remove()

    def _leave_steps(self) -> None:
        for interception in self._interceptions:
            interception.remove()

    def _before_forward(self, module: nn.Module, _: Any, compiled: bool) -> None:
        if not compiled and torch.is_grad_enabled() and module.training:
            self._warmup.watch_reads(lambda _: None)

    def _after_forward(self, _module: nn.Module, output: Any, _compiled: bool) -> None:
        self._warmup.stop_watching()
        self._warmup.forward_ended(output)
        self._seen.clear()  # not empty if the last backward pass failed

    def _on_gradient(self, index: int, _: Any) -> None:
        if not self._seen:
            self._warmup.stopwatch.backward_started()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        self._seen.add(index)
        self._warmup.stopwatch.ready(index, used=True)

    def _on_backward_end(self) -> None:
        if not self._seen:
            return
        self._warmup.stopwatch.backward_ended()
        self._seen.clear()
        if self.mode == "hook":
            self._end_step()

    def _on_step(self, number: int) -> None:
        if self.early_clipping is not None:
            self.early_clipping.before_step()
        with contextlib.nullcontext() if self._warmup is None else self._warmup.stopwatch.timed("update"):
            self._interceptions[number].run_whole()
        if self._warmup is not None and number == len(self._interceptions) - 1:
            self._end_step()

    def _end_step(self) -> None:
        self.progress.steps += 1
        if self._warmup.step_ended(None) is None:
            self.report.profile = self._warmup.measured([]).profile
            self._end_warmup()
            if self.early_clipping is None:
                self._leave_steps()
