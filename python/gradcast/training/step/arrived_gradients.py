"""Gradients that have arrived: ``.grad`` becomes the value that all ranks agree on, also where this rank has not used
the parameter.

Thread safety: under the session's lock.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gradcast.training.compat import extension
from gradcast.training.compat.sharding import local_of
from gradcast.training.step import parameter_state
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.parameter_state import LocallyUnused, ParameterState
from gradcast.training.step.rank_consistency import RankConsistency
from gradcast.training.step.step_message import StepMessage
from gradcast.training.step.weights import StepWeights

# More steps than a loop that alternates between frozen parts leaves one frozen, and more than a warm-up takes.
_LONG_FROZEN_STEPS = 64


class ArrivedGradients:
    """The gradients of ``table`` that have arrived. ``any_unusual``: in this step, this rank has not used a parameter,
    or a ``.grad`` has memory of its own."""

    any_unusual = False

    def __init__(
        self,
        table: Any,
        exchange: GradientExchange,
        message: StepMessage,
        weights: StepWeights,
        consistency: RankConsistency,
    ) -> None:
        self.adds: set[int] = set()  # parameters whose sum is added to their ``.grad``, not copied there
        self.divisors: dict[int, int] = {}  # of ``.grad`` once it has its value, by parameter
        self._table, self._exchange, self._message = table, exchange, message
        self._weights, self._consistency = weights, consistency

    @property
    def long_frozen(self) -> set[int]:
        """Ids of parameters that have been frozen on all ranks for many steps in a row."""
        return {id(each.parameter) for each in self._table.frozen_for(_LONG_FROZEN_STEPS)}

    def wait_for(self, states: Sequence[ParameterState]) -> None:
        """Waits until these gradients have arrived, and notes all that have. REQUIRES: all have been sent."""
        # The message shows whether the ranks' gradients belong together.
        missing = self._table.missing([self._message.index, *extension.load().indices_of(states)])
        if missing:
            self._table.note_arrived(self._exchange.wait(missing, with_earlier=True))
        self.note()
        self._weights.receive()

    def note(self) -> None:
        """Notes the gradients that have arrived by now."""
        self._table.note_arrived(self._exchange.newly_arrived())

    def settle(self, states: Sequence[ParameterState]) -> None:
        """Makes ``.grad`` the value that all ranks agree on, also if this rank has not used the parameter. REQUIRES:
        these gradients and the step message have arrived."""
        self._consistency.on_arrival()
        self.finish(states)
        unusual = extension.load().unusual(states) if self.any_unusual else []
        unused = [state for state in unusual if state.locally_unused is not None]
        usage = self._message.usage([state.index for state in unused])
        for state, (is_used, is_frozen) in zip(unused, usage, strict=True):
            locally_unused, state.locally_unused = state.locally_unused, None
            state.frozen_steps = state.frozen_steps + 1 if is_frozen else 0
            if not is_used:
                state.copy_due = False
                self.adds.discard(state.index)
                self._restore(state, locally_unused)
        for state in unusual:
            self.copy_arrived(state)
        self._divide(states)
        parameter_state.arrive(states)

    def finish(self, states: Sequence[ParameterState]) -> None:
        """Makes the sums in the buffer the mean. REQUIRES: these gradients have arrived."""
        self._weights.finish(state.index for state in states)

    def _divide(self, states: Sequence[ParameterState]) -> None:
        for state in states if self.divisors else ():
            divisor, gradient = self.divisors.pop(state.index, 1), state.update_grad
            if divisor != 1 and gradient is not None:
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    local_of(gradient).div_(divisor)

    def copy_arrived(self, state: ParameterState) -> None:
        """Copies the sum into a ``.grad`` outside of the buffer, or adds it. REQUIRES: this gradient has arrived."""
        if state.copy_due:
            state.copy_due = False
            _copy(self._exchange.buffers.views[state.index], state.visible_grad, adds=state.index in self.adds)
            self.adds.discard(state.index)

    def _restore(self, state: ParameterState, locally_unused: LocallyUnused) -> None:
        """Restores the ``.grad`` of before the step, as no rank has used the parameter."""
        if locally_unused.was_view:
            _copy(locally_unused.grad_before, state.visible_grad)
            return
        state.update_grad = locally_unused.grad_before
        if state.parameter.grad is state.visible_grad:
            state.parameter.grad = locally_unused.grad_before

    def drop_released(self, states: Sequence[ParameterState]) -> None:
        """Drops gradients outside of the buffer once the program has released them, with zero_grad()."""
        apart = self._exchange.buffers.apart
        for state in [state for state in states if state.index in apart] if apart else ():
            if state.parameter.grad is not state.visible_grad:
                state.update_grad = None
                state.visible_grad = None


def _copy(value: torch.Tensor, into: torch.Tensor, *, adds: bool = False) -> None:
    """Copies, or ``adds``, although ``into`` may be pending."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        into = local_of(into)
        into.add_(value) if adds else into.copy_(value)
        if into.is_cuda:  # the current stream need not be the one that these tensors were allocated on
            stream = torch.cuda.current_stream(into.device)
            value.record_stream(stream)
            into.record_stream(stream)
