"""What a session of two or more workers consists of, and what it tells and saves; session.py has what happens in a
step."""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.training.compat import extension, graph_capture
from gradcast.training.measure.early_waits import EarlyWaits
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.plan import agreement
from gradcast.training.plan.balancing import Balancing
from gradcast.training.plan.loop import PlanLoop
from gradcast.training.ranks.group import backend_of
from gradcast.training.ranks.group_pool import operations_begun
from gradcast.training.ranks.registered_memory import registered_memory
from gradcast.training.sessions.kinds import Setup, TrainingSession, require_attached
from gradcast.training.sessions.stats import plan_stats
from gradcast.training.sessions.warmup_reads import WarmupReads
from gradcast.training.step import clipping, residuals
from gradcast.training.step.gradient_buffers import GradientBuffers, GradientRange
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.layout_change import change_layout
from gradcast.training.step.module_buffers import BUFFERS_NAME, ModuleBuffers
from gradcast.training.step.optimizer_steps import OptimizerSteps
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.rank_consistency import RankConsistency
from gradcast.training.step.sent_tensors import sent_tensors
from gradcast.training.step.step_message import StepMessage
from gradcast.training.step.unseen_waits import UnseenWaits
from gradcast.training.step.weights import GivenWeights, StepWeights

_log = logging.getLogger("gradcast")


