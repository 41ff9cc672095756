"""A session of two or more workers. The way of one gradient, in overlap mode:

 1. csrc/transport/torch/gradient_table.cc   A hook behind the accumulation scales the gradient by the factor of
                                             weights.py into its view of a flat buffer, and hands it to the engine. Its
                                             phase is SENT from now on.
 2. step/gradient_hooks.py                   The first gradient of a backward pass opens the step. All views become
                                             pending: any use waits. Gradients that backward has not made are sent where
                                             it ends.
 3. sessions/step_cycle.py                   A step that opens follows the plan of plan/loop.py: one of the
                                             warm-up, the agreed one, or the DDP baseline.
 4. csrc/engine/loop_calls.cc                The engine is notified that the gradient is ready.
 5. csrc/engine/loop.cc                      Its thread starts blocks in the order of the plan.
 6. csrc/transport/torch/c10d_transport.cc   The process group all-reduces them.
 7. step/optimizer_steps.py                  ``step()`` returns at once. Its updates, the parameters and the optimizer's
                                             state are pending.
 8. step/pending.py                          The next forward pass reads the parameter, which step_cycle.py finishes.
 9. step/gradient_exchange.py                It waits for the blocks with the gradient.
10. step/deferred_optimizer.py               The user's optimizer updates all parameters whose gradients have arrived,
                                             which ``OptimizerSteps._update`` has picked, part by part.

In hook mode the session waits for all gradients where backward ends, and ``step()`` is the optimizer's own.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradcast.training.compat import extension, sharding
from gradcast.training.measure.early_waits import EarlyWaits
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.plan.balancing import Balancing
from gradcast.training.plan.loop import PlanLoop
from gradcast.training.ranks.group import Group, backend_of
from gradcast.training.ranks.registered_memory import registered_memory
from gradcast.training.sessions.forward import ForwardPasses
from gradcast.training.sessions.kinds import Setup, TrainingSession
from gradcast.training.sessions.open_blocks import NoSyncBlocks, Progress
from gradcast.training.sessions.plan_facets import PlanCheckpoint, PlanReport
from gradcast.training.sessions.step_cycle import FailureGuard, StepCycle
from gradcast.training.step import clipping, parameter_state, residuals
from gradcast.training.step.dtensor_gradients import DTensorGradients
from gradcast.training.step.early_clipping import EarlyClipping
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.module_buffers import BUFFERS_NAME, WHAT, ModuleBuffers
from gradcast.training.step.optimizer_steps import OptimizerSteps
from gradcast.training.step.pipeline_gradients import PipelineGradients, ShardedPipelineGradients
from gradcast.training.step.rank_consistency import RankConsistency
from gradcast.training.step.sent_tensors import sent_tensors
from gradcast.training.step.sharded_clipping import ShardedNormClipping, Shards
from gradcast.training.step.sharded_gradients import ShardedGradients
from gradcast.training.step.step_message import StepMessage
from gradcast.training.step.weights import GivenWeights, StepWeights


class Session(TrainingSession):
    """The parts of a session, wired to one another, from its first step to its end."""

    report: PlanReport
    checkpoint: PlanCheckpoint

    def __init__(
        self,
        setup: Setup,
        parameters: dict[str, nn.Parameter],
        given: GivenWeights,
        progress: Progress | None = None,
        guard: FailureGuard | None = None,
    ) -> None:
        """``parameters``: those whose gradients are sent. They may change from session to session; ``setup`` and
        ``given`` stay. ``progress``: of the previous session."""
        accepted, optimizers, options, group = setup.accepted, setup.optimizers, setup.options, setup.group
        ddps = [] if accepted.ddp is None else [accepted.ddp]
        super().__init__(group, "overlap" if optimizers else "hook", progress or Progress(NoSyncBlocks(ddps)))
        warn_once = _WarnOnce(group)
        table = extension.load().GradientTable(list(parameters), list(parameters.values()))
        states = table.states
        modules = accepted.modules_with_buffers(options.broadcast_buffers, self.mode)
        sent = sent_tensors(parameters, modules, options, group.device)
        registers = options.nccl.register_buffers and backend_of(group.shared, group.device.type) == "nccl"
        allocating = registered_memory(group) if registers else contextlib.nullcontext
        buffers = GradientBuffers(list(sent), list(sent.values()), group.world_size, options.wire, allocating)
        self.exchange = exchange = GradientExchange(buffers, group, options, table)
        trace = StepTrace(options.watch.timeline_steps)
        waits = EarlyWaits(trace, len(states), warn_once)
        message = StepMessage(buffers, len(states), group.world_size)
        consistency = RankConsistency(exchange, message, group, options.compare_every)
        index = list(sent).index(BUFFERS_NAME) if BUFFERS_NAME in sent else None
        module_buffers = ModuleBuffers(modules, index, exchange, group, warn_once) if modules else None
        weights = StepWeights(given, exchange, group)
        by_norm = None
        if options.clip.norm is not None:
            of_norm = states, buffers, message, options, group.world_size, weights.factor
            by_norm = _norm_clipping(self, setup, *of_norm)
        by_value = None if options.clip.value is None else clipping.ValueClipping(options)
        travelling = None if index is None else module_buffers
        parts = states, table, exchange, message, weights, by_norm, travelling, consistency
        gradients: GradientHooks
        if accepted.shards and accepted.stages:
            gradients = ShardedPipelineGradients(accepted.stages, accepted.shards, *parts)
        elif accepted.shards:
            gradients = ShardedGradients(accepted.shards, *parts)
        elif accepted.stages:
            gradients = PipelineGradients(accepted.stages, *parts)
        else:
            gradients = (DTensorGradients if sharding.has_parts(accepted.module) else GradientHooks)(*parts)
        steps = OptimizerSteps(
            optimizers,
            accepted.read,
            gradients,
            trace,
            waits,
            warn_once,
            by_value,
            setup.callbacks,
            functools.partial(_operations_begun, [group.shared, *sharding.mesh_groups(parameters.values())]),
        )
        self.controller = PlanLoop(exchange, message, accepted.module, group, trace, waits, self.mode, options, by_norm)
        guard = guard or FailureGuard()
        self.cycle = cycle = StepCycle(steps, self.controller, consistency, self.progress, guard, warn_once)
        self.forward = ForwardPasses(accepted.module, cycle, module_buffers, warn_once, is_bare=accepted.ddp is None)
        self.report = PlanReport(self.controller, steps)
        self.checkpoint = PlanCheckpoint(self.report, cycle, module_buffers)
        self._callbacks = setup.callbacks
        self.on_callbacks_changed()
        if options.clips:
            self.early_clipping = EarlyClipping(options, steps, cycle.lock, cycle.use_gradients)
        self._install()

    def _install(self) -> None:
        cycle, exchange = self.cycle, self.exchange
        self._handles = cycle.gradients.install(cycle)
        if exchange.buffers.residuals:
            self._handles.append(residuals.refuse_scalers_of(self.parameters, cycle))
        cycle.intercept_steps()

    # --- For the handle (TrainingSession) ---

    def flush(self, limit_s: float | None = None) -> None:
        self.cycle.flush(limit_s)

    def reach_fence(self) -> bool:
        return self.cycle.reach_fence()

    def finish(self, limit_s: float | None = None) -> None:
        self.flush(limit_s)
        self.controller.log_comparison()

    def complete_updates(self) -> None:
        with self.cycle.lock:
            self.cycle.steps.complete_all_updates()

    def pending_names(self) -> list[str]:
        with self.cycle.lock:
            return [state.name for state in self.cycle.steps.due]

    def on_callbacks_changed(self) -> None:
        for state in self.cycle.gradients.states if self.mode == "overlap" else ():
            state.owned = self._callbacks.owned(state.name)

    def send_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        self.flush()
        with self.exchange.watch.waiting(f"{WHAT} from rank 0"):
            super().send_buffers(buffers)
        if self.forward.module_buffers is not None:
            self.forward.module_buffers.on_sent()

    def close_at_exit(self, *, failed: bool) -> None:
        if not self.released:
            self._close_exchange(self.exchange, None if failed else self._finish_at_exit)

    def _finish_at_exit(self) -> bool:
        self.finish()
        return True

    # --- For the attachment ---

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [state.parameter for state in self.cycle.gradients.states]

    @property
    def long_frozen(self) -> set[int]:
        """Ids of parameters that have been frozen on all ranks for so many steps that they need not be sent; the same
        on every rank."""
        return set() if self.cycle.ddp_reduces else self.cycle.gradients.arrived.long_frozen

    def share_out(self, balancing: Balancing) -> None:
        """Adapts the ranks' shares of a batch to their reports."""
        if self.controller.rests:
            self.controller.end_rest()
        reports = self.controller.meter.reports
        balancing.begin_session(self.exchange, reports.lag, reports.turns)
        self.controller.balancing = balancing

    def send_nothing(self) -> None:
        """Takes part in a step without a backward pass on this rank."""
        with self.cycle.lock:
            self.cycle.gradients.send_nothing()

    def leave_to_ddp(self) -> list[nn.Parameter]:
        """Makes room for DDP: until ``take_back`` nothing of this session runs in a step, and the memory of its buffers
        is free. What was measured and planned stays. Returns the parameters that unsynchronized passes have used."""
        cycle, gradients = self.cycle, self.cycle.gradients
        used = [gradients.states[index].parameter for index in sorted(gradients.used_unsynchronized)]
        self.flush()
        gradients.open = False
        cycle.ddp_reduces = self.report.reduced_by_ddp = True
        cycle.trace.end(time.perf_counter_ns())
        self.forward.leave()
        cycle.awaits_in_backward = True
        cycle.steps.leave()
        self._remove_hooks()
        gradients.used_unsynchronized.clear()
        parameter_state.release(gradients.states)
        self.exchange.move_out()
        return used

    def take_back(self, *, used: bool) -> None:
        """Ends ``leave_to_ddp``: the next backward pass follows the plan in force. ``used``: unsynchronized passes may
        have made the present gradients."""
        if used:
            found = self.cycle.gradients.states
            self.cycle.gradients.used_unsynchronized |= {e.index for e in found if e.parameter.grad is not None}
        self.exchange.lay_out(self.exchange.order)
        self._install()
        self.cycle.ddp_reduces = self.report.reduced_by_ddp = False

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def abandon(self) -> None:
        """Ends all waits, in a forked child."""
        self.cycle.lock = threading.RLock()
        parameter_state.release(self.cycle.gradients.states)
        self.released = self.report.released = True

    def release(self, *, leaves: bool, reusable: bool = False) -> None:
        """Removes gradcast from the module and its optimizers, and gradients from the buffers. ``leaves``: no other
        session of this module follows. ``reusable``: see Group.leave."""
        gradients = self.cycle.gradients
        if gradients.clipping is not None and reusable:
            gradients.clipping.receive_norm()
        self.controller.release()
        self.forward.release()
        self.cycle.steps.release()
        self._remove_hooks()
        parameter_state.release(gradients.states)
        gradients.table.release()  # any reference of ours to a view would look like one of the program's
        try:
            self.exchange.buffers.release()  # needs memory
        finally:
            self.exchange.shutdown()
        if leaves:
            self.group.leave(reusable=reusable)
        self.released = self.report.released = True


def _norm_clipping(session: Session, setup: Setup, *parts: Any) -> clipping.NormClipping:
    """``parts``: the arguments of NormClipping."""
    if setup.replica is None:
        return clipping.NormClipping(*parts)
    shards = Shards(
        setup.replica,
        setup.accepted.grouped_parameters,
        lambda: session.cycle.gradients.arrived.adds,
        lambda what: session.exchange.watch.waiting(what),
    )
    return ShardedNormClipping(shards, *parts)


def _operations_begun(groups: Sequence[Any]) -> list[int | None]:
    return list(map(extension.load().operations_begun, groups))


class _WarnOnce:
    """Logs each message once, on rank 0."""

    def __init__(self, group: Group) -> None:
        self._group, self._logged = group, set[str]()

    def __call__(self, message: str, *arguments: Any) -> None:
        if message not in self._logged:
            self._logged.add(message)
            self._group.warning(message, *arguments)
