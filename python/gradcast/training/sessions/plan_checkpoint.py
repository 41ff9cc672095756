"""The state of a session with a plan in checkpoints: plan, profile, and what rounding has left of gradients."""

import logging
from typing import Any

from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.training.plan import agreement
from gradcast.training.sessions.facets import Checkpoint, Report
from gradcast.training.sessions.step_cycle import StepCycle
from gradcast.training.step import residuals
from gradcast.training.step.layout_change import change_layout
from gradcast.training.step.module_buffers import ModuleBuffers

_log = logging.getLogger("gradcast")


class PlanCheckpoint(Checkpoint):
    def __init__(self, report: Report, cycle: StepCycle, module_buffers: ModuleBuffers | None) -> None:
        super().__init__(cycle.controller.mode, cycle.controller.group, report)
        self._cycle, self._controller, self._module_buffers = cycle, cycle.controller, module_buffers
        self._weights, self._exchange = cycle.gradients.weights, cycle.gradients.exchange

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
        self._cycle.flush()
        what = "handle.load_state_dict()"
        with self._exchange.watch.waiting(f"{what} on every rank"), self._group.together(what):
            self._load_together(state)

    def _load_together(self, state: dict[str, Any]) -> None:
        exchange, group, controller = self._exchange, self._group, self._controller
        dropped = residuals.restore(exchange.buffers, group, state)
        if dropped is not None:
            _log.warning("what rounding has left of earlier gradients is dropped on rank %d: %s", group.rank, dropped)
        state = group.from_first({key: value for key, value in state.items() if key != residuals.KEY})
        here = MeasuredExchange(group.hosts, exchange.form, exchange.wire)
        with self._cycle.lock:
            self._weights.go_on_from(state.get("mean_weight"))  # early states have none
        adapts = controller.may_correct_plans
        reason = agreement.reason_to_measure(state, exchange.buffers, self._mode, here, adapt=adapts)
        if reason is not None:
            group.info("the plan of the checkpoint is not followed, this training measures for itself: %s", reason)
            return
        if self._module_buffers is not None:
            self._module_buffers.send_before_forward()
        change_layout(
            self._cycle.gradients.states, exchange, lambda: controller.adopt(state, here), tells=group.rank == 0
        )
