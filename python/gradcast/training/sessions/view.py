"""What a session has measured and decided, for gradcast's own tools: doctor, lab, benchmarks and tests.

``handle._view()`` returns it. The underscore is deliberate: everything public on a handle is a stable interface,
and this is none. Its fields change with the planner and the measurements.
"""

from gradcast import _core
from gradcast.training.measure.step_trace import StepRecord
from gradcast.training.plan.expectation import StepVariation
from gradcast.training.plan.loop import PlanLoop


class SessionView:
    """A view of a session with a plan; each property is read when it is asked for. Times are in ns."""

    def __init__(self, controller: PlanLoop) -> None:
        self._controller, self._exchange, self._trace = controller, controller.exchange, controller.meter.trace

    @property
    def profile(self) -> _core.Profile | None:
        """The profile that the plan was made from; None during the first warm-up."""
        return self._controller.profile

    @property
    def plan(self) -> _core.Plan:
        """The plan in force, or the DDP baseline while that is followed."""
        return self._controller.agreed.in_force

    @property
    def predicted_step_ns(self) -> float:
        """The predicted duration of a step under the plan that the ranks have agreed on."""
        return self._controller.agreed.typical_step.step_ns

    @property
    def variation(self) -> StepVariation:
        """The differences between the steps that the plan was made from."""
        return self._controller.agreed.variation

    @property
    def open_record(self) -> StepRecord | None:
        """The record of the current step; None before the first one."""
        return self._trace.current

    def completed_records(self, count: int) -> list[StepRecord]:
        """The records of the last completed steps, at most ``count``."""
        return self._trace.complete[-count:]

    def iterations(self) -> tuple[_core.IterationRecord, ...]:
        return self._exchange.timeline()

    @property
    def blocks_travelling(self) -> bool:
        """Whether blocks are on the network."""
        return self._exchange.busy
