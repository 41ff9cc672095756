"""The program's open blocks: ``no_sync()``, inside which gradients stay on their worker and add up, and
``handle.collective()``, inside which the program's own collectives run and no block of a plan may start."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused
from gradcast.training.step.backward_passes import ForwardPass


class NoSyncBlocks:
    """The open no_sync() blocks of one attachment. They also switch off synchronization in its DDP modules, which then
    send no buffers.

    For a bare module a pass is inside of a block or outside, forward and backward alike. Around a DDP module DDP
    decides: its forward arms the reducer, which reduces the next backward pass, inside of a block or not. Of further
    passes through the outputs of that forward DDP reduces none, and gradcast those outside of the blocks.

    ``exceeds_ddp``: there was such a pass, or one past DDP, outside of the blocks.
    """

    exceeds_ddp = False

    def __init__(self, ddps: Iterable[DistributedDataParallel] = ()) -> None:
        # A handle that the program keeps must not keep its DDP alive.
        self._ddps: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet(ddps)
        self._open_count = 0

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        synchronizing = weakref.WeakSet(ddp for ddp in self._ddps if ddp.require_backward_grad_sync)
        for ddp in synchronizing:
            ddp.require_backward_grad_sync = False
        self._open_count += 1
        try:
            yield
        finally:
            self._open_count -= 1
            for ddp in synchronizing:
                ddp.require_backward_grad_sync = True

    @property
    def is_open(self) -> bool:
        """True if a block is open, of this handle or of DDP."""
        return self._open_count > 0 or not all(ddp.require_backward_grad_sync for ddp in self._ddps)

    def reduces(self, forward: ForwardPass | None) -> bool:
        """Returns whether the backward pass that runs is reduced. ``forward``: the pass whose output it goes through,
        if seen. Raises Error(invalid_use) for a bare module whose forward pass was inside of a block and whose backward
        is not, or the other way round."""
        outside = forward is not None and forward.synchronizes
        if self._ddps:
            if all(ddp.reducer.is_armed for ddp in self._ddps):
                return True
            self.exceeds_ddp |= not self.is_open
            return outside and not self.is_open
        if forward is not None and outside == self.is_open:
            raise refused(
                f"this backward pass runs {'inside' if outside else 'outside'} of handle.no_sync(), and its forward "
                f"pass ran {'outside' if outside else 'inside'} of it; put both into the block, or both behind it"
            )
        return not self.is_open

    def on_reduced(self) -> None:
        """Notes a reduced backward pass; the next one needs a forward pass that arms the reducer again."""
        for ddp in self._ddps:
            ddp.reducer.is_armed = False


class CollectiveFence:
    """The collective() blocks of one attachment. ``open_count``: the number of open ones, one inside another."""

    def __init__(self) -> None:
        self.open_count = 0

    @contextlib.contextmanager
    def around(self, complete: Callable[[], bool]) -> Iterator[None]:
        """``complete``: waits until nothing is in flight. False if another thread's backward pass will send more."""
        if torch._C._current_graph_task_id() != -1:
            raise refused(
                "handle.collective() is used inside a backward pass, which has more gradients to send; put the "
                "collective behind backward()"
            )
        if not complete():
            raise refused(
                "handle.collective() is used while another thread is in backward, which has more gradients to send; "
                "wait for that thread first"
            )
        self.open_count += 1
        try:
            yield
        finally:
            self.open_count -= 1

    def refuse(self, what: str) -> None:
        """Raises inside a block. ``what``: the call that would send something."""
        if self.open_count > 0:
            raise refused(
                f"{what} inside handle.collective() would send among the program's own collectives; end the block first"
            )


@dataclasses.dataclass
class Progress:
    """The state that the next session of a module continues. ``steps``: completed so far."""

    no_sync_blocks: NoSyncBlocks = dataclasses.field(default_factory=NoSyncBlocks)
    fence: CollectiveFence = dataclasses.field(default_factory=CollectiveFence)
    steps: int = 0
