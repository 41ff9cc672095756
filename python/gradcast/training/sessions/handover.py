"""The reduction of the gradients of a DDP module that gradcast is attached to: by gradcast, or by DDP itself.

Where no plan gains anything, the session follows the DDP baseline (plan/loop.py). After some steps of that it hands the
reduction back to DDP, and nothing of gradcast runs in a step but the functions around forward: no hooks behind
gradients, no events, no reports, and ``step()`` is the optimizer's own. Now and then gradcast takes the reduction back
for a few steps, in which the monitor sees whether the network or compute has changed. Where a plan is followed, DDP
reduces in the trials with which it is compared. Inside ``ddp.join()`` DDP reduces, too.

All ranks change at the same step, in the first forward pass after a certain reduction, and without a message there. In
the backward pass before, they have agreed to hand over, unless a rank has a reason to stay: the graph of another
forward pass for one, which waits for gradcast. To take the reduction back, each counts the reductions that DDP has
completed, which are the same on all ranks, whatever else a rank's program does with its module.
"""

import itertools
import operator
import threading
import time
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcast import _core
from gradcast.errors import refused
from gradcast.training.compat.ddp_takeover import Buckets, DdpTakeover
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.model_layout import in_functional_call
from gradcast.training.plan.loop import Leaving
from gradcast.training.sessions.facets import Reduction
from gradcast.training.sessions.kinds import Setup
from gradcast.training.sessions.session import Session
from gradcast.training.step.backward_passes import NO_TASK, current
from gradcast.training.step.compiled_blocks import is_compiled
from gradcast.training.step.weights import GivenWeights

