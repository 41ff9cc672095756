"""``optimizer.step()`` in overlap mode: a parameter is updated when its gradient has arrived and before it is read.

Thread safety: under the session's lock.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training import pending, updates
from gradcast.training.buffers import GradientBuffers
from gradcast.training.gradients import Gradients
from gradcast.training.slots import Slot, missing_gradient
from gradcast.training.trace import Trace
from gradcast.training.traffic import Traffic

_log = logging.getLogger("gradcast")


class Steps:
    """Of all optimizers. ``take`` is what a call of step() does; ``finish`` brings parameters up to date."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        slots: Sequence[Slot],
        buffers: GradientBuffers,
        traffic: Traffic,
        gradients: Gradients,
        trace: Trace,
        tells: bool,
    ) -> None:
        """``tells``: this rank says what a user should know; one of them is enough."""
        self._optimizers = list(optimizers)
        self._slots = [[slot for slot in slots if slot.owner == number] for number in range(len(optimizers))]
        self._buffers, self._traffic, self._gradients, self._trace = buffers, traffic, gradients, trace
        self._counts = [_count(optimizer) for optimizer in optimizers]
        self._partial: dict[int, updates.PartialStep] = {}  # by optimizer, while updates of it remain
        self._stepped: set[int] = set()  # optimizers that have taken the gradients of the open step
        self._arrived: set[int] = set()
        self._interceptions: list[updates.StepInterception] = []
        self._tells = tells
        self._said: set[str] = set()

    def intercept(self, on_step: Callable[[int], None], flush: Callable[[], None]) -> None:
        """``step()`` of each optimizer becomes ``on_step(number)``, and its state_dict() that of a finished step."""
        for number, optimizer in enumerate(self._optimizers):
            self._interceptions.append(updates.StepInterception(optimizer, functools.partial(on_step, number)))
            self._interceptions[-1].flush_before_state(flush)

    def release(self) -> None:
        for interception in self._interceptions:
            interception.remove()

    @property
    def waiting(self) -> list[Slot]:
        return [slot for slots in self._slots for slot in slots if slot.updating]

    def require_known(self, number: int) -> None:
        """Raises for a parameter that the optimizer has been given since attach: its gradient would not travel."""
        optimizer = self._optimizers[number]
        if _count(optimizer) == self._counts[number]:
            return
        known = {id(slot.parameter) for slot in self._slots[number]}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known and parameter.requires_grad and parameter.numel() > 0:
                    raise Error(
                        f"the optimizer has been given a parameter of shape {tuple(parameter.shape)} since attach, "
                        "whose gradient would not travel; call handle.detach() and attach again",
                        "invalid_use",
                    )
        self._counts[number] = _count(optimizer)

    def run_whole(self, number: int) -> None:
        """The optimizer's own step, on the gradients as they are."""
        self._interceptions[number].run_whole()

    def take(self, number: int, owner: pending.Owner, at_once: bool) -> bool:
        """A step with the gradients of the open backward pass. Returns True when every optimizer has taken them.

        ``at_once``: all is waited for and updated now (warm-up); otherwise only where the user's code requires it.
        """
        missing = [slot for slot in self._slots[number] if not slot.ready]
        if missing:
            raise missing_gradient(missing)
        reason = None if at_once else self._reason_to_wait(number)
        if at_once or reason is not None:
            self._take_at_once(number, reason)
        else:
            self._defer(number, owner)
        self._stepped.add(number)
        if len(self._stepped) < len(self._optimizers):
            return False
        self._stepped.clear()
        return True

    def finish(self, slots: Sequence[Slot]) -> None:
        """Waits for the gradients of these and updates them, with everything else that has arrived by then."""
        start_ns = time.perf_counter_ns()
        self._traffic.wait([slot.index for slot in slots])
        arrived_ns = time.perf_counter_ns()
        self._trace.span("wait", start_ns, arrived_ns)
        self._arrived.update(self._traffic.newly_arrived())
        for number in list(self._partial):
            part = [slot for slot in self._slots[number] if slot.updating and slot.index in self._arrived]
            if part:
                self._update(number, part)
        self._trace.span("update", arrived_ns, time.perf_counter_ns())

    def finish_all(self) -> None:
        remaining = self.waiting
        if remaining:
            self.finish(remaining)

    def _reason_to_wait(self, number: int) -> str | None:
        optimizer = self._optimizers[number]
        if self._gradients.used:
            return "gradients are used between backward and step(), as clipping does"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "a GradScaler drives the optimizer"
        if not self._gradients.in_place(self._slots[number]):
            return "gradients are replaced between backward and step()"
        return None

    def _take_at_once(self, number: int, reason: str | None) -> None:
        if reason is not None and reason not in self._said and self._tells:
            self._said.add(reason)
            _log.warning("%s: such steps wait for all gradients, without overlap with the next forward pass", reason)
        start_ns = time.perf_counter_ns()
        self._gradients.finish()
        arrived_ns = time.perf_counter_ns()
        self._trace.span("wait", start_ns, arrived_ns)
        self.run_whole(number)
        self._trace.span("update", arrived_ns, time.perf_counter_ns())

    def _defer(self, number: int, owner: pending.Owner) -> None:
        optimizer = self._optimizers[number]
        updates.run_pre_hooks(optimizer)
        if not self._stepped:
            self._arrived.clear()
        self._partial[number] = updates.PartialStep(optimizer)
        for slot in self._slots[number]:
            slot.updating = True
            pending.mark(slot.parameter, owner)
        updates.run_post_hooks(optimizer)

    def _update(self, number: int, part: Sequence[Slot]) -> None:
        """One call of the optimizer. The user's ``.grad``, which zero_grad() may have emptied by now, is kept aside."""
        views = [self._buffers.views[slot.index] for slot in part]
        kept = []
        for slot, view in zip(part, views, strict=True):
            slot.updating = False
            pending.clear(slot.parameter)
            pending.clear(view)
            kept.append(slot.parameter.grad)
            slot.parameter.grad = view
        last = not any(slot.updating for slot in self._slots[number])
        self._partial[number].run([slot.parameter for slot in part], last=last)
        for slot, view, gradient in zip(part, views, kept, strict=True):
            slot.parameter.grad = gradient
            if slot.zero_after:
                view.zero_()
                slot.zero_after = False
        if last:
            del self._partial[number]
        self._trace.count_update()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
