"""Gradients of a pipeline's stages: of a schedule's backward passes, one per micro-batch and stage, each stage's last
one sends the gradients of that stage.

A step opens where the first stage comes to its last backward pass, and ends where the last stage has ended its own.
Until then the gradients of the other stages add up on this rank, as inside no_sync(). Gradients that a schedule makes
without autograd's accumulation (zero bubble) reach no hook, and are sent when the stage's last pass has returned.

If FSDP shards the stages, it reduces a stage's gradients behind its last pass, which sends them.

The division by the number of micro-batches, which would wait for the mean, is made where the mean has arrived.
"""

import contextlib
import functools
import itertools
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from gradcast.errors import refused
from gradcast.training.compat.pipeline_stages import Makes, Stage
from gradcast.training.step.backward_passes import NO_TASK, BackwardPasses, ForwardPass
from gradcast.training.step.dtensor_gradients import DTensorGradients
from gradcast.training.step.sharded_gradients import ShardedGradients

_reductions = itertools.count(NO_TASK - 1, -1)


class StagePasses(BackwardPasses):
    """The backward passes of schedules. ``stages``: of this rank. ``members``: their parameters. ``stage``: whose pass
    runs; None outside of schedules. ``hooks_send``: in the stage's last pass, unless it makes gradients by hand, when
    even one that a hook has seen may not be complete. FSDP's reduction of a stage counts as a pass, with a number below
    NO_TASK."""

    def __init__(self, stages: Sequence[Stage], members: Sequence[Collection[int]]) -> None:
        super().__init__()
        self.stages, self.members = stages, members
        self.stage: int | None = None
        self.hooks_send = False
        self._complete: set[int] = set()

    @property
    def task(self) -> int:
        return self.running if self.running < NO_TASK else super().task

    def open(self) -> None:
        super().open()
        self._complete.clear()
        self.goes_on = True

    @contextlib.contextmanager
    def running_of(self, stage: int, makes: Makes, *, is_last: bool) -> Iterator[None]:
        """Context of one pass. A step whose schedule has failed does not go on."""
        self.goes_on &= stage not in self._complete  # else a new schedule
        self.stage, self.hooks_send = stage, is_last and makes != Makes.BY_HAND
        if makes == Makes.BY_REDUCTION:
            self.running = next(_reductions)
        try:
            yield
        except BaseException:
            self.goes_on = False
            raise
        finally:
            self.stage = None
            if makes == Makes.BY_REDUCTION:
                self.running = NO_TASK

    def refuse_inside(self) -> None:
        super().refuse_inside()
        if self.goes_on:
            raise refused(
                "a gradient is used inside of a pipeline's schedule, before those of all stages exist; use it behind "
                "schedule.step()"
            )

    def complete(self, stage: int) -> None:
        """Notes that all gradients of the stage have been sent."""
        self.running = NO_TASK
        self._complete.add(stage)
        self.goes_on = len(self._complete) < len(self.members)

    def reduces(self, listener: Any, forward: ForwardPass | None) -> bool:
        return self.stage is not None and self.hooks_send and listener.reduces(None)


class PipelineGradients(DTensorGradients):
    """``stages``: of this rank. ``parts``: the arguments of GradientHooks."""

    passes: StagePasses

    def __init__(self, stages: Sequence[Stage], *parts: Any) -> None:
        super().__init__(*parts)
        index_of = {id(state.parameter): state.index for state in self.states}
        members = [[index_of[id(e)] for e in stage.parameters if id(e) in index_of] for stage in stages]
        self.passes = StagePasses(stages, members)

    def install(self, listener: Any) -> list[Any]:
        return [*super().install(listener), *_Schedule(self).install()]

    def _on_gradient(self, index: int) -> None:
        if self.passes.stage is None and self.listener.reduces(None):
            raise refused(
                "a backward pass through a pipeline's stage runs outside of its schedule, or in that of another stage "
                "object, so gradcast does not know when its gradients are complete; run it by schedule.step() of the "
                "stage that attach was given (detach and attach again for a new one), or inside handle.no_sync()"
            )
        super()._on_gradient(index)

    def _open_step(self, first: Any = None) -> None:
        super()._open_step(first)
        self.arrived.divisors.clear()

    def _on_backward_end(self, task: int) -> None:
        """Ends one pass through autograd, without which the stage may go on."""
        if task == self.passes.running:
            self._clear_unsent()
            self.passes.running = NO_TASK


class ShardedPipelineGradients(PipelineGradients, ShardedGradients):
    """The same where FSDP shards the stages. ``parts``: the arguments of ShardedGradients."""


class _Schedule:
    """The calls of the stages by a schedule."""

    def __init__(self, gradients: PipelineGradients) -> None:
        self._gradients: Any = weakref.proxy(gradients)  # a stage must not keep its session
        self._by_hand: set[int] = set()  # stages of which the open step has gradients that no hook has seen
        self._sent: set[int] = set()  # stages whose last pass has sent their gradients

    def install(self) -> Sequence[Stage]:
        stages = self._gradients.passes.stages
        for number, stage in enumerate(stages):
            stage.take_over(functools.partial(self._around, number), functools.partial(self._divide, number))
        return stages

    @contextlib.contextmanager
    def _around(self, stage: int, makes: Makes, *, is_last: bool) -> Iterator[None]:
        gradients = self._gradients
        self._sent.discard(stage)
        if makes == Makes.BY_HAND:
            self._by_hand.add(stage)
        with gradients.passes.running_of(stage, makes, is_last=is_last):
            yield
            if is_last and gradients.listener.reduces(None):
                self._sent.add(stage)
                self._end_stage(stage)

    def _divide(self, stage: int, divisor: int) -> bool:
        """Divides the means of a stage's gradients where they arrive. Returns False if they have arrived, or if
        none are sent."""
        gradients = self._gradients
        if isinstance(gradients, ShardedPipelineGradients):
            kept = gradients._sharded.kept  # of schedules in no_sync(); torch divides .grad
            for each in gradients.passes.stages[stage].parameters:
                if each in kept:
                    kept[each].div_(divisor)
        if stage not in self._sent or not gradients.open or gradients.values_used:
            return False
        gradients.arrived.divisors |= dict.fromkeys(gradients.passes.members[stage], divisor)
        return True

    @torch.no_grad()
    def _end_stage(self, stage: int) -> None:
        """Sends the gradients of a stage that no hook has sent."""
        gradients, passes = self._gradients, self._gradients.passes
        members = [gradients.states[index] for index in passes.members[stage]]
        gradients._clear_unsent()
        passes.running = NO_TASK
        if not (gradients.open and passes.goes_on):  # no hook has run
            if gradients.open:
                gradients.listener.wait_for_gradients()
            gradients._open_step(next((state for state in members if state.parameter.grad is not None), None))
            if not gradients.open:
                return  # the listener has given the step up
        gradients._keep_accumulated_apart()
        idle = {state.index for state in gradients.table.idle()}
        unmade = [state for state in members if state.index in idle]
        if stage in self._by_hand:
            self._by_hand.remove(stage)
            gradients.used_unsynchronized |= {each.index for each in unmade if each.parameter.grad is not None}
        gradients._send_missing(some=unmade)
        passes.complete(stage)
        if not passes.goes_on:
            passes.ended = passes.opened
            gradients._send_missing()
            passes.end()
            gradients.listener.on_backward_end()