# A trial has so many steps. In the first ones DDP has one bucket, and then forms its buckets anew.
_TRIAL_STEPS = 6
_TRIAL_SKIPPED = 2
# DDP's reductions are counted by the times at which gradients come. With fewer of them, two steps may have the same.
_FEWEST_PARAMETERS = 6
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Handover(Reduction):
    """The reduction around a DDP module."""

    def __init__(self, setup: Setup, ddp: DistributedDataParallel, given: GivenWeights, session: Session) -> None:
        self._setup, self._given = setup, given
        self._ddp_finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self._covered = set(map(id, setup.accepted.parameters.values()))
        self._taken_over = DdpTakeover(ddp, self._joining, self._joined, self._bring_buffers)
        self._count = self._count_at_forward = 0  # of DDP's reductions: now, and when the last forward pass began
        self._until = 0
        self._was_bypassed = False  # a forward pass past DDP has begun since the last one of DDP's
        self._starts_ns: list[int] | None = None  # of the steps of a trial
        self.follow(session)

    def follow(self, session: Session) -> None:
        """Another session begins."""
        self._session, self._parameters = session, session.parameters
        session.controller.reason_against_ddp = self._reason_to_stay
        session.reduction = session.checkpoint.reduction = self

    def release(self) -> None:
        """Leaves the reduction to DDP for good. REQUIRES: the session has been released."""
        self._taken_over.give_back()
        self._session.reduction = self._session.checkpoint.reduction = Reduction()  # a handle keeps the session
        del self._setup  # it refers to DDP

    def send_buffers(self) -> None:
        self._taken_over.send_buffers()

    def before_forward(self, *, changed: bool) -> bool:
        """Changes who reduces, if it is time. Returns ``by_ddp``. ``changed``: the module has other parameters."""
        self._taken_over.before_forward()
        if not torch.is_grad_enabled() or current() != NO_TASK:
            return self.by_ddp
        if self._taken_over.in_join:
            if changed:
                raise refused("the module's parameters have changed inside ddp.join(); change them outside of it")
        elif self.by_ddp:
            self._thread = threading.get_ident()
            self.note_reductions()
            if self._count > self._count_at_forward and self._starts_ns is not None:
                self._starts_ns.append(time.perf_counter_ns())
            self._count_at_forward = self._count
            if changed:
                return False  # another session begins
            if self._misses_gradients or self._count >= self._until:
                self._take_back()
            self._was_bypassed = False
        elif self._session.controller.leaves_to_ddp is not None and not changed and self._may_begin:
            self._leave_as_agreed(self._session.controller.leaves_to_ddp)
        return self.by_ddp

    def after_inner(self) -> None:
        """Called after a forward pass of the module that DDP does not know of, while DDP reduces."""
        self._was_bypassed |= torch.is_grad_enabled()

    @property
    def _misses_gradients(self) -> bool:
        """True if DDP would wait for gradients of frozen parameters. If all are frozen, it reduces nothing."""
        return not self._ddp_finds_unused and 0 < sum(map(_REQUIRES_GRAD, self._parameters)) < len(self._parameters)

    @property
    def _may_begin(self) -> bool:
        """With a static graph DDP learns in its first step which parameters are used."""
        if not self._setup.accepted.ddp.static_graph:
            return True
        return not self._session.progress.no_sync_blocks.is_open and all(map(_REQUIRES_GRAD, self._parameters))

    def end_session(self) -> None:
        """Takes the reduction from DDP for the next session. REQUIRES: the present one has been released."""
        if self.by_ddp:
            self._taken_over.take()
            self.by_ddp, self._starts_ns = False, None

    def take_back(self) -> None:
        self._session.controller.leaves_to_ddp = None
        if self.by_ddp:
            self.note_reductions()
            self._take_back(is_armed=self._count == self._count_at_forward)

    def note_reductions(self) -> None:
        if self.by_ddp and not self._taken_over.in_join:
            before, self._count = self._count, self._taken_over.completed_reductions()
            self._session.progress.steps += self._count - before

    def _reason_to_stay(self) -> str | None:
        """Returns the reason of this rank why DDP must not reduce from the next forward pass on. Called where backward
        begins."""
        options, gradients = self._setup.options, self._session.cycle.gradients
        if options.clips or self._given.active or options.compare_every or options.wire != "fp32":
            return "clipping, weights, compare_every and wire formats are gradcast's"
        if self._setup.callbacks:
            return "functions are called with updates"
        if any(map(is_compiled, self._setup.accepted.called)):
            return "the model is compiled as a whole"
        if len(self._parameters) < _FEWEST_PARAMETERS:
            return "so few gradients do not show each reduction of DDP"
        if not self._covered.issuperset(map(id, self._parameters)):
            return "parameters are trained that DDP did not have when it was made"
        if gradients.message.has_flagged_unused and not self._ddp_finds_unused:
            return "steps leave parameters out, and this DDP has no find_unused_parameters"
        if self._session.progress.no_sync_blocks.exceeds_ddp:
            return "backward passes run that DDP would not reduce"
        if gradients.passes.graph_count > 1:
            return "the graph of another forward pass is alive"
        if not _has_room(self._setup.group.device, gradients.exchange.buffers.size_bytes):
            return "the device has no room for DDP's buckets"
        return None

    def _leave_as_agreed(self, leaving: Leaving) -> None:
        controller = self._session.controller
        controller.leaves_to_ddp = None
        self._leave(None if controller.ddp_has_usual_size else _buckets(controller.agreed.baseline))
        if leaving is Leaving.FOR_TRIAL:
            self._until, self._starts_ns = _TRIAL_STEPS, []
            return
        self._until = controller.phase.take_rest()
        self._setup.group.info("DDP reduces by itself from here on; gradcast looks again after %d steps", self._until)

    def _leave(self, buckets: Buckets | None = None) -> None:
        used = self._session.leave_to_ddp()
        self._taken_over.reduce_again(buckets, used)
        self._was_bypassed = False
        self._count = self._count_at_forward = 0
        self._thread = threading.get_ident()
        self._session.exchange.watch.outside = WeakHook(self._place)
        self.by_ddp = True

    def _place(self) -> Any:
        return self._taken_over.place_of(self._thread) if self.by_ddp else None

    def _take_back(self, *, is_armed: bool = False) -> None:
        """``is_armed``: DDP would reduce the next backward pass, since its forward pass has begun."""
        self._taken_over.take(is_armed=is_armed)
        self._session.take_back(used=self._was_bypassed)
        self.by_ddp = False
        steps_ns = None
        if self._starts_ns is not None:
            starts_ns, self._starts_ns = self._starts_ns[_TRIAL_SKIPPED - 1 :], None
            steps_ns = [float(end - start) for start, end in itertools.pairwise(starts_ns)]
        self._session.controller.look_again(steps_ns)

    def _bring_buffers(self, is_usual: bool) -> bool:
        if self._session.released:  # in a forked child
            return False
        return self._session.forward.bring_buffers_of_ddp(is_usual=is_usual and not in_functional_call())

    def _joining(self) -> None:
        self._setup.group.warning("inside ddp.join() DDP reduces the gradients itself, without a plan")
        self._leave()

    def _joined(self) -> None:
        # Ranks without inputs have seen other forward passes.
        if self.by_ddp:
            self._take_back()


def _buckets(baseline: _core.Plan | None) -> Buckets | None:
    """The sizes at which DDP's buckets close to be those of the baseline, as far as DDP has them."""
    if baseline is None:
        return None
    largest = max(baseline.blocks, key=lambda block: block.size_bytes)
    sizes = [each.size_bytes for each in baseline.blocks if each.buffer == largest.buffer]  # no module buffers
    caps = sizes[1:-1] or sizes[:-1] or sizes  # the last bucket holds the rest
    return Buckets(min(caps), sizes[0] < min(caps) / 2)


def _has_room(device: torch.device, size_bytes: int) -> bool:
    """Returns whether so much memory is free on a GPU."""
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= size_bytes
