"""``optimizer.step()`` in overlap mode: a parameter is updated when its gradient has arrived and before it is read.

Thread safety: under the session's lock.
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training.compat import extension, interrupts
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.step import parameter_state, partial_step, pending
from gradcast.training.step.clipping import NormClipping
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.optimizer_state import PendingState
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.update_stream import UpdateStream

_log = logging.getLogger("gradcast")


class OptimizerSteps:
    """Of all optimizers. ``take`` is what a call of step() does; ``finish`` brings parameters up to date."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        all_slots: Sequence[ParameterState],
        buffers: GradientBuffers,
        exchange: GradientExchange,
        gradients: GradientHooks,
        trace: StepTrace,
        tells: bool,
        max_norm: float | None,
    ) -> None:
        """``tells``: this rank says what a user should know; one of them is enough. ``max_norm``: gradients are clipped
        to it before the first update."""
        self._optimizers = list(optimizers)
        self._slots = [[slot for slot in all_slots if slot.owner == number] for number in range(len(optimizers))]
        self._buffers, self._exchange, self._gradients, self._trace = buffers, exchange, gradients, trace
        self._partial: dict[int, partial_step.PartialStep] = {}  # by optimizer, while updates of it remain
        self._stepped: set[int] = set()  # optimizers that have taken the gradients of the open step
        self._arrived: set[int] = set()
        self._interceptions: list[partial_step.StepInterception] = []
        self._all_slots = list(all_slots)
        self.home = UpdateStream(buffers.flats[0].device)
        self._clipping = None if max_norm is None else NormClipping(all_slots, max_norm)
        self._tells = tells
        self._said: set[str] = set()
        self._states: list[PendingState] = []
        self._failure: Error | None = None  # of an update; nothing is right any more

    def intercept(self, on_step: Callable[[int], None], flush: Callable[[], None]) -> None:
        """``step()`` of each optimizer becomes ``on_step(number)``, and its state_dict() that of a finished step."""
        for number, optimizer in enumerate(self._optimizers):
            self._interceptions.append(partial_step.StepInterception(optimizer, functools.partial(on_step, number)))
            self._interceptions[-1].flush_before_state(flush)
            self._states.append(PendingState(optimizer, functools.partial(self.finish_updates_of, number)))

    def release(self) -> None:
        for interception, state in zip(self._interceptions, self._states, strict=True):
            interception.remove()
            state.release()

    @property
    def waiting(self) -> list[ParameterState]:
        return [slot for slots in self._slots for slot in slots if slot.updating]

    def backward_begins(self) -> None:
        """The gradients of the open step go; an optimizer that has not taken them never will."""
        if self._gradients.open and any(each.replaced for each in self._interceptions):
            self._say(
                "step() of the optimizer is called in a way that goes past gradcast, as Accelerate does with a "
                "GradScaler: such steps wait for all gradients, without overlap with the next forward pass"
                + ("" if self._clipping is None else ", and options.max_grad_norm does not reach them")
            )
        self.finish_all()
        self._stepped.clear()
        self._arrived.clear()
        if self._clipping is not None:
            self._clipping.begin()

    def state_of(self, tensor: torch.Tensor) -> list[ParameterState] | None:
        """Whose updates change this tensor of an optimizer's state; nobody's while the optimizer itself looks."""
        for state in self._states:
            found = state.slots_of(tensor)
            if found is not None:
                return [] if state.running else found
        return None

    def run_whole(self, number: int) -> None:
        """The optimizer's own step, on the gradients as they are."""
        self._refuse_after_failure()
        self.home.called()
        with self.home.entered():
            self._interceptions[number].run_whole()

    def take(self, number: int, owner: pending.Owner, at_once: bool) -> bool:
        """A step with the gradients of the open backward pass. Returns True when every optimizer has taken them.

        ``at_once``: all is waited for and updated now (warm-up); otherwise only where the user's code requires it.
        """
        if not self.waiting:
            self.home.move()
        self.home.called()
        with self.home.entered():
            return self._take(number, owner, at_once)

    def _take(self, number: int, owner: pending.Owner, at_once: bool) -> bool:
        self._refuse_after_failure()
        optimizer = self._optimizers[number]
        if self._clipping is not None and getattr(optimizer, "grad_scale", None) is not None:
            raise Error(
                "options.max_grad_norm would clip gradients that a GradScaler has not unscaled yet; call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)",
                "invalid_use",
            )
        # A second step with the same gradients finds them arrived, and nothing guards them any more.
        at_once = at_once or number in self._stepped
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

    @property
    def grad_norm(self) -> float | None:
        """Of the last step that was clipped, before clipping."""
        norm = None if self._clipping is None else self._clipping.total_norm
        return None if norm is None else norm.item()

    def finish(self, slots: Sequence[ParameterState]) -> None:
        """Waits for the gradients of these and updates them, with everything else that has arrived by then, or comes
        along on a device."""
        with self.home.entered():
            self._finish(slots)

    def _finish(self, due: Sequence[ParameterState]) -> None:
        self._refuse_after_failure()
        start_ns = time.perf_counter_ns()
        if self._clipping is None:
            there = self._exchange.wait([slot.index for slot in due])
        else:
            self._gradients.finish()
            there = [slot.index for slot in self._all_slots]
        arrived_ns = time.perf_counter_ns()
        self._trace.span("wait", start_ns, arrived_ns)
        self._clip()
        self._arrived.update(there)
        self._arrived.update(self._exchange.newly_arrived())
        with interrupts.after_this():
            for number in list(self._partial):
                part = [slot for slot in self._slots[number] if slot.updating and slot.index in self._arrived]
                if part:
                    self._update(number, part)
        self._trace.span("update", arrived_ns, time.perf_counter_ns())

    def finish_updates_of(self, number: int) -> None:
        remaining = [slot for slot in self._slots[number] if slot.updating]
        if remaining:
            self.finish(remaining)

    def finish_all(self) -> None:
        remaining = self.waiting
        if remaining:
            self.finish(remaining)

    def _clip(self, as_they_are: bool = False) -> None:
        """Once per step. ``as_they_are``: what ``.grad`` holds now, which the user may have put there."""
        if self._clipping is None or self._clipping.done:
            return
        if as_they_are and not self._gradients.in_place(self._all_slots):
            self._clipping.apply_to_replaced()
        else:
            self._clipping.apply()

    @property
    def must_clip_first(self) -> bool:
        """Whether a step that was taken still needs the norm of all gradients, as they are."""
        return self._clipping is not None and not self._clipping.done and bool(self.waiting)

    def _reason_to_wait(self, number: int) -> str | None:
        optimizer = self._optimizers[number]
        if self.home.left:
            return "parameters are read on another CUDA stream than that of step()"
        if not self._gradients.complete:
            return "the backward pass has failed before all gradients existed"
        if self._gradients.used:
            return "gradients are used between backward and step(), as clipping does"
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return "a GradScaler drives the optimizer"
        if not self._gradients.in_place(self._slots[number] if self._clipping is None else self._all_slots):
            return "gradients are replaced between backward and step()"
        return None

    def _take_at_once(self, number: int, reason: str | None) -> None:
        if reason is not None:
            self._say(f"{reason}: such steps wait for all gradients, without overlap with the next forward pass")
        start_ns = time.perf_counter_ns()
        self._gradients.finish()
        arrived_ns = time.perf_counter_ns()
        self._trace.span("wait", start_ns, arrived_ns)
        self._clip(as_they_are=True)
        partial_step.run_without_hooks(self._optimizers[number])
        self._trace.span("update", arrived_ns, time.perf_counter_ns())

    def _say(self, sentence: str) -> None:
        if sentence not in self._said and self._tells:
            self._said.add(sentence)
            _log.warning("%s", sentence)

    def _defer(self, number: int, owner: pending.Owner) -> None:
        due = self._slots[number]
        with interrupts.after_this():
            self._partial[number] = partial_step.PartialStep(self._optimizers[number])
            held = extension.load().held_elsewhere([slot.parameter for slot in due], None, False)
            for slot in due:
                slot.updating = True
                if not pending.is_pending(slot.parameter):
                    pending.mark(slot.parameter, owner)
                if not pending.is_pending(slot.exposed):
                    pending.mark(slot.exposed, owner)  # it has arrived, and the update still needs it
            self._states[number].mark(due, owner)
            self._update_others(number)
        if self._clipping is not None:
            self._arrived.update(self._exchange.newly_arrived())
            arrived = [slot for slot in due if slot.index in self._arrived]
            for slot in arrived:
                self._gradients.receive(slot)
            self._clipping.take(arrived)
        if held:
            self._finish_held([due[position] for position in held])

    def _update_others(self, number: int) -> None:
        """What the optimizer updates besides: frozen parameters that have a gradient all the same."""
        own = {id(slot.parameter) for slot in self._slots[number]}
        groups = self._optimizers[number].param_groups
        others = [p for group in groups for p in group["params"] if id(p) not in own and p.grad is not None]
        if others:
            self._states[number].update(lambda: self._partial[number].run(others, last=False))

    def _finish_held(self, held: Sequence[ParameterState]) -> None:
        """Whoever has a parameter's memory can read it without asking its class."""
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        self._say(
            f"the program holds the memory of {held[0].name}{more} (a view or detach(), a NumPy array, DLPack, "
            "TorchScript, a graph that was kept): these are updated inside of step(), without overlap with the next "
            "forward pass"
        )
        self.finish(held)

    def _update(self, number: int, part: Sequence[ParameterState]) -> None:
        """One call of the optimizer. The user's ``.grad``, which zero_grad() may have emptied by now, is kept aside."""
        for slot in part:
            slot.updating = False
            pending.clear(slot.parameter)
        self._gradients.settle(part)
        for slot in part:
            pending.clear(slot.exposed)
        kept = [slot.parameter.grad for slot in part]
        state = self._states[number]
        state.clear(part)
        last = not any(slot.updating for slot in self._slots[number])
        used = [slot.parameter for slot in part if slot.gradient is not None]
        try:
            for slot in part:
                slot.parameter.grad = slot.gradient
            state.update(lambda: self._partial[number].run(used, last=last))
        except BaseException as error:
            self._fail(part, error)
            raise
        finally:
            for slot, gradient in zip(part, kept, strict=True):
                slot.parameter.grad = gradient
        for slot in part:
            if slot.zero_after:
                slot.zero_after = False
                if slot.gradient is not None:
                    slot.gradient.zero_()
            self._gradients.let_go(slot)
        if last:
            del self._partial[number]
        self._trace.count_update()

    def _fail(self, part: Sequence[ParameterState], error: BaseException) -> None:
        """Some of these may be updated, others not, and nobody can tell: whoever reads one hears of it."""
        for slot in part:
            slot.updating = True
            pending.mark(slot.parameter, self._gradients.listener)
        self._failure = Error(
            f"the update of {parameter_state.names(part)} has failed on this rank ({type(error).__name__}: {error}), "
            "perhaps half-way, so its parameters differ from those of the other ranks; end the training and continue "
            "from the last checkpoint, or call handle.detach() and load one",
            "invalid_use",
        )

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
