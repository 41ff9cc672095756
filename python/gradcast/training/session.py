"""One attached module with several workers: brings gradients, steps, plans and records together.

The life of a gradient: autograd makes it, it is scaled into its place in the buffer and reported ready, its blocks
travel when the plan says so, and it is pending until they have arrived. In hook mode everything is waited for where
backward ends. In overlap mode ``step()`` makes the parameters pending, and whoever reads one first waits for it.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast import _core
from gradcast.errors import Error
from gradcast.training import pending
from gradcast.training.buffers import GradientBuffers
from gradcast.training.gradients import Gradients
from gradcast.training.group import Group
from gradcast.training.module_hooks import around_forward
from gradcast.training.options import Options
from gradcast.training.planning import Agreed
from gradcast.training.slots import Slot
from gradcast.training.steps import Steps
from gradcast.training.trace import StepRecord, Trace
from gradcast.training.traffic import Traffic
from gradcast.training.warmup import Warmup

_log = logging.getLogger("gradcast")


class Session:
    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        group: Group,
        options: Options,
    ) -> None:
        self.mode = "overlap" if optimizers else "hook"
        self.steps = 0
        self.profile: _core.Profile | None = None
        self.released = False
        self._module = module
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._lock = threading.RLock()
        self._no_sync_depth = 0
        self._forward_ns = (0, 0)
        self._send_buffers = True
        owner = {id(p): n for n, opt in enumerate(optimizers) for g in opt.param_groups for p in g["params"]}
        self._slots = [Slot(i, name, p, owner.get(id(p))) for i, (name, p) in enumerate(parameters.items())]
        self._slot_of: dict[int, Slot] = {}
        names, values = list(parameters), list(parameters.values())
        self.group = group
        self.buffers = GradientBuffers(names, values)
        self.traffic = Traffic(self.buffers, group, options)
        self.trace = Trace(options.timeline_steps)
        self._module_buffers = [] if self._ddp is not None else list(module.buffers())
        self._gradients = Gradients(self._slots, self.buffers, self.traffic, group.world_size)
        self._steps = Steps(
            optimizers, self._slots, self.buffers, self.traffic, self._gradients, self.trace, group.rank == 0
        )
        self._warmup: Warmup | None = Warmup(names, values, self.buffers, group, self.mode, options)
        self._follow(self._warmup.first())
        self._handles = self._gradients.listen(self)
        self._handles += around_forward(module, self._before_forward, self._after_forward)
        self._steps.intercept(self._on_step, self.flush)

    # --- For the handle ---

    @property
    def plan(self) -> _core.Plan:
        return self.traffic.agreed.plan

    def flush(self) -> None:
        """Everything that is in flight arrives, every update that waits for it runs."""
        with self._lock:
            self._steps.finish_all()
            if self._gradients.open:
                self._use_gradients()

    def no_sync(self, entering: bool) -> None:
        self._no_sync_depth += 1 if entering else -1

    def release(self) -> None:
        """Takes gradcast out of the module and its optimizers. Gradients move out of the buffers."""
        self._stop_watching()
        self._steps.release()
        for handle in self._handles:
            handle.remove()
        for slot in self._slots:
            view = self.buffers.views[slot.index]
            pending.clear(slot.parameter)
            pending.clear(view)
            if slot.parameter.grad is view:
                slot.parameter.grad = view.clone()
        self.traffic.shutdown()
        self.released = True

    # --- What pending tensors and gradients report ---

    def touched(self, tensors: list[torch.Tensor], function: Any) -> bool:
        with self._lock:
            slots = [self._slot_of[id(tensor)] for tensor in tensors]
            updating = [slot for slot in slots if slot.updating]
            if function in pending.ZEROING and updating and tensors[0] is self.buffers.views[slots[0].index]:
                slots[0].zero_after = True
                return True
            if updating:
                self._steps.finish(updating)
            if any(pending.is_pending(tensor) for tensor in tensors):
                self._use_gradients()
            return False

    def synchronizing(self) -> bool:
        return self._no_sync_depth == 0 and (self._ddp is None or self._ddp.require_backward_grad_sync)

    def backward_begins(self) -> None:
        with self._lock:
            now_ns = time.perf_counter_ns()
            for slot in self._slots:
                slot.stale = False
            # Forward has not read these. If it did after all, in a way that nobody saw, their gradients will tell.
            for slot in self._steps.waiting:
                slot.stale = True
            self._steps.finish_all()
            forward_start_ns, forward_end_ns = self._forward_ns
            if forward_end_ns:
                self.trace.span("forward", forward_start_ns, forward_end_ns)
            agreed, iteration = self.traffic.agreed, self.traffic.begin()
            self.trace.begin(StepRecord(self.steps, iteration, agreed.plan, agreed.profile, forward_end_ns or now_ns))
            self._forward_ns = (0, 0)
            if self._warmup is not None:
                self._warmup.stopwatch.backward_started()

    def gradient_ready(self, slot: Slot) -> None:
        if self._warmup is not None:
            self._warmup.stopwatch.ready(slot.index)

    def backward_ended(self) -> None:
        with self._lock:
            now_ns = time.perf_counter_ns()
            self.trace.span("backward", self.trace.current.start_ns, now_ns)
            if self._warmup is not None:
                self._warmup.stopwatch.backward_ended()
            if self.mode == "hook":
                with self._warmup.stopwatch.waiting() if self._warmup is not None else contextlib.nullcontext():
                    self._gradients.finish()
                self.trace.span("wait", now_ns, time.perf_counter_ns())
                self._end_step()

    # --- Forward and step ---

    def _before_forward(self, compiled: bool) -> None:
        if compiled:
            # Compiled code has decided which class its parameters have, and does not ask who may read them.
            self.flush()
        training = torch.is_grad_enabled() and self._module.training
        if training and self._send_buffers and self._module_buffers:
            self.group.copy_from_first(self._module_buffers, "the module's buffers")
        if training:
            self._send_buffers = self.synchronizing()
        self._forward_ns = (time.perf_counter_ns(), 0)
        if self._warmup is not None and training and not compiled:
            self._warmup.watch_reads()

    def _after_forward(self, compiled: bool) -> None:
        self._forward_ns = (self._forward_ns[0], time.perf_counter_ns())
        if self._warmup is not None:
            self._stop_watching()
            self._warmup.stopwatch.forward_ended()

    def _stop_watching(self) -> None:
        if self._warmup is not None:
            self._warmup.stop_watching()

    def _on_step(self, number: int) -> None:
        with self._lock:
            self._steps.finish_all()  # a second step() with the same gradients
            self._require_frozen()
            self._steps.require_known(number)
            if not self._gradients.open:
                self._steps.run_whole(number)
                return
            if self._take(number):
                self._end_step()

    def _take(self, number: int) -> bool:
        if self._warmup is None:
            return self._steps.take(number, self, at_once=False)
        with self._warmup.stopwatch.waiting():
            self._gradients.finish()
        with self._warmup.stopwatch.updating():
            return self._steps.take(number, self, at_once=True)

    def _use_gradients(self) -> None:
        self._gradients.finish()
        self._gradients.used = True

    def _end_step(self) -> None:
        self._gradients.open = False
        self.steps += 1
        if self._warmup is None:
            return
        agreed = self._warmup.step_ended(self.traffic.timeline()[-1])
        if agreed is None:
            self.profile = self._warmup.profile(self.buffers.flats)
            agreed = self._warmup.plan(self.profile)
            self._warmup = None
        self._follow(agreed)
        if self._warmup is None and self.group.rank == 0:
            _log.info("%s", self._describe(agreed.plan))

    def _follow(self, agreed: Agreed) -> None:
        old_views = self.buffers.views
        self.traffic.follow(agreed)
        for slot in self._slots:
            if slot.parameter.grad is not None and slot.parameter.grad is old_views[slot.index]:
                slot.parameter.grad = self.buffers.views[slot.index]
        self._slot_of = {id(slot.parameter): slot for slot in self._slots}
        self._slot_of |= {id(self.buffers.views[slot.index]): slot for slot in self._slots}

    def _require_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise Error(
                    f"{name} was frozen at attach and is trainable now, so its gradient would not travel; call "
                    "handle.detach() and attach again",
                    "invalid_use",
                )

    def _describe(self, plan: _core.Plan) -> str:
        return (
            f"plan {self.traffic.plan_version}: {len(plan.blocks)} blocks, {plan.predicted_ns / 1e6:.1f} ms per step "
            f"predicted, {plan.bound_ns / 1e6:.1f} ms is the bound"
        )
