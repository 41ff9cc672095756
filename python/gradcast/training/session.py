"""One attached module with several workers: brings gradients, steps, plans and records together.

The life of a gradient: autograd makes it, it is scaled into its place in the buffer and reported ready, its blocks
travel when the plan says so, and it is pending until they have arrived. In hook mode everything is waited for where
backward ends. In overlap mode ``step()`` makes the parameters pending, and whoever reads one first waits for it.
"""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast import _core
from gradcast.errors import Error
from gradcast.training.acceptance import Accepted
from gradcast.training.compat import graph_capture
from gradcast.training.measure.step_trace import StepRecord, StepTrace
from gradcast.training.options import Options
from gradcast.training.plan import agreement
from gradcast.training.plan.controller import PlanController
from gradcast.training.ranks.group import Group
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.module_buffers import ModuleBuffers
from gradcast.training.step.optimizer_steps import OptimizerSteps
from gradcast.training.step.parameter_state import ParameterState

_log = logging.getLogger("gradcast")


class Session:
    has_plan = True

    def __init__(
        self,
        accepted: Accepted,
        parameters: dict[str, nn.Parameter],
        optimizers: Sequence[Optimizer],
        group: Group,
        options: Options,
    ) -> None:
        """``parameters``: those that travel, which change while what was accepted stays."""
        self.mode = "overlap" if optimizers else "hook"
        self.steps = 0
        self.released = False
        self._compare_every = options.compare_every
        self._iteration = 0  # the engine's number of the open one
        self._damage: Error | None = None
        self._failed_iterations: set[int] = set()  # in which this rank's own backward pass has failed
        self.aside = False  # DDP reduces by itself for a while
        self._ddp_reference = None if accepted.ddp is None else weakref.ref(accepted.ddp)
        self._lock = threading.RLock()
        self._no_sync_depth = 0
        self._synchronized: list[bool] = []  # what DDP did outside of each no_sync() that is open
        self._forward_ns = (0, 0)
        self._said_compiled = self._said_unseen = False
        self._forward_seen = False  # of the module itself
        owner = {id(p): n for n, opt in enumerate(optimizers) for g in opt.param_groups for p in g["params"]}
        self._slots = [ParameterState(i, name, p, owner.get(id(p))) for i, (name, p) in enumerate(parameters.items())]
        self._slot_of = {id(slot.parameter): slot for slot in self._slots}  # and of what each has as its gradient
        names, values = list(parameters), list(parameters.values())
        self.group = group
        self.buffers = GradientBuffers(names, values, group.world_size)
        self.exchange = GradientExchange(self.buffers, group, options)
        self.trace = StepTrace(options.timeline_steps)
        self._module_buffers = (
            None if accepted.ddp is not None else ModuleBuffers(accepted.module, group, self.exchange.watch)
        )
        self._gradients = GradientHooks(self._slots, self.buffers, self.exchange, group.world_size)
        self._steps = OptimizerSteps(
            optimizers,
            self._slots,
            self.buffers,
            self.exchange,
            self._gradients,
            self.trace,
            tells=group.rank == 0,
            max_norm=options.max_grad_norm,
        )
        # No update can run before the norm of all gradients is known: all are needed before forward reads anything.
        plan_mode = self.mode if options.max_grad_norm is None else "hook"
        self.controller = PlanController(
            names, values, self.buffers, group, self.exchange, self.trace, plan_mode, options
        )
        self._handles = self._gradients.listen(self)
        self._steps.intercept(self._on_step, self.flush)

    # --- For the handle and the attachment ---

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp_reference is None else self._ddp_reference()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self._slots]

    @property
    def plan(self) -> _core.Plan:
        return self.controller.in_force

    @property
    def profile(self) -> _core.Profile | None:
        return self.controller.profile

    def flush(self, limit_s: float | None = None) -> None:
        """Everything that is in flight arrives, every update that waits for it runs; on a device what is left of that
        is on the current stream, and nothing travels any more. ``limit_s``: raises Error(communication) after that."""
        with self._lock, self.exchange.waiting_at_most(limit_s):
            # Another thread's backward pass goes on; its gradients are nobody else's business yet.
            if self._finish_all():
                self.exchange.settle()

    def _finish_all(self) -> bool:
        """Returns whether that is all: not where another thread is in its backward pass."""
        self.controller.interrupted = True
        self._steps.finish_all()
        if self._gradients.open and self._gradients.runs_elsewhere():
            return False
        if self._gradients.open:
            self._use_gradients()
        return True

    def no_sync(self, entering: bool) -> None:
        self._no_sync_depth += 1 if entering else -1
        ddp = self._ddp
        if ddp is None:
            return
        # DDP sends no buffers meanwhile either.
        if entering:
            self._synchronized.append(ddp.require_backward_grad_sync)
        ddp.require_backward_grad_sync = False if entering else self._synchronized.pop()

    def state_dict(self) -> dict[str, Any]:
        unseen = [self._slots[index].name for index in sorted(self.controller.unseen_reads)]
        return agreement.checkpoint_state(self.controller.agreed, self.profile, self.mode, unseen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follows a saved plan from the next step on, where it is of the same model and as many workers. Collective."""
        self.flush()
        with self.exchange.watch.waiting("rank 0's handle.load_state_dict()"):
            state = self.group.from_first(state)
        names = [slot.name for slot in self._slots]
        reason = agreement.reason_to_measure(state, names, self.buffers, self.mode, self.group.world_size)
        if reason is not None:
            if self.group.rank == 0:
                _log.info("the plan of the checkpoint is not followed, this training measures for itself: %s", reason)
            return
        self._changing_layout(lambda: self.controller.adopt(state))

    def succeed(self, before: "Session") -> None:
        """Goes on where another session of the same module has ended."""
        self.steps, self._no_sync_depth = before.steps, before._no_sync_depth
        self._synchronized = before._synchronized

    def stand_aside(self, aside: bool) -> None:
        """While ``aside``, gradients are not gradcast's business."""
        self.flush()
        self._gradients.forget()
        self.aside = aside

    def abandon(self) -> None:
        """In a forked child: nothing waits for anything any more."""
        self._lock = threading.RLock()
        for slot in self._slots:
            pending.clear(slot.parameter)
            pending.clear(slot.exposed)
        self.released = True

    def release(self, *, leaves: bool, reusable: bool = False) -> None:
        """Takes gradcast out of the module and its optimizers. Gradients move out of the buffers. ``leaves``: no other
        session of this module follows; ``reusable``: see Group.leave."""
        self.stop_watching()
        self._steps.release()
        for handle in self._handles:
            handle.remove()
        for slot in self._slots:
            pending.clear(slot.parameter)
            pending.clear(slot.exposed)
            slot.exposed = slot.gradient = None  # whoever still refers to a view then, keeps it
        self._slot_of.clear()
        self.buffers.move_out()
        self.exchange.shutdown()
        if leaves:
            self.group.leave(reusable=reusable)
        self.released = True

    @property
    def long_frozen(self) -> set[int]:
        """Ids of parameters that have been frozen on all ranks in so many steps that they need not travel; the same on
        every rank."""
        return self._gradients.long_frozen

    @property
    def grad_norm(self) -> float | None:
        return self._steps.grad_norm

    # --- What pending tensors and gradients report ---

    def touched(self, tensors: list[torch.Tensor], function: Any) -> bool:
        with self._lock:
            touched = []
            for tensor in tensors:
                of_state = self._steps.state_of(tensor)
                touched += [self._slot_of[id(tensor)]] if of_state is None else of_state
            updating = [slot for slot in touched if slot.updating]
            if function in pending.ZEROING and updating and tensors[0] is updating[0].exposed:
                updating[0].zero_after = True
                return True
            if updating:
                self._steps.home.parameter_read()
                self._steps.finish(updating)
            if self._steps.must_clip_first:
                self._steps.finish_all()
            if any(pending.is_pending(tensor) and self._steps.state_of(tensor) is None for tensor in tensors):
                self._gradients.refuse_inside_backward()
                self._use_gradients()
            return False

    def gradient_read(self, tensor: torch.Tensor) -> None:
        """None or the ranks' mean: that of a parameter that this rank has not used is known when it has arrived."""
        with self._lock:
            slot = self._slot_of.get(id(tensor))
            if slot is not None and slot.absence is not None:
                self.touched([tensor], pending.is_pending)

    def synchronizing(self) -> bool:
        if self.aside or self._no_sync_depth > 0:
            return False
        ddp = self._ddp
        return ddp is None or ddp.require_backward_grad_sync

    def exposes(self, slot: ParameterState, tensor: torch.Tensor | None) -> None:
        if slot.exposed is tensor:
            return
        self._slot_of.pop(id(slot.exposed), None)
        slot.exposed = tensor
        if tensor is not None:
            self._slot_of[id(tensor)] = slot

    def finish_gradients(self) -> None:
        self._refuse_capture()
        with self._lock:
            self._gradients.finish()

    def _refuse_capture(self) -> None:
        graph_capture.refuse_capture(self.buffers.flats[0].device)

    def backward_begins(self) -> None:
        with self._lock:
            now_ns = time.perf_counter_ns()
            self._refuse_capture()
            self.stop_watching()
            self._say_forward_unseen()
            # Forward has not read these. If it did after all, in a way that nobody saw, their gradients will tell.
            for slot in self._steps.waiting:
                slot.stale = True
            self._steps.backward_begins()
            forward_start_ns, forward_end_ns = self._forward_ns
            # On a device forward has not ended for the ranks before all that it reads has arrived.
            start_ns = self._settled_at_ns() or forward_end_ns or now_ns
            if forward_end_ns:
                self.trace.span("forward", forward_start_ns, start_ns)
            self._changing_layout(lambda: self.controller.begin_iteration(start_ns))
            self._look_for_failures()
            if self._damage is not None:
                raise self._damage
            active = self.exchange.active
            self._iteration = self.exchange.begin()
            self.trace.begin(StepRecord(self.steps, self._iteration, active.plan, active.profile, start_ns))
            self._forward_ns = (0, 0)

    def _settled_at_ns(self) -> int | None:
        """On a device the host may have come here while blocks still travel; None where it has not."""
        start_ns = time.perf_counter_ns()
        if not self.exchange.settle():
            return None
        settled_ns = time.perf_counter_ns()
        self.trace.span("wait", start_ns, settled_ns)
        return settled_ns

    def gradient_ready(self, slot: ParameterState) -> None:
        if self.controller.warmup is not None:
            self.controller.warmup.stopwatch.ready(slot.index, used=slot.absence is None)

    def backward_ended(self) -> None:
        with self._lock:
            now_ns = time.perf_counter_ns()
            self._steps.home.called()  # autograd calls this on the stream on which backward() was
            self.trace.span("backward", self.trace.current.start_ns, now_ns)
            if self.controller.warmup is not None:
                self.controller.warmup.stopwatch.backward_ended()
            self._compare_if_due()
            if self.mode == "hook":
                self._await_gradients(now_ns)
                self._end_step()

    def backward_failed(self) -> None:
        self._failed_iterations.add(self._iteration)

    def _look_for_failures(self) -> None:
        """A backward pass that fails on all ranks may be caught by all, and nothing has happened; one that fails on
        some of them leaves the others with sums of a part."""
        failed = self.controller.failed_iteration
        if failed is not None and failed not in self._failed_iterations and self._damage is None:
            self._damage = Error(
                f"in iteration {failed} the backward pass of another rank failed, so that its gradients are missing in "
                "the sums, and the ranks' parameters differ now; let an error inside backward (out of memory, say) end "
                "the training, or all ranks skip that step, and go on from the last checkpoint",
                "invalid_use",
            )

    # --- Forward and step ---

    def finish(self) -> None:
        """All updates that are due."""
        with self._lock, pending.not_traced():
            self._finish_all()

    def before_forward(self, compiled: bool, training: bool) -> None:
        """``training``: the module's mode."""
        self._forward_seen = True
        if compiled:
            # Compiled code has decided which class its parameters have, and does not ask who may read them.
            self._say_compiled()
        if compiled or torch.jit.is_tracing():
            self.finish()
        self._finish_unseen()
        training &= torch.is_grad_enabled()
        if training:
            self._refuse_capture()
        if training and self._module_buffers is not None:
            self._module_buffers.send(synchronizing=self.synchronizing(), needed=self._gradients.awaits_backward())
        if torch.is_grad_enabled():
            self._gradients.forward_begins()
        if torch._C._current_graph_task_id() == -1:
            for slot in self._slots:
                slot.stale = False  # what a forward pass reads from now on is up to date
        self._forward_ns = (time.perf_counter_ns(), 0)
        if self.controller.warmup is not None and training and not compiled:
            self.controller.warmup.watch_reads(self._steps.home.parameter_read)

    def _finish_unseen(self) -> None:
        """What forward reads in a way that nobody sees has to be up to date before it begins."""
        with self._lock:
            unseen = [slot for index in sorted(self.controller.unseen_reads) if (slot := self._slots[index]).updating]
            if not unseen:
                return
            if not self._said_unseen and self.group.rank == 0:
                self._said_unseen = True
                _log.warning(
                    "forward reads %s in a way that gradcast does not see, as C++ extensions do: it waits for them "
                    "before it begins",
                    parameter_state.names(unseen),
                )
            self._steps.home.parameter_read()
            self._steps.finish(unseen)

    def _say_forward_unseen(self) -> None:
        if not self._forward_seen and self.group.rank == 0:
            _log.warning(
                "this backward pass comes from another method of the module than forward, where buffers are sent to "
                "all ranks and new parameters are noticed; call the module itself: module(...)"
            )
        self._forward_seen = True

    def _say_compiled(self) -> None:
        if self.mode == "overlap" and not self._said_compiled and self.group.rank == 0:
            self._said_compiled = True
            _log.warning(
                "the model is compiled as a whole, so its forward pass waits for all parameters; compile its blocks "
                "instead (block.compile()), and traffic goes on under forward"
            )

    def watch(self, output: Any) -> None:
        """Backward through this output may lead to parameters."""
        self._gradients.watch(output)

    def after_forward(self, output: Any) -> None:
        self._forward_ns = (self._forward_ns[0], time.perf_counter_ns())
        if self.controller.warmup is not None:
            self.controller.warmup.stopwatch.forward_ended()
        self._gradients.watch(output)

    def stop_watching(self) -> None:
        """Backward begins: what reads a parameter from now on is neither forward nor the loss."""
        if self.controller.warmup is not None:
            self.controller.warmup.stop_watching()

    def _on_step(self, number: int) -> None:
        with self._lock:
            self._steps.finish_updates_of(number)  # a second step() with the same gradients
            if not self._gradients.open:
                self._steps.run_whole(number)
                return
            if self._take(number):
                self._end_step()

    def _take(self, number: int) -> bool:
        warmup = self.controller.warmup
        if warmup is None:
            return self._steps.take(number, self, at_once=self.controller.on_baseline)
        self._await_gradients(time.perf_counter_ns())
        with warmup.stopwatch.updating():
            return self._steps.take(number, self, at_once=True)

    def _compare_if_due(self) -> None:
        """At the end of a backward pass, before anybody can write into what has arrived; counted by iterations, which
        all ranks have in common."""
        if self._compare_every == 0 or self._iteration % self._compare_every < self._compare_every - 1:
            return
        self.exchange.wait_all()
        try:
            self.exchange.compare_ranks(self._iteration)
        except Error as error:
            self._damage = error
            raise
        self._use_gradients()

    def _use_gradients(self) -> None:
        self._await_gradients(time.perf_counter_ns())
        self._gradients.used = True

    def _await_gradients(self, start_ns: int) -> None:
        """After backward. Whoever wants them, it is no part of compute."""
        warmup = self.controller.warmup
        # Wherever gradients are looked at first, the stream that computes is behind them as well.
        with contextlib.nullcontext() if warmup is None else warmup.stopwatch.waiting(), self._steps.home.entered():
            self._gradients.finish()
        self.trace.span("wait", start_ns, time.perf_counter_ns())

    def _end_step(self) -> None:
        self._gradients.open = False
        self.steps += 1
        for slot in self._slots:
            slot.stale = False  # also where forward is not seen: a module that is trained by another method

    def _changing_layout(self, change: Callable[[], None]) -> None:
        """Around what may give the gradients other places: whoever holds one gets the new view."""
        old_views = self.buffers.views
        exposed = [slot for slot in self._slots if slot.exposed is old_views[slot.index]]
        in_use = {slot.index for slot in exposed if slot.gradient is slot.exposed}
        for slot in exposed:  # whoever still refers to a view then, keeps it
            self._slot_of.pop(id(slot.exposed), None)
            slot.exposed = None
            slot.gradient = None if slot.index in in_use else slot.gradient
        apart_count = len(self.buffers.apart)
        change()
        if self.buffers.views is old_views and self.buffers.is_kept():
            self.exchange.lay_out(self.exchange.active.order)
        for slot in exposed:
            old_view, view = old_views[slot.index], self.buffers.views[slot.index]
            if view is old_view:
                now = view
            else:  # moved, or left to whoever keeps it, or nobody's
                now = slot.parameter.grad if slot.parameter.grad is view or slot.parameter.grad is old_view else None
            self.exposes(slot, now)
            slot.gradient = now if slot.index in in_use else slot.gradient
        if len(self.buffers.apart) > apart_count:
            self._say_kept()

    def _say_kept(self) -> None:
        kept = [self._slots[index] for index in sorted(self.buffers.apart)]
        size_mb = sum(slot.parameter.nbytes for slot in kept) / 1e6
        if self.group.rank == 0:
            _log.info(
                "the program keeps gradients of %s beyond their step: they have memory of their own from now on, into "
                "which %.3g MB are copied per step",
                parameter_state.names(kept),
                size_mb,
            )
