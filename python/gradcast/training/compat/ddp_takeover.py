"""Takes the gradient reduction away from a DistributedDataParallel module, and gives it back.

DDP still does everything else: its ``no_sync`` and forward work, and it decides when buffers are sent from rank 0.
gradcast sends them with the gradients if blocks may be in flight then.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused

# DDP waits for other ranks inside these.
_WAITING = (torch.autograd.graph._engine_run_backward.__code__, DistributedDataParallel._pre_forward.__code__)


class Buckets(NamedTuple):
    """DDP's buckets close at ``cap_bytes``. ``has_small_first``: the first one closes at torch's own size, 1 MiB."""

    cap_bytes: int
    has_small_first: bool


def check_comm_hooks(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "_comm_hooks", None):
        raise refused(
            "a communication hook is registered on this DDP module; gradcast would take its place, and it would never "
            "be called; use a DDP module without one"
        )


def has_buffer_hook(ddp: DistributedDataParallel) -> bool:
    """Returns whether the program sends the buffers in its own way (``_register_buffer_comm_hook``)."""
    return hasattr(ddp, "buffer_hook")


class ArmedReducer(torch.distributed.Reducer):
    """The reducer that a DDP module has in place of its own. It reduces nothing, and notes whether DDP's would.

    ``is_armed``: ``prepare_for_backward`` was called, by DDP's forward or by the program, and no gradients have been
    reduced since. From then on DDP's reducer acts in any backward pass, whatever its flags are meanwhile.
    """

    is_armed = False

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        self.is_armed = True
        super().prepare_for_backward(outputs)

    def _install_post_backward_futures(self, futures: list[torch.futures.Future]) -> None:
        """Waits for them at once: the end of a reduction, where DDP's reducer would, never comes."""
        torch.futures.wait_all(futures)


@contextlib.contextmanager
def _making_armed_reducers() -> Iterator[None]:
    """Makes DDP use this class for its reducer inside."""
    # A reducer made earlier cannot change its class, and DDP has no parameter for it.
    package: Any = torch.distributed
    own, package.Reducer = package.Reducer, ArmedReducer
    try:
        yield
    finally:
        package.Reducer = own


