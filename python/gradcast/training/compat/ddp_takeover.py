"""Taking the gradients of a DistributedDataParallel module over, and giving them back.

DDP keeps what it does besides: buffers from rank 0 before forward, ``no_sync``, its forward. Only its reduction goes.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused


def check_comm_hooks(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_comm_hooks", None):
        raise refused(
            "a communication hook is registered on this DDP module, and gradcast takes its place, so that it would "
            "never be called; use a DDP module without one"
        )


class DdpTakeover:
    """DDP reduces nothing any more, until ``give_back()``.

    Where ranks run out of inputs (``ddp.join()``), those that have ended shadow DDP's own operations, which they alone
    know. ``joining`` is called before the first one of such a run, ``joined`` after the last.
    """

    def __init__(self, ddp: DistributedDataParallel, joining: Callable[[], None], joined: Callable[[], None]) -> None:
        self._ddp = weakref.ref(ddp)
        self._joining, self._joined = joining, joined
        self._in_join = False
        self._find_unused_parameters = ddp.find_unused_parameters
        self.active = False
        self.take()
        ddp.join_hook = _WatchedJoinHook(self, ddp)
        ddp.__getstate__ = self._state_of_a_copy

    def take(self) -> None:
        ddp = self._ddp()
        # It would make DDP's reducer count unused parameters as ready and reduce buckets by itself.
        ddp.find_unused_parameters = False
        ddp.reducer._remove_autograd_hooks()
        # DDP's forward asks a reducer. One of nothing keeps neither buckets nor parameters alive.
        nothing = nn.Parameter(torch.zeros(1, device=ddp.device))
        ddp._ddp_init_helper([nothing], [False], {0: "nothing"}, static_graph=False)
        # With a static graph DDP would reduce at the end of its first backward pass, whoever's gradients these are.
        ddp._static_graph_delay_allreduce_enqueued = True
        self.active = True

    def _state_of_a_copy(self) -> dict[str, Any]:
        """In the place of ``ddp.__getstate__``: copies have nothing of gradcast, and reduce as DDP does."""
        state = DistributedDataParallel.__getstate__(self._ddp())
        del state["join_hook"], state["__getstate__"]
        if self.active:
            state["find_unused_parameters"] = self._find_unused_parameters
            state["_static_graph_delay_allreduce_enqueued"] = False
        return state

    def before_forward(self) -> None:
        """Calls ``joining`` in the first forward pass inside of ``join()``. Raises for a hook registered since."""
        check_comm_hooks(self._ddp())
        if self._in_join and self.active and self._ddp()._join_config.enable:
            self._joining()

    def end_join(self) -> None:
        self._in_join = False
        self._joined()

    def reduce_again(self) -> None:
        """With a new reducer: the hooks of the old one are gone for good."""
        ddp = self._ddp()
        ddp.find_unused_parameters = self._find_unused_parameters
        ddp._static_graph_delay_allreduce_enqueued = False
        parameters, expect_sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
        self.active = False

    def give_back(self) -> None:
        """DDP is as it was."""
        ddp = self._ddp()
        if ddp is None:
            return
        del ddp.join_hook, ddp.__getstate__
        if self.active:
            self.reduce_again()


class _WatchedJoinHook:
    """In the place of ``ddp.join_hook``."""

    def __init__(self, taken_over: DdpTakeover, ddp: DistributedDataParallel) -> None:
        self._taken_over, self._ddp = taken_over, weakref.ref(ddp)

    def __call__(self, **options: Any) -> JoinHook:
        self._taken_over._in_join = True
        return _WatchedJoin(DistributedDataParallel.join_hook(self._ddp(), **options), self._taken_over)


class _WatchedJoin(JoinHook):
    """What DDP does for a rank without inputs, and when it begins and ends."""

    def __init__(self, hook: JoinHook, taken_over: DdpTakeover) -> None:
        self._hook, self._taken_over = hook, taken_over

    def main_hook(self) -> None:
        # Of a rank that had no input at all, DDP is not back at work yet.
        self._taken_over.before_forward()
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._taken_over.end_join()
