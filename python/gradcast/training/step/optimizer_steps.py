"""``optimizer.step()`` in overlap mode: a parameter is updated after its gradient has arrived and before it is read.

Thread safety: under the session's lock.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.training.compat import extension, interrupts
from gradcast.training.measure.early_waits import Cause, EarlyWaits, where
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.step import parameter_state, partial_step
from gradcast.training.step.clipping import ValueClipping
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.optimizer_state import Lock, OptimizerStateGuard
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.part_comparison import PartComparison
from gradcast.training.step.step_settings import Read, StepSettings
from gradcast.training.step.update_callbacks import UpdateCallbacks
from gradcast.training.step.update_stream import UpdateStream


class OptimizerSteps:
    """The steps of all optimizers of a session, with its ``gradients`` and ``waits``. ``values``: clips each element.

    A call of ``step()`` comes to ``take_gradients``, which updates synchronously or leaves the updates due. The
    functions ``complete_updates...`` run updates that are due.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        read: Sequence[Read | None],
        gradients: GradientHooks,
        trace: StepTrace,
        waits: EarlyWaits,
        warn_once: Callable[..., None],
        values: ValueClipping | None,
        callbacks: UpdateCallbacks,
        operations_begun: Callable[[], int | None],
    ) -> None:
        """``read``: what the step() of each optimizer reads. ``operations_begun``: by this rank in the program's
        group; None if that is not known."""
        self._operations_begun = operations_begun
        self._optimizers, self._read = list(optimizers), read
        self._states = states = gradients.states
        ids = [{id(each) for group in optimizer.param_groups for each in group["params"]} for optimizer in optimizers]
        self._states_of = [[state for state in states if id(state.parameter) in held] for held in ids]
        self._exchange, self.gradients, self._trace, self.waits = gradients.exchange, gradients, trace, waits
        self._places: dict[int, partial_step.Places] = {}  # by optimizer
        self._others: dict[int, list[torch.Tensor]] = {}  # by optimizer: what else it updates
        self._partial: dict[int, partial_step.PartialStep] = {}  # by optimizer, while some of its updates are due
        self._left: dict[int, dict[int, ParameterState]] = {}  # by optimizer and index: whose updates are due
        self._stepped: set[int] = set()  # optimizers that have taken the gradients of the open step
        self._arrived: set[int] = set()  # parameters whose gradients of the open step are known to have arrived
        self._interceptions: list[partial_step.StepInterception] = []
        self._guards: list[OptimizerStateGuard] = []
        self._comparisons = [PartComparison(warn_once) for _ in optimizers]
        self.stream = UpdateStream(self._exchange.buffers.flats[0].device)
        self._clipping = gradients.clipping  # by the norm of all gradients, before the first update
        self.values = values
        self._clippings = [each for each in (self._clipping, values) if each is not None]
        self._warn_once = warn_once
        self._callbacks = callbacks
        self._updated: collections.deque[dict[str, torch.nn.Parameter]] = collections.deque()  # not shown to them yet
        self._thread: int | None = None  # that calls step()
        self.updating: frozenset[ParameterState] = frozenset()  # by another thread than that
        self._failure: Error | None = None  # of an update; parameters are wrong since

    def intercept(self, on_step: Callable[[int], None], flush: Callable[[], None], lock: Lock) -> None:
        """Makes ``step()`` of optimizer k call ``on_step(k)``, and its state_dict() return a completed step's state."""
        self._interceptions = partial_step.intercepted(self._optimizers, on_step)
        for number, optimizer in enumerate(self._optimizers):
            self._interceptions[number].flush_before_state(flush)
            on_access = functools.partial(self._on_state_access, number)
            self._guards.append(OptimizerStateGuard(optimizer, on_access, lock))

    def release(self) -> None:
        for interception, guard in zip(self._interceptions, self._guards, strict=True):
            interception.remove()
            guard.release()
        held = (self._interceptions, self._guards, self._optimizers, self._states_of)
        for each in (*held, self._places, self._others, self._partial, self._left):
            each.clear()

    @property
    def due(self) -> list[ParameterState]:
        return [state for left in self._left.values() for state in left.values()]

    def on_backward_begin(self) -> None:
        """The gradients of the open step are replaced; an optimizer that has not taken them never will."""
        if self.gradients.open and any(each.replaced for each in self._interceptions):
            self._warn_once(
                "the optimizer's step() is called in a way that bypasses gradcast, as Accelerate does with a "
                "GradScaler: such steps wait for all gradients, without overlap with the next forward pass"
                + (", and gradcast does not clip them" if self._clippings else "")
                + ("; functions of handle.on_update() are not called" if self._callbacks else "")
            )
        self.complete_all_updates()
        self._stepped.clear()
        self._arrived.clear()
        for each in self._clippings:
            each.begin_step()

    def parameters_changing(self, tensor: torch.Tensor) -> list[ParameterState] | None:
        """Parameters whose updates change this tensor of an optimizer's state; None if it is not of a state."""
        for guard in self._guards:
            found = guard.parameters_changing(tensor)
            if found is not None:
                return found
        return None

    def run_whole(self, number: int) -> None:
        """Runs the optimizer's own step on the gradients as they are."""
        self._refuse_after_failure()
        self.stream.follow_caller()
        with self.stream.entered():
            self._run_whole(number)

    def _run_whole(self, number: int, parts: int = 1) -> None:
        if parts == 1:
            self._interceptions[number].run_whole()
        else:
            self._run_all_parts(number, parts)
        self._note_updated(self._states_of[number])

    def _run_all_parts(self, number: int, parts: int) -> None:
        """The same in so many calls."""
        optimizer = self._optimizers[number]
        partial = partial_step.PartialStep(optimizer, places=self._places_of(number))
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        size = -(-len(parameters) // parts)
        for first in range(0, len(parameters), size):
            with interrupts.after_this():  # meanwhile the optimizer has other groups
                partial.run(parameters[first : first + size], last=first + size >= len(parameters))
            self._trace.count_update()

    def _note_updated(self, part: Sequence[ParameterState]) -> None:
        if self._callbacks:
            self._updated.append({state.name: state.parameter for state in part})

    def call_back(self) -> None:
        """Shows the program's functions what was updated since the last call. They may wait for other parameters, which
        leads here again, so nothing else may be unfinished."""
        if not self._updated:
            return
        start_ns, record = self._trace.now(), self._trace.current
        with self.stream.entered():
            self._callbacks.run(self._updated, "after step()" if record is None else f"in step {record.step + 1}")
        self._trace.span("update", start_ns, self._trace.now())

    def take_gradients(self, number: int, synchronous: bool, parts: int = 1) -> bool:
        """A step with the gradients of the open backward pass. Returns True once every optimizer has taken them.

        ``synchronous``: waits for everything and updates now, as in the warm-up. Otherwise updates are left due, unless
        the program's code makes that impossible. ``parts``: in which a synchronous step of the only optimizer updates,
        if it could be left due.
        """
        self._thread = threading.get_ident()
        if not self.due:
            self.stream.move_to_caller()
        self.stream.follow_caller()
        with self.stream.entered():
            self._take_gradients(number, synchronous, parts)
        self._stepped.add(number)
        if len(self._stepped) < len(self._optimizers):
            return False
        self._stepped.clear()
        return True

    def _take_gradients(self, number: int, synchronous: bool, parts: int) -> None:
        self._refuse_after_failure()
        for each in self._clippings:
            each.on_step()
        if self._clipping is not None:
            self._clipping.may_certify = self._exchange.plan.mode == "overlap"
        optimizer = self._optimizers[number]
        if self._clippings and getattr(optimizer, "grad_scale", None) is not None:
            raise refused(
                "gradcast would clip gradients that a GradScaler has not unscaled yet; call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        # The gradients have arrived by a second step with them, and nothing guards them any more.
        synchronous = synchronous or number in self._stepped
        if synchronous:
            self._step_now(number, None, parts)
            return
        settings = StepSettings(optimizer, self._read[number])
        reason = self.reason_to_wait(number, settings)
        if reason is None:
            self._defer(number, settings)
            return
        if reason is Cause.SETTINGS:
            self._warn_once(
                "%s: step() of %s reads its %s, and nobody can tell whether the program changes that before the "
                "updates run: they run inside step(), without overlap with the next forward pass",
                where(),
                type(optimizer).__name__,
                parameter_state.shown(settings.opaque),
            )
        self._step_now(number, reason, parts)

    @property
    def grad_norm(self) -> float | None:
        """The norm before clipping of the last step that was clipped."""
        norm = None if self._clipping is None else self._clipping.total_norm
        return None if norm is None else norm.item()

    def complete_updates(self, due: Sequence[ParameterState]) -> None:
        """Waits for the gradients of these parameters and updates them, together with all others that have arrived."""
        if due:
            with self.stream.entered(), partial_step.default_context():
                self._complete_updates(due)
            self.call_back()

    def _complete_updates(self, due: Sequence[ParameterState]) -> None:
        self._refuse_after_failure()
        self._wait_for(due)
        self._wait_where_compared()
        arrived_ns = self._trace.now()
        with interrupts.after_this():  # a handler that reads may have updated some while this has waited
            self._clip()
            for number, left in list(self._left.items()):
                part = [left[index] for index in sorted(left.keys() & self._arrived)]
                if part:
                    self._update(number, part)
        self._trace.span("update", arrived_ns, self._trace.now())

    def _wait_where_compared(self) -> None:
        """Steps of which the first part is about to be updated: waits for all of one that is compared."""
        compared: list[ParameterState] = []
        with interrupts.after_this():
            for number, left in self._left.items():
                partial, arrived = self._partial[number], [left[i] for i in sorted(left.keys() & self._arrived)]
                if arrived and partial.is_compared is None:
                    known = () if self._exchange.on_device else arrived
                    partial.is_compared = self._comparisons[number].is_due(known)
                if partial.is_compared:
                    compared += left.values()
        if compared:
            self._wait_for(compared)

    def _wait_for(self, due: Sequence[ParameterState]) -> None:
        """Waits until these parameters can be updated. If nothing certifies that clipping changes nothing, that is when
        all gradients have arrived."""
        clipping, indices = self._clipping, [state.index for state in due]
        if clipping is None or clipping.done:
            self._note_arrived(indices)
        elif clipping.certifies and clipping.may_certify and all(state.is_update_due for state in self._states):
            self._note_arrived(indices)
            with self._trace.timed("update"), interrupts.after_this():
                if not clipping.done:
                    self._take_norms(self._states)
                    clipping.certify()
        if clipping is not None and not clipping.done:
            with self._trace.timed("wait"):
                self.gradients.wait_for_all()
            self._arrived.update(range(len(self._states)))

    def _note_arrived(self, indices: Sequence[int]) -> None:
        with self._trace.timed("wait"):  # the message tells whether the ranks' gradients belong together
            self._arrived.update(self._exchange.wait([self.gradients.message.index, *indices]))
            self.gradients.weights.receive()
        self._arrived.update(self._exchange.newly_arrived())

    def _take_norms(self, states: Sequence[ParameterState]) -> None:
        """Computes the norms of those gradients that have arrived. If this rank has not used a parameter, whether
        another one has is not known yet."""
        arrived = [state for state in states if state.index in self._arrived and state.locally_unused is None]
        self.gradients.arrived.finish(arrived)
        for state in arrived:
            self.gradients.arrived.copy_arrived(state)
        self._clipping.compute_norms(arrived)

    def complete_updates_of(self, number: int) -> None:
        self.complete_updates(list(self._left.get(number, {}).values()))

    def _on_state_access(self, number: int) -> None:
        with self.waits.at(Cause.STATE):
            self.complete_updates_of(number)

    def complete_all_updates(self) -> None:
        self.complete_updates(self.due)

    def _clip(self, as_they_are: bool = False) -> None:
        """Clips once per step. ``as_they_are``: what ``.grad`` holds now, which the program may have replaced."""
        if self._clipping is None or self._clipping.done:
            return
        if as_they_are and not self._clipping.asked and not self.gradients.are_in_place(self._states):
            self._clipping.apply_to_replaced()
        else:
            self._clipping.apply(deferred=not as_they_are)

    def clip_asked(self) -> None:
        """The program uses gradients before ``step()``: clips if it has asked for that. REQUIRES: all are settled."""
        with self.stream.entered():
            if self._clipping is not None and self._clipping.asked:
                self._clip(as_they_are=True)
            if self.values is not None and self.values.asked:
                self.values.clip(self._states)
                self.values.done = True

    @property
    def must_clip_first(self) -> bool:
        """Whether a deferred step still needs the norm of all gradients, so that none of them may change."""
        return self._clipping is not None and not self._clipping.done and bool(self.due)

    def reason_to_wait(self, number: int, settings: StepSettings | None = None) -> Cause | None:
        """Why a step of this optimizer cannot be deferred, if it cannot. ``settings``: as they are, if known."""
        optimizer = self._optimizers[number]
        if (settings or StepSettings(optimizer, self._read[number])).opaque:
            return Cause.SETTINGS
        if self._guards[number].is_held:
            return Cause.STATE_HELD
        if self.stream.read_elsewhere:
            return Cause.OTHER_STREAM
        if not self.gradients.all_sent:
            return Cause.FAILED
        if self.gradients.values_used:
            return Cause.GRADIENTS
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return Cause.SCALER
        if not self.gradients.are_in_place(self._states_of[number] if self._clipping is None else self._states):
            return Cause.REPLACED
        return None

    def held(self, number: int) -> list[ParameterState]:
        """Parameters of this optimizer whose memory the program holds, or another process shares: they could read an
        update unnoticed."""
        states = self._states_of[number]
        native = extension.load()
        parameters = native.parameters_of(states)
        found = native.held_elsewhere(parameters, None, False)
        shared = [position for position in native.foreign_memory(parameters) if parameters[position].is_shared()]
        return [states[position] for position in sorted({*found, *shared})]

    def _step_now(self, number: int, reason: Cause | None, parts: int) -> None:
        """A synchronous step. ``reason``: why it is not deferred, unless the caller has asked for that."""
        # Gradients that were used have arrived, and what that has waited is counted there.
        waits_here = reason not in (None, Cause.GRADIENTS)
        with self.waits.at(reason) if waits_here else contextlib.nullcontext(), self._trace.timed("wait"):
            self.gradients.wait_for_all()
        arrived_ns = self._trace.now()
        self._clip(as_they_are=True)
        if self.values is not None:
            self.values.clip_as_they_are(self._states_of[number])
        # Predictions do not know which of several optimizers a call is of: then nothing shows what one costs.
        divisible = parts > 1 and len(self._optimizers) == 1 and self.reason_to_wait(number) is None
        self._run_whole(number, parts if divisible else 1)
        self._trace.span("update", arrived_ns, self._trace.now())

    def _defer(self, number: int, settings: StepSettings) -> None:
        """Leaves all updates of this optimizer due."""
        due, owner = self._states_of[number], self.gradients.listener
        with interrupts.after_this():
            self._left[number] = dict(zip(extension.load().indices_of(due), due, strict=True))
            held = self.held(number)
            parameter_state.defer_update(due, owner)
            self._guards[number].guard(due, owner)
            self._partial[number] = partial_step.PartialStep(
                self._optimizers[number], settings, self._places_of(number)
            )
            self._update_others(number)
        if self._clipping is not None:
            self._arrived.update(self._exchange.newly_arrived())
            self._take_norms(due)
        if held:
            self._complete_held(held)

    def _places_of(self, number: int) -> partial_step.Places:
        groups = self._optimizers[number].param_groups
        if number not in self._places or not self._places[number].are_those_of(groups):
            self._places[number] = partial_step.Places(groups)
            self._others[number] = self._places[number].without(
                {id(each.parameter) for each in self._states_of[number]}
            )
        return self._places[number]

    def _update_others(self, number: int) -> None:
        """Updates what else the optimizer updates: frozen parameters that have a gradient."""
        others = [parameter for parameter in self._others[number] if parameter.grad is not None]
        if others:
            self._guards[number].update(lambda: self._partial[number].run(others, last=False))

    def _complete_held(self, held: Sequence[ParameterState]) -> None:
        """Completes the updates of parameters whose memory the program holds: it could read that unnoticed."""
        self._warn_once(
            "%s: the program holds the memory of %s (a view or detach(), a NumPy array, DLPack, TorchScript, a graph "
            "that was kept): these are updated inside step(), without overlap with the next forward pass",
            where(),
            held[0].name + (f" and {len(held) - 1} more" if len(held) > 1 else ""),
        )
        with self.waits.at(Cause.HELD):
            self._complete_updates(held)

    def _update(self, number: int, part: list[ParameterState]) -> None:
        """One call of the optimizer. ``.grad``, which zero_grad() may have emptied by now, is the same afterwards."""
        self.gradients.arrived.settle(part)
        if self._clipping is not None and self._clipping.certified:
            self._clipping.compute_norms(part)
        if self.values is not None:
            self.values.clip(part)
        # The thread that trains must not read half an update of this one. (On a device, optimizers choose other kernels
        # for pending parameters, and updates are in the order of a queue.)
        elsewhere = threading.get_ident() != self._thread
        hidden = elsewhere and part[0].parameter.is_cpu
        if hidden:
            self.updating = frozenset(part)
        parameter_state.start_update(part, hidden=hidden)
        left, guard = self._left[number], self._guards[number]
        native = extension.load()
        for index in native.indices_of(part):
            del left[index]
        guard.clear(part)
        last = not left
        parameters = native.parameters_of(part)
        used = native.parameters_of(native.with_update(part))
        updates = native.updates_of(part)
        partial, comparison = self._partial[number], self._comparisons[number]
        action = functools.partial(partial.run, used, last=last, elsewhere=elsewhere)
        watching: contextlib.AbstractContextManager = contextlib.nullcontext()
        if partial.is_compared and last and used:
            action = functools.partial(comparison.run, partial, used, action)
        elif not elsewhere:
            watching = comparison.watching()
        if not elsewhere:  # then the thread that trains may begin some meanwhile
            action = functools.partial(self._without_collectives, partial.name, action)
        before, failure = native.swap_gradients(parameters, updates), None
        try:
            with watching:
                guard.update(action, hidden=hidden)
        except BaseException as error:
            failure = error
            raise
        finally:
            if not native.hold_gradients(parameters, updates):
                # The step, or meanwhile another thread (zero_grad()), has replaced some that were still in .grad.
                now = [parameter.grad for parameter in parameters]
                rows = zip(before, updates, now, strict=True)
                before = [new if old is update else old for old, update, new in rows]
            native.swap_gradients(parameters, before)
            if hidden:
                parameter_state.end_hidden_update(part)
                self.updating = frozenset()
            if failure is not None:
                left.update((state.index, state) for state in part)
                self._fail(part, failure)
        for state in [each for each in part if each.zero_after_update]:
            state.zero_after_update = False
            if state.update_grad is not None:
                state.update_grad.zero_()
        self.gradients.arrived.drop_released(part)
        if last:
            del self._partial[number], self._left[number]
            guard.end_step()
        self._trace.count_update()
        self._note_updated(part)
        if self._clipping is not None and self._clipping.certified and not self._partial:
            self._clipping.finish_certified(self._trace.current.step)

    def _without_collectives(self, name: str, action: Callable[[], None]) -> None:
        """Runs an update. Raises Error(invalid_use) if it has begun operations in the program's group."""
        before = self._operations_begun()
        action()
        if self._operations_begun() != before:
            raise refused(
                f"step() of {name} starts collective operations, and which parameters are updated together differs "
                "between ranks, so that these operations do not match; use hook mode: gradcast.attach(module) without "
                "the optimizer"
            )

    def _fail(self, part: list[ParameterState], error: BaseException) -> None:
        """Some of these parameters may be updated, others not: every later use of one raises."""
        parameter_state.fail_update(part, self.gradients.listener)
        self._failure = refused(
            f"the update of {parameter_state.names(part)} has failed on this rank ({type(error).__name__}: {error}), "
            "perhaps half-way, so its parameters differ from those of the other ranks; end the training and continue "
            "from the last checkpoint, or call handle.detach() and load one"
        )

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