@contextlib.contextmanager
def _none_frozen(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Thaws these parameters inside."""
    frozen = [each for each in parameters if not each.requires_grad and each.is_floating_point()]
    for each in frozen:
        each.requires_grad_(True)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(False)


class DdpTakeover:
    """Keeps DDP from reducing until ``give_back()``. Its reducer is an ArmedReducer.

    ``active``: it does. ``in_join``: the program is inside ``ddp.join()``. Where DDP's forward would send buffers
    meanwhile, ``bring_buffers`` is called. Its argument: DDP would send them in its usual way. If it returns False, DDP
    sends them.

    With ``ddp.join()``, ranks that have run out of inputs shadow DDP's own operations, and cannot shadow gradcast's. So
    DDP has to reduce there: if it does not, ``joining`` is called before the first operation of such a run; ``joined``
    is called after the last.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        joining: Callable[[], None],
        joined: Callable[[], None],
        bring_buffers: Callable[[bool], bool],
    ) -> None:
        self._ddp = weakref.ref(ddp)
        self._joining, self._joined, self._bring_buffers = joining, joined, bring_buffers
        self._in_join = False
        self._find_unused_parameters = ddp.find_unused_parameters
        self._trained = [weakref.ref(each) for each in ddp.module.parameters() if each.requires_grad]
        self._reductions, self._stats = 0, list[int]()
        self.active = False
        self.take()
        ddp.join_hook = self._join_hook
        ddp.__getstate__ = self._state_of_a_copy
        ddp._sync_buffers = self._sync_buffers

    @property
    def in_join(self) -> bool:
        return self._in_join and self._ddp()._join_config.enable  # with enable=False join() does nothing

    def take(self, *, is_armed: bool = False) -> None:
        ddp = self._ddp()
        # With it DDP's reducer would count unused parameters as ready, and reduce buckets.
        ddp.find_unused_parameters = False
        ddp.reducer._remove_autograd_hooks()
        # DDP's forward needs a reducer. An empty one keeps neither buckets nor parameters alive.
        nothing = nn.Parameter(torch.zeros(1, device=ddp.device))
        with _making_armed_reducers():
            ddp._ddp_init_helper([nothing], [False], {0: "nothing"}, static_graph=False)
        # With a static graph DDP would reduce at the end of its first backward pass.
        ddp._static_graph_delay_allreduce_enqueued = True
        ddp.reducer.is_armed = is_armed
        self.active = True

    def _state_of_a_copy(self) -> dict[str, Any]:
        """Replaces ``ddp.__getstate__``: copies hold nothing of gradcast, and reduce as DDP does."""
        state = DistributedDataParallel.__getstate__(self._ddp())
        del state["join_hook"], state["__getstate__"], state["_sync_buffers"]
        if self.active:
            state["find_unused_parameters"] = self._find_unused_parameters
            state["_static_graph_delay_allreduce_enqueued"] = False
        return state

    def before_forward(self) -> None:
        """Calls ``joining`` in the first forward pass inside ``join()``. Raises Error for a communication hook."""
        check_comm_hooks(self._ddp())
        if self.in_join and self.active:
            self._joining()

    def send_buffers(self) -> None:
        """Sends buffers as DDP's forward does, on a rank that runs none while the others do."""
        ddp = self._ddp()
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()

    def _sync_buffers(self) -> None:
        """Replaces ``ddp._sync_buffers``, which DDP's forward calls."""
        ddp = self._ddp()
        if not self.active or not self._bring_buffers(not has_buffer_hook(ddp)):
            DistributedDataParallel._sync_buffers(ddp)

    def _join_hook(self, **options: Any) -> JoinHook:
        """Replaces ``ddp.join_hook``."""
        self._in_join = True
        return _WatchedJoin(DistributedDataParallel.join_hook(self._ddp(), **options), self)

    def end_join(self) -> None:
        self._in_join = False
        self._joined()

    def reduce_again(self, buckets: Buckets | None = None, used: Iterable[nn.Parameter] = ()) -> None:
        """Gives DDP a new reducer, since the hooks of the old one cannot be restored. ``buckets``: their sizes, unless
        the program has chosen a size. ``used``: parameters that backward passes have used since the last reduction."""
        ddp = self._ddp()
        ddp.find_unused_parameters = self._find_unused_parameters
        ddp._static_graph_delay_allreduce_enqueued = False
        own = ddp.modules_buffers, ddp.named_module_buffers
        before = Buckets(ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default)
        # DDP must also reduce parameters that are frozen only now, perhaps on this rank only.
        with _none_frozen([each for trained in self._trained if (each := trained()) is not None]):
            parameters, expect_sparse = ddp._build_params_for_reducer()
            ddp.modules_buffers, ddp.named_module_buffers = own  # DDP made without any sends none that come later
            names = ddp._build_debug_param_to_name_mapping(parameters)
            if buckets is not None and before.has_small_first:  # torch's default size
                ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default = buckets
            ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
        ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default = before
        if ddp.static_graph:
            ddp.reducer._set_static_graph()
            ddp.logger._set_static_graph()
        elif ddp.find_unused_parameters:
            places = {id(parameter): place for place, parameter in enumerate(parameters)}
            for parameter in used:
                ddp.reducer._autograd_hook(places[id(parameter)])
        self.active = False
        self._reductions, self._stats = 0, ddp.reducer.get_backward_stats()

    def completed_reductions(self) -> int:
        """The number of reductions that DDP has completed since ``reduce_again()``, if this is called before each
        forward pass. With a static graph DDP's first one is not counted, on all ranks alike."""
        stats = self._ddp().reducer.get_backward_stats()  # the times at which the last one was given each gradient
        if stats != self._stats:
            self._reductions, self._stats = self._reductions + 1, stats
        return self._reductions

    def place_of(self, thread: int) -> tuple[str, list[int]] | None:
        """Returns where this thread is inside backward or before DDP's forward, None elsewhere. It stays the same while
        no gradient comes. Any thread may call this."""
        ddp, frame = self._ddp(), sys._current_frames().get(thread)
        while ddp is not None and frame is not None:
            if frame.f_code in _WAITING:
                return frame.f_code.co_name, ddp.reducer.get_backward_stats()
            frame = frame.f_back
        return None

    def give_back(self) -> None:
        ddp = self._ddp()
        if ddp is None:
            return
        del ddp.join_hook, ddp.__getstate__, ddp._sync_buffers
        if self.active:
            self.reduce_again()


class _WatchedJoin(JoinHook):
    """DDP's work for a rank without inputs, with notice of when it begins and ends."""

    def __init__(self, hook: JoinHook, taken_over: DdpTakeover) -> None:
        self._hook, self._taken_over = hook, taken_over

    def main_hook(self) -> None:
        # If this rank had no input at all, DDP does not reduce yet.
        self._taken_over.before_forward()
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._taken_over.end_join()