class SessionBase(TrainingSession):
    """The parts of a session, wired to one another."""

    def __init__(self, setup: Setup, parameters: dict[str, nn.Parameter], given: GivenWeights) -> None:
        """``parameters``: those whose gradients travel. They may change; ``setup`` and ``given`` stay."""
        accepted, optimizers, options = setup.accepted, setup.optimizers, setup.options
        group, callbacks = setup.group, setup.callbacks
        super().__init__(group, [] if accepted.ddp is None else [accepted.ddp])
        self.mode = "overlap" if optimizers else "hook"
        self._lock = threading.RLock()
        self._told: set[str] = set()
        self._table = extension.load().GradientTable(list(parameters), list(parameters.values()))
        self._states: list[ParameterState] = self._table.states
        modules = accepted.modules_with_buffers(options.broadcast_buffers)
        sent = sent_tensors(parameters, modules, options, group.device)
        registers = options.nccl.register_buffers and backend_of(group.shared, group.device.type) == "nccl"
        allocating = registered_memory(group) if registers else contextlib.nullcontext
        self.buffers = GradientBuffers(list(sent), list(sent.values()), group.world_size, options.wire, allocating)
        self.exchange = GradientExchange(self.buffers, group, options, self._table)
        self.trace = StepTrace(options.watch.timeline_steps)
        self._waits = EarlyWaits(self.trace, len(self._states), self._warn_once)
        message = StepMessage(self.buffers, len(self._states), group.world_size)
        self._consistency = RankConsistency(self.exchange, message, group, options.compare_every)
        index = list(sent).index(BUFFERS_NAME) if BUFFERS_NAME in sent else None
        self._module_buffers = ModuleBuffers(modules, index, self.exchange, group) if modules else None
        self._weights = StepWeights(given, self.exchange, group)
        self._clipping = None
        if options.clip.norm is not None:
            self._clipping = clipping.NormClipping(
                self._states, self.buffers, message, options, group.world_size, self._weights.factor
            )
        travelling = None if index is None else self._module_buffers
        self._gradients = GradientHooks(
            self._states,
            self._table,
            self.exchange,
            message,
            self._weights,
            self._clipping,
            travelling,
            self._consistency,
        )
        by_value = None if options.clip.value is None else clipping.ValueClipping(options)
        self._steps = OptimizerSteps(
            optimizers,
            accepted.read,
            self._gradients,
            self.trace,
            self._waits,
            self._warn_once,
            by_value,
            callbacks,
            functools.partial(operations_begun, group.shared),
        )
        self._callbacks = callbacks
        self.on_callbacks_changed()
        self._unseen = UnseenWaits(accepted.module, self._steps, lambda: self._lock, self._warn_once)
        self.controller = PlanLoop(
            self.exchange, message, accepted.module, group, self.trace, self._waits, self.mode, options, self._clipping
        )
        self._reads = WarmupReads(self.controller, self._steps)

    @property
    def profile(self) -> _core.Profile | None:
        return self.controller.profile

    @property
    def plan(self) -> _core.Plan:
        require_attached(self)
        return self.controller.agreed.in_force

    def alarms(self) -> list[Alarm]:
        return self.controller.alarms.alarms.all

    @property
    def plan_version(self) -> int:
        require_attached(self)
        return self.controller.version

    @property
    def measuring(self) -> bool:
        require_attached(self)
        return self.controller.warmup is not None

    @property
    def layout(self) -> tuple[GradientRange, ...]:
        require_attached(self)
        return self.buffers.layout

    def share_out(self, balancing: Balancing) -> None:
        """The ranks' shares of a batch follow what they report."""
        reports = self.controller.meter.reports
        balancing.begin_session(self.exchange, reports.lag, reports.turns)
        self.controller.balancing = balancing

    def on_callbacks_changed(self) -> None:
        for state in self._states if self.mode == "overlap" else ():
            state.owned = self._callbacks.owned(state.name)

    def stats(self) -> dict[str, Any]:
        values = super().stats() | plan_stats(self.controller)
        values |= {"grad_norm": self._steps.grad_norm, "clipping": self._clipping and self._clipping.stats()}
        return values | {"waits": self._waits.stats()}

    def timeline_events(self) -> list[dict[str, Any]]:
        return self.trace.events(self.group.rank, self.exchange.timeline())

    def plan_text(self, profile_path: str | None) -> str:
        require_attached(self)
        return agreement.plan_text(self.plan, self.controller.agreed.profile, profile_path)

    @property
    def is_sending(self) -> bool:
        return self.exchange.busy

    @property
    def saves_anew(self) -> bool:
        return bool(self.buffers.residuals)

    @property
    def mean_weight(self) -> float | None:
        with self._lock:
            return self._weights.reference

    def state_dict(self) -> dict[str, Any]:
        unseen = {self._states[index].name: read for index, read in self.controller.unseen_reads.items()}
        if self.buffers.residuals:
            self.flush()
        state = agreement.checkpoint_state(self.controller.agreed, self.profile, self.mode, unseen)
        return state | {"mean_weight": self.mean_weight} | residuals.saved(self.buffers, self.group)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.flush()
        what = "handle.load_state_dict()"
        with self.exchange.watch.waiting(f"{what} on every rank"), self.group.together(what):
            self._load_together(state)

    def _load_together(self, state: dict[str, Any]) -> None:
        dropped = residuals.restore(self.buffers, self.group, state)
        if dropped is not None:
            _log.warning(
                "what rounding has left of earlier gradients is dropped on rank %d: %s", self.group.rank, dropped
            )
        state = self.group.from_first({key: value for key, value in state.items() if key != residuals.KEY})
        here = MeasuredExchange(self.group.hosts, self.exchange.form, self.exchange.wire)
        with self._lock:
            self._weights.go_on_from(state.get("mean_weight"))  # early states have none
        adapts = self.controller.proposer.may_correct
        reason = agreement.reason_to_measure(state, self.buffers, self.mode, here, adapt=adapts)
        if reason is not None:
            self.group.info("the plan of the checkpoint is not followed, this training measures for itself: %s", reason)
            return
        if self._module_buffers is not None:
            self._module_buffers.send_before_forward()
        self._change_layout(lambda: self.controller.adopt(state, here))

    def _warn_once(self, message: str, *arguments: Any) -> None:
        if message not in self._told:
            self._told.add(message)
            self.group.warning(message, *arguments)

    def _refuse_capture(self) -> None:
        graph_capture.refuse_capture(self.buffers.flats[0].device)

    def _host_waited_until_ns(self) -> int | None:
        """Waits for blocks that still travel when the host comes here: because forward needed none of what they carry,
        or on a device, where they may go on travelling unless their times count. None if there were none."""
        start_ns = time.perf_counter_ns()
        times_blocks = self.controller.phase.times_blocks
        if not (self.exchange.wait_until_idle() if times_blocks else self.exchange.wait_for_turn()):
            return None
        end_ns = time.perf_counter_ns()
        self.trace.span("wait", start_ns, end_ns)
        return end_ns

    def _measured(self, category: str) -> contextlib.AbstractContextManager:
        """Around what is not compute in the sense of a profile; ``category``: see Stopwatch.timed."""
        warmup = self.controller.warmup
        return contextlib.nullcontext() if warmup is None else warmup.stopwatch.timed(category)

    def _change_layout(self, change: Callable[[], None]) -> None:
        change_layout(self._states, self.exchange, change, tells=self.group.rank == 0)
