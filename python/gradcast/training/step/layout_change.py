"""A change of the buffers' layout."""

import logging
from collections.abc import Callable, Sequence

from gradcast.training.step import parameter_state
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.parameter_state import ParameterState

_log = logging.getLogger("gradcast")


def change_layout(
    states: Sequence[ParameterState], exchange: GradientExchange, change: Callable[[], None], *, tells: bool
) -> None:
    """Calls ``change``, which may lay the buffers out anew. Otherwise gives them other memory if the program keeps a
    gradient that the next step would overwrite. ``tells``: this rank logs that. REQUIRES: nothing is in flight."""
    buffers = exchange.buffers
    views, apart_count = buffers.views, len(buffers.apart)
    change()
    if buffers.views is views and buffers.is_kept():
        exchange.lay_out(exchange.order)
    if tells and len(buffers.apart) > apart_count:
        kept = [states[index] for index in sorted(buffers.apart)]
        _log.info(
            "the program keeps gradients of %s beyond their step: they have memory of their own from now on, into "
            "which %.3g MB are copied per step",
            parameter_state.names(kept),
            sum(state.parameter.nbytes for state in kept) / 1e6,
        )
