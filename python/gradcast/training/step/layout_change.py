"""A change of the buffers' layout: parameters whose gradients move get the new views."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from gradcast.training.compat import extension
from gradcast.training.step import parameter_state
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.parameter_state import ParameterStates

_log = logging.getLogger("gradcast")


def change_layout(
    states: ParameterStates, exchange: GradientExchange, change: Callable[[], None], *, tells: bool
) -> None:
    """Calls ``change``, which may lay the buffers out anew. Otherwise gives them other memory if the program keeps a
    gradient that the next step would overwrite. ``tells``: this rank logs that. REQUIRES: nothing travels.
    """
    buffers, native = exchange.buffers, extension.load()
    views, apart_count = buffers.views, len(buffers.apart)
    change()
    if buffers.views is views:
        known = [native.fields(states, name) for name in ("visible_grad", "update_grad")]
        if buffers.is_kept(known):
            del known  # these are references, too
            exchange.lay_out(exchange.order)
    if tells and len(buffers.apart) > apart_count:
        kept = [states[index] for index in sorted(buffers.apart)]
        _log.info(
            "the program keeps gradients of %s beyond their step: they have memory of their own from now on, into "
            "which %.3g MB are copied per step",
            parameter_state.names(kept),
            sum(state.parameter.nbytes for state in kept) / 1e6,
        )


@contextlib.contextmanager
def with_new_views(states: ParameterStates, buffers: GradientBuffers) -> Iterator[None]:
    """Inside, the buffers are laid out anew. Afterwards ``states`` refer to the new views instead of the old ones."""
    old_views = buffers.views
    shown = [state for state in states if state.visible_grad is old_views[state.index]]
    in_use = {state.index for state in shown if state.update_grad is state.visible_grad}
    for state in shown:  # any reference of ours to a view would look like one of the program's
        state.visible_grad = None
        state.update_grad = None if state.index in in_use else state.update_grad
    yield
    for state in shown:
        old_view, view = old_views[state.index], buffers.views[state.index]
        state.visible_grad = old_view
        if view is not old_view:  # the gradient has moved, or was left to the program, or is not in use
            grad = state.parameter.grad
            states.set_visible_grad(state, grad if grad is view or grad is old_view else None)
        state.update_grad = state.visible_grad if state.index in in_use else state.update_grad
