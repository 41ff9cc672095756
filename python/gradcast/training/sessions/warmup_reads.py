"""Reads in the steps of a warm-up: when each parameter is first used, in forward or by the loop before it.

In a warm-up ``step()`` waits for everything. Uses that would wait otherwise count as early all the same, so that the
plan and its expectations are for the step as the program takes it.

Thread safety: under the session's lock.
"""

import contextlib
from collections.abc import Iterator, Sequence

from gradcast.training.measure.early_waits import Cause
from gradcast.training.plan.loop import PlanLoop
from gradcast.training.plan.warmup import Warmup
from gradcast.training.step.optimizer_steps import OptimizerSteps
from gradcast.training.step.parameter_state import ParameterState


class WarmupReads:
    """The reads of one session. Does nothing outside of its warm-ups."""

    def __init__(self, controller: PlanLoop, steps: OptimizerSteps) -> None:
        self._controller, self._states, self._steps = controller, steps.gradients.states, steps
        self._waits, self._trace = steps.waits, controller.meter.trace

    @property
    def _warmup(self) -> Warmup | None:
        return self._controller.warmup

    def stop(self) -> None:
        """Ends the watch: backward or another pass begins, so reads are no longer those of forward or of the loop."""
        if self._warmup is not None:
            self._warmup.stop_watching()

    @contextlib.contextmanager
    def around_step(self, number: int) -> Iterator[None]:
        """Context around a synchronous step of this optimizer."""
        reason, held = self._steps.reason_to_wait(number), self._steps.optimizers[number].held()
        before_ns = self._trace.waited_ns
        yield
        self._waits.step_waited(self._trace.waited_ns - before_ns)
        if reason is not None:
            self._note_early(reason, self._states)
        elif held:
            self._note_early(Cause.HELD, held)

    def loop_begins(self) -> None:
        """Watches the program's own reads until forward begins: all optimizers have taken their step."""
        if self._warmup is not None:
            self._warmup.watch_reads(self._on_early_read, early=True)

    def completed(self) -> None:
        """Notes that the program has completed the step, to read parameters in ways that cannot be seen."""
        if self._warmup is not None and self._warmup.watches_early:
            self._warmup.stop_watching()
            self._note_early(Cause.COMPLETION, self._states)

    def forward_begins(self, *, compiled: bool) -> None:
        """Watches forward of a training step. ``compiled``: of a model as a whole, whose reads are not seen."""
        if self._warmup is None:
            return
        if not compiled:
            self._warmup.watch_reads(lambda _: self._steps.stream.on_parameter_read())
        elif self._controller.proposer.mode == "overlap":
            self._warmup.read_by_compiled_model()
            self._waits.would_wait(Cause.COMPILED)
        # Norms and buffers are sent behind the parameters. Forward, or its first update, needs them.
        for index in range(len(self._states), len(self._controller.exchange.buffers.names)):
            self._warmup.stopwatch.read(index)

    def _on_early_read(self, count: int) -> None:
        self._steps.stream.on_parameter_read()
        self._waits.would_wait(Cause.PARAMETERS, count)

    def _note_early(self, cause: Cause, states: Sequence[ParameterState]) -> None:
        for state in states:
            self._warmup.stopwatch.read_early(state.index)
        if cause is not Cause.GRADIENTS:  # counted at their use, which has waited
            self._waits.would_wait(cause)
