"""Gradients of a pipeline's stages: of a schedule's backward passes, one per micro-batch and stage, each stage's last
one sends the gradients of that stage.

A step opens where the first stage comes to its last backward pass, and ends where the last stage has ended its own.
Until then the gradients of the other stages add up on this rank, as inside no_sync(). Gradients that a schedule makes
without autograd's accumulation (zero bubble) reach no hook, and are sent when the stage's last pass has returned.

The division by the number of micro-batches, which would wait for the mean, is made where the mean has arrived.
"""

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradcast.errors import refused
from gradcast.training.compat.pipeline_stages import Stage
from gradcast.training.step.backward_passes import NO_TASK, ForwardPass
from gradcast.training.step.dtensor_gradients import DTensorGradients


class _Pass(NamedTuple):
    """A backward pass that a schedule runs. ``stage``: its position."""

    stage: int
    is_last: bool


class PipelineGradients(DTensorGradients):
    """``stages``: of this rank. ``parts``: the arguments of GradientHooks."""

    def __init__(self, stages: Sequence[Stage], *parts: Any) -> None:
        super().__init__(*parts)
        self._stages = stages
        self._members = [{id(parameter) for parameter in stage.parameters} for stage in stages]
        self._ended: set[int] = set()  # stages whose last backward pass in the open step has ended
        self._by_hand: set[int] = set()  # stages of which the schedule has made gradients by hand
        self._pass: _Pass | None = None  # the one that runs

    def install(self, listener: Any) -> list[Any]:
        own = weakref.proxy(self)  # a stage must not keep its session
        for number, stage in enumerate(self._stages):
            around = lambda number=number, **kind: own.backward(number, **kind)  # noqa: E731
            stage.take_over(around, functools.partial(lambda number, by: own.divide(number, by), number))
        return [*super().install(listener), *self._stages]

    @property
    def goes_on(self) -> bool:  # type: ignore[override]
        return self.open and len(self._ended) < len(self._stages)

    @contextlib.contextmanager
    def backward(self, stage: int, *, is_last: bool, by_hand: bool) -> Iterator[None]:
        """Context of one backward pass of a schedule."""
        self._pass = _Pass(stage, is_last)
        if by_hand:
            self._by_hand.add(stage)
        try:
            yield
            if is_last and self._reduces(None):
                self._end_stage(stage)
        finally:
            self._pass = None

    def divide(self, stage: int, divisor: int) -> bool:
        """Divides the means of a stage's gradients. Returns False where they have arrived."""
        if not self.open or self.values_used:
            return False
        self.arrived.divisors |= dict.fromkeys((state.index for state in self._of(stage)), divisor)
        return True

    def _of(self, stage: int) -> list[Any]:
        return [state for state in self.states if id(state.parameter) in self._members[stage]]

    def _reduces(self, forward: ForwardPass | None) -> bool:
        if not super()._reduces(None):
            return False
        if self._pass is None:
            raise refused(
                "a backward pass through a pipeline's stage runs outside of its schedule, so gradcast does not know "
                "when its gradients are complete; run it by schedule.step(), or inside handle.no_sync()"
            )
        return self._pass.is_last

    def _open_step(self, first: Any = None) -> None:
        super()._open_step(first)
        self._ended.clear()
        self.arrived.divisors.clear()

    def _unarmed(self) -> Collection[int]:
        assert self._pass is not None, "a schedule runs"
        members = self._members[self._pass.stage]
        others = (state.index for state in self.states if id(state.parameter) not in members)
        return {*super()._unarmed(), *others}

    def _on_backward_end(self, task: int) -> None:
        """Ends one pass through autograd; the stage may go on without it."""
        if task == self.passes.running:
            self._clear_unsent()
            self.passes.running = NO_TASK

    @torch.no_grad()
    def _end_stage(self, stage: int) -> None:
        """Sends the gradients of a stage that no hook has sent."""
        self._clear_unsent()
        self.passes.running = NO_TASK
        if not self.goes_on:  # no hook has run
            if self.open:
                self.listener.wait_for_gradients()
            self._open_step(next((state for state in self._of(stage) if state.parameter.grad is not None), None))
            if not self.open:
                return  # the listener has given the step up
        self._keep_accumulated_apart()
        unmade = [state for state in self.table.idle() if id(state.parameter) in self._members[stage]]
        if stage in self._by_hand:
            self._by_hand.remove(stage)
            self.used_unsynchronized |= {each.index for each in unmade if each.parameter.grad is not None}
        self._send_unmade(unmade)
        self._ended.add(stage)
        if not self.goes_on:
            self.passes.ended = self.passes.opened
            self._send_missing()
            self.passes.end()
            self.listener.on_backward_end()
