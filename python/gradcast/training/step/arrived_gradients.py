"""Gradients that have arrived: ``.grad`` becomes what the ranks agree on, also where this rank has not used the
parameter.

Thread safety: under the session's lock; ``count_frozen`` also from autograd's threads.
"""

from collections.abc import Sequence

import torch

from gradcast.training.compat import extension
from gradcast.training.step import parameter_state
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.parameter_state import LocallyUnused, ParameterState, ParameterStates
from gradcast.training.step.rank_consistency import RankConsistency
from gradcast.training.step.step_message import StepMessage
from gradcast.training.step.weights import StepWeights

# More steps than a loop that alternates between frozen parts leaves one frozen, and more than a warm-up takes.
_LONG_FROZEN_STEPS = 64


class ArrivedGradients:
    """``long_frozen``: ids of parameters that have been frozen on all ranks for many steps in a row."""

    def __init__(
        self,
        states: ParameterStates,
        buffers: GradientBuffers,
        message: StepMessage,
        weights: StepWeights,
        consistency: RankConsistency,
    ) -> None:
        self._states, self._buffers, self._message = states, buffers, message
        self._weights, self._consistency = weights, consistency
        self.long_frozen: set[int] = set()

    def settle(self, states: list[ParameterState]) -> None:
        """Makes ``.grad`` what the ranks agree on, also if this rank has not used the parameter. REQUIRES: these
        gradients and the step message have arrived."""
        native = extension.load()
        self._consistency.on_arrival()
        self.finish(states)
        unused = native.with_field(states, "locally_unused", None, False)
        for state, (is_used, is_frozen) in zip(
            unused, self._message.usage([state.index for state in unused]), strict=True
        ):
            locally_unused, state.locally_unused = state.locally_unused, None
            self.count_frozen(state, is_frozen)
            if not is_used:
                state.copy_due = False
                self._restore(state, locally_unused)
        for state in native.with_field(states, "copy_due", True):
            self.copy_arrived(state)
        parameter_state.arrive(states)

    def finish(self, states: Sequence[ParameterState]) -> None:
        """Makes the sums in the buffer the mean. REQUIRES: these gradients have arrived."""
        self._weights.finish(extension.load().fields(states, "index"))

    def copy_arrived(self, state: ParameterState) -> None:
        """Copies the sum into a ``.grad`` that lies apart from the buffer. REQUIRES: this gradient has arrived."""
        if state.copy_due:
            state.copy_due = False
            _copy(self._buffers.views[state.index], into=state.visible_grad)

    def count_frozen(self, state: ParameterState, is_frozen: bool) -> None:
        state.frozen_steps = state.frozen_steps + 1 if is_frozen else 0
        if state.frozen_steps == _LONG_FROZEN_STEPS:
            self.long_frozen.add(id(state.parameter))
        elif state.frozen_steps == 0:
            self.long_frozen.discard(id(state.parameter))

    def _restore(self, state: ParameterState, locally_unused: LocallyUnused) -> None:
        """No rank has used the parameter: its ``.grad`` is the one of before the step."""
        if locally_unused.was_view:
            _copy(locally_unused.grad_before, into=state.visible_grad)
            return
        state.update_grad = locally_unused.grad_before
        if state.parameter.grad is state.visible_grad:
            state.parameter.grad = locally_unused.grad_before

    def drop_released(self, states: Sequence[ParameterState]) -> None:
        """Drops gradients that lie apart from the buffer once the program has released them, with zero_grad()."""
        apart = self._buffers.apart
        for state in [state for state in states if state.index in apart] if apart else ():
            if state.parameter.grad is not state.visible_grad:
                state.update_grad = None
                self._states.set_visible_grad(state, None)


def _copy(value: torch.Tensor, into: torch.Tensor) -> None:
    """Copies, although ``into`` may be pending."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        into.copy_(value)
        if into.is_cuda:  # the current stream need not be the one that these tensors were allocated on
            stream = torch.cuda.current_stream(into.device)
            value.record_stream(stream)
            into.record_stream(stream)
