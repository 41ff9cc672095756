"""The report and the checkpoints of a session with a plan."""

import logging
import statistics
from typing import Any

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.training.measure.step_trace import median_ms
from gradcast.training.plan import agreement
from gradcast.training.plan.loop import PlanLoop
from gradcast.training.sessions.facets import Checkpoint, Reduction, Report
from gradcast.training.sessions.kinds import require_attached
from gradcast.training.sessions.step_cycle import StepCycle
from gradcast.training.step import residuals
from gradcast.training.step.gradient_buffers import GradientRange
from gradcast.training.step.layout_change import change_layout
from gradcast.training.step.module_buffers import ModuleBuffers
from gradcast.training.step.optimizer_steps import OptimizerSteps

_log = logging.getLogger("gradcast")


class PlanReport(Report):
    """``reduced_by_ddp``: DDP reduces the gradients by itself."""

    reduced_by_ddp = False

    def __init__(self, controller: PlanLoop, steps: OptimizerSteps) -> None:
        self._controller, self._steps = controller, steps
        self.trace = controller.meter.trace

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
        controller = self._controller
        agreed, compared, exchange = controller.agreed, controller.comparison, controller.exchange
        counters, clipping = exchange.counters(), self._steps.gradients.clipping
        plan = agreed.in_force
        records = [record for record in self.trace.complete if record.plan is plan]
        values = {
            "plan_version": controller.version,
            "policy": plan.policy,
            "blocks": len(plan.blocks),
            "bytes": sum(block.size_bytes for block in plan.blocks),
            "wire": exchange.buffers.wire,
            "wire_bytes": exchange.wire_bytes(plan),
            "gradient_buffer_bytes": exchange.buffers.size_bytes,
            "packed_bytes": max((block.size_bytes for block in plan.blocks if len(block.ranges) > 1), default=0),
            "record_bytes": counters.record_bytes,
            "engine_us_per_block": counters.loop_ns / 1e3 / counters.blocks if counters.blocks else None,
            "runs_as_ddp": agreed.runs_as_baseline,
            "reduced_by_ddp": self.reduced_by_ddp,
            "tries_ddp": (controller.phase.on_baseline or self.reduced_by_ddp) and not agreed.runs_as_baseline,
            "expected_gain": None if agreed.expectation is None else agreed.expectation.gain,
            "measured_gain": compared.baseline_ns / compared.plan_ns if compared and compared.baseline_count else None,
            "slowest_rank": controller.phase.slowest_rank,
            "exposed": controller.meter.exposed.stats(),
            "measured_ms": median_ms([record.end_ns - record.start_ns for record in records]),
            "exposed_ms": median_ms([record.total_ns("wait") for record in records]),
            "update_calls": statistics.median_high(record.update_calls for record in records) if records else None,
            "grad_norm": self._steps.clipping.grad_norm,
            "clipping": clipping and clipping.record.stats(),
            "waits": self._steps.waits.stats(),
        }
        if self.profile is not None and controller.warmup is None:  # nothing is predicted for a warm-up's plans
            typical = agreed.typical_step
            values |= {"predicted_ms": typical.step_ns / 1e6, "bound_ms": typical.bound_ns / 1e6}
        return values | controller.alarms.stats()


class PlanCheckpoint(Checkpoint):
    def __init__(self, report: Report, cycle: StepCycle, module_buffers: ModuleBuffers | None) -> None:
        super().__init__(cycle.controller.proposer.mode, cycle.controller.group, report)
        self._cycle, self._controller, self._module_buffers = cycle, cycle.controller, module_buffers
        self._weights, self._exchange = cycle.gradients.weights, cycle.gradients.exchange
        self.reduction = Reduction()

    @property
    def saves_anew(self) -> bool:
        return bool(self._exchange.buffers.residuals)

    @property
    def mean_weight(self) -> float | None:
        with self._cycle.lock:
            return self._weights.reference

    def state_dict(self) -> dict[str, Any]:
        names, controller = self._exchange.buffers.names, self._controller
        unseen = {names[index]: read for index, read in controller.unseen_reads.items()}
        if self.saves_anew:
            self._cycle.flush()
        state = agreement.checkpoint_state(controller.agreed, controller.profile, self._mode, unseen)
        return state | {"mean_weight": self.mean_weight} | residuals.saved(self._exchange.buffers, self._group)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reduction.take_back()
        self._cycle.flush()
        what = "handle.load_state_dict()"
        with self._exchange.watch.waiting(f"{what} on every rank"), self._group.together(what):
            self._load_together(state)

    def _load_together(self, state: dict[str, Any]) -> None:
        exchange, group, controller = self._exchange, self._group, self._controller
        dropped = residuals.restore(exchange.buffers, group, state)
        if dropped is not None:
            _log.warning("the residuals of earlier gradients are dropped on rank %d: %s", group.rank, dropped)
        state = group.from_first({key: value for key, value in state.items() if key != residuals.KEY})
        here = MeasuredExchange(group.hosts, exchange.form, exchange.buffers.wire, group.backend)
        with self._cycle.lock:
            self._weights.go_on_from(state.get("mean_weight"))  # early states have none
        adapts = controller.proposer.may_correct
        reason = agreement.reason_to_measure(state, exchange.buffers, self._mode, here, adapt=adapts)
        if reason is not None:
            group.info("the plan of the checkpoint is not followed, this training measures for itself: %s", reason)
            return
        if self._module_buffers is not None:
            self._module_buffers.send_before_forward()
        change_layout(
            self._cycle.gradients.states, exchange, lambda: controller.adopt(state, here), tells=group.rank == 0
        )
