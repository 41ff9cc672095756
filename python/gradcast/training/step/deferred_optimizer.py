"""One optimizer in overlap mode: ``step()`` leaves its updates pending, and parts of it run as gradients arrive.

Thread safety: under the session's lock.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.training.compat import extension, interrupts
from gradcast.training.compat.sharding import is_part, local_of
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.optimizer_state import Lock, OptimizerStateGuard
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.part_comparison import PartComparison
from gradcast.training.step.partial_step import PartialStep, Places, StepInterception, rounds_otherwise
from gradcast.training.step.sharded_gradients import ShardedGradients
from gradcast.training.step.step_settings import Read, StepSettings


class DeferredOptimizer:
    """One optimizer in overlap mode. ``states``: the parameters of ``gradients`` that it updates. ``has_stepped``: it
    has taken the gradients of the open step. ``guard``: of its state."""

    def __init__(
        self,
        optimizer: Optimizer,
        read: Read | None,
        gradients: GradientHooks,
        warn_once: Callable[..., None],
        operations_begun: Callable[[], object],
    ) -> None:
        """``read``: the settings that its step reads. ``operations_begun``: changes where this rank begins an operation
        in the program's group, or in those of its DTensors, if that is known."""
        self.optimizer, self._read, self._operations_begun = optimizer, read, operations_begun
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self.states = extension.load().States([state for state in gradients.states if id(state.parameter) in held])
        self._comparison = PartComparison(self.states, warn_once)
        has_16_bits = any(state.parameter.dtype.itemsize == 2 for state in self.states)
        self._may_round_otherwise = isinstance(optimizer, torch.optim.SGD) and has_16_bits
        self._is_sharded = isinstance(gradients, ShardedGradients)
        self._has_parts = any(is_part(state.parameter) for state in self.states)
        self._places = Places([])
        self._others: list[torch.Tensor] = []  # that it updates beside ``states``
        self._partial: PartialStep | None = None  # while some of its updates are pending
        self.has_stepped = False
        self.interception: Any = None  # from the first ``intercept`` on

    def intercept(
        self, on_step: Callable[[], None], flush: Callable[[], None], on_access: Callable[[], None], lock: Lock
    ) -> None:
        """Makes ``step()`` call ``on_step``, state_dict() ``flush``, and any use of the state ``on_access``."""
        if self.interception is None:
            self.interception = StepInterception(self.optimizer, on_step)
            self.interception.flush_before_state(flush)
        self.interception.is_paused = False
        self.guard = OptimizerStateGuard(self.optimizer, on_access, lock)

    def leave(self) -> None:
        """Gives the optimizer its own ``step()`` again, until ``intercept``. Idempotent."""
        self.interception.is_paused = True
        self.guard.release()

    def release(self) -> None:
        self.leave()
        self.interception.remove()
        del self.optimizer, self.states, self._places, self._others, self._partial  # a handle may keep this object

    @property
    def due(self) -> Sequence[ParameterState]:
        """Parameters whose updates are pending."""
        return extension.load().due(self.states)

    def settings(self) -> StepSettings:
        return StepSettings(self.optimizer, self._read)

    def held(self) -> list[ParameterState]:
        """Parameters whose memory the program holds, or another process shares: they could read an update unnoticed."""
        if self._is_sharded:  # FSDP holds the memory, and reads it where gradcast knows
            return []
        native = extension.load()
        parameters = native.parameters_of(self.states)
        found, memory = set(native.held_elsewhere(parameters, None, False)), parameters
        if self._has_parts:
            memory = list(map(local_of, parameters))
            found.update(native.held_elsewhere(memory, None, False))
        shared = [position for position in native.foreign_memory(memory) if memory[position].is_shared()]
        return [self.states[position] for position in sorted({*found, *shared})]

    def run_whole(self) -> None:
        """Runs a whole step as it is. Raises Error(invalid_use), on all ranks alike, if it cannot run in parts."""
        if self._has_parts:
            self._run_watched(self.interception.run_whole)
        else:
            self.interception.run_whole()

    def run_in_parts(self, parts: int, on_part: Callable[[], None]) -> None:
        """Runs a whole step in ``parts`` calls, after each of which ``on_part`` is called."""
        partial = PartialStep(self.optimizer, places=self._current_places())
        parameters = [each for group in self.optimizer.param_groups for each in group["params"]]
        size = -(-len(parameters) // (1 if self._rounds_otherwise() else parts))
        for first in range(0, len(parameters), size):
            with interrupts.after_this():  # meanwhile the optimizer has other groups
                part = parameters[first : first + size]
                self._run_watched(functools.partial(partial.run, part, last=first + size >= len(parameters)))
            on_part()

    def defer(self, settings: StepSettings, owner: pending.Owner) -> None:
        """Leaves all updates pending, with these settings, except those of frozen parameters that have a gradient."""
        parameter_state.defer_update(self.states, owner)
        self.guard.guard(self.states, owner)
        self._partial = PartialStep(self.optimizer, settings, self._current_places())
        others = [parameter for parameter in self._others if parameter.grad is not None]
        if others:
            with self.guard.open():
                self._partial.run(others, last=False)

    def is_compared(self, arrived: Sequence[ParameterState]) -> bool:
        """Returns whether the pending step is compared, and so not divided. ``arrived``: those of its parameters whose
        gradients the host knows; used only by the first call."""
        if self._partial.is_compared is None:
            self._partial.is_compared = self._comparison.is_due(arrived) or self._rounds_otherwise()
        return self._partial.is_compared

    def _rounds_otherwise(self) -> bool:
        return self._may_round_otherwise and rounds_otherwise(self.optimizer)

    def update(self, part: Sequence[ParameterState], *, last: bool, elsewhere: bool, hidden: bool) -> None:
        """Calls the optimizer once. ``.grad``, which zero_grad() may have emptied by now, is the same afterwards.

        ``last``: no other updates are pending. ``elsewhere``: on another thread than the one that trains. ``hidden``:
        other threads wait for the end.
        """
        native = extension.load()
        parameters, updates = native.parameters_of(part), native.updates_of(part)
        parameter_state.start_update(part, hidden=hidden)
        self.guard.clear(part)
        before = native.swap_gradients(parameters, updates)
        try:
            used = native.parameters_of(native.with_update(part))
            with self.guard.open(hidden=hidden):
                self._run(used, last=last, elsewhere=elsewhere)
        finally:
            if not native.hold_gradients(parameters, updates):
                # The step, or meanwhile another thread (zero_grad()), has replaced some that were still in .grad.
                now = [parameter.grad for parameter in parameters]
                rows = zip(before, updates, now, strict=True)
                before = [new if old is update else old for old, update, new in rows]
            native.swap_gradients(parameters, before)
            if hidden:
                parameter_state.end_hidden_update(part)
        if last:
            self._partial = None
            self.guard.end_step()

    def _run(self, parameters: list[nn.Parameter], *, last: bool, elsewhere: bool) -> None:
        partial = self._partial
        run = functools.partial(partial.run, parameters, last=last, elsewhere=elsewhere)
        if partial.is_compared and last and parameters:
            run = functools.partial(self._comparison.run, partial, parameters, run)
        if elsewhere:  # operations that begin meanwhile may be the training thread's
            run()
        else:
            self._run_watched(functools.partial(self._comparison.run_watched, run))

    def _run_watched(self, run: Callable[[], None]) -> None:
        """Raises Error(invalid_use) if the update begins operations of the ranks."""
        before = self._operations_begun()
        run()
        if self._operations_begun() != before:
            raise refused(
                f"step() of {type(self.optimizer).__name__} starts collective operations, and which parameters are "
                "updated together differs between ranks, so that these operations do not match; use hook mode: "
                "gradcast.attach(module) without the optimizer"
            )

    def _current_places(self) -> Places:
        groups = self.optimizer.param_groups
        if not self._places.are_those_of(groups):
            self._places = Places(groups)
            self._others = self._places.without({id(state.parameter) for state in self.states})
        return self._places
