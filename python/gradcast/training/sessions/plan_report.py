"""The report of a session with a plan."""

import statistics
from typing import Any

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.training.measure.step_trace import median_ms
from gradcast.training.plan import agreement
from gradcast.training.plan.controller import PlanController
from gradcast.training.sessions.facets import Report
from gradcast.training.sessions.kinds import require_attached
from gradcast.training.step.gradient_buffers import GradientRange
from gradcast.training.step.optimizer_steps import OptimizerSteps


class PlanReport(Report):
    """``released``: gradcast has left the module, which the last steps' numbers outlive."""

    released = False

    def __init__(self, controller: PlanController, steps: OptimizerSteps) -> None:
        self._controller, self._steps = controller, steps
        self.trace = controller.trace

    @property
    def profile(self) -> _core.Profile | None:
        return self._controller.profile

    @property
    def plan(self) -> _core.Plan:
        require_attached(self)
        return self._controller.agreed.in_force

    @property
    def plan_version(self) -> int:
        require_attached(self)
        return self._controller.version

    @property
    def measuring(self) -> bool:
        require_attached(self)
        return self._controller.warmup is not None

    @property
    def layout(self) -> tuple[GradientRange, ...]:
        require_attached(self)
        return self._controller.exchange.buffers.layout

    @property
    def is_sending(self) -> bool:
        return self._controller.exchange.busy

    def alarms(self) -> list[Alarm]:
        return self._controller.alarms.alarms.all

    def timeline_events(self) -> list[dict[str, Any]]:
        return self.trace.events(self._controller.group.rank, self._controller.exchange.timeline())

    def plan_text(self, profile_path: str | None) -> str:
        return agreement.plan_text(self.plan, self._controller.agreed.profile, profile_path)

    def stats(self) -> dict[str, Any]:
        clipping = self._steps.gradients.clipping
        values = self._plan_stats() | self._controller.alarms.stats()
        values |= {"grad_norm": self._steps.grad_norm, "clipping": clipping and clipping.stats()}
        return values | {"waits": self._steps.waits.stats()}

    def _plan_stats(self) -> dict[str, Any]:
        controller = self._controller
        agreed, compared, exchange = controller.agreed, controller.comparison, controller.exchange
        counters = exchange.counters()
        plan = agreed.in_force
        records = [record for record in self.trace.complete if record.plan is plan]
        values = {
            "plan_version": controller.version,
            "policy": plan.policy,
            "blocks": len(plan.blocks),
            "bytes": sum(block.size_bytes for block in plan.blocks),
            "wire": exchange.wire,
            "wire_bytes": exchange.wire_bytes(plan),
            "gradient_buffer_bytes": exchange.buffers.size_bytes,
            "packed_bytes": max((block.size_bytes for block in plan.blocks if len(block.ranges) > 1), default=0),
            "record_bytes": counters.record_bytes,
            "engine_us_per_block": counters.loop_ns / 1e3 / counters.blocks if counters.blocks else None,
            "runs_as_ddp": agreed.runs_as_baseline,
            "tries_ddp": controller.phase.on_baseline and not agreed.runs_as_baseline,
            "expected_gain": None if agreed.expectation is None else agreed.expectation.gain,
            "measured_gain": compared.baseline_ns / compared.plan_ns if compared and compared.baseline_count else None,
            "slowest_rank": controller.phase.slowest_rank,
            "exposed": controller.exposed.stats(),
            "measured_ms": median_ms([record.end_ns - record.start_ns for record in records]),
            "exposed_ms": median_ms([record.total_ns("wait") for record in records]),
            "update_calls": statistics.median_high(record.update_calls for record in records) if records else None,
        }
        if self.profile is not None and controller.warmup is None:  # nothing is predicted for a warm-up's plans
            typical = agreed.typical_step
            values |= {"predicted_ms": typical.step_ns / 1e6, "bound_ms": typical.bound_ns / 1e6}
        return values
