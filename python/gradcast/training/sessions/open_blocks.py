"""The program's open blocks: ``no_sync()``, inside which gradients stay on their worker and add up, and
``handle.collective()``, inside which the program's own collectives run and no block of a plan may start."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused


class NoSyncBlocks:
    """The open no_sync() blocks of one attachment. They also set the switches of its DDP modules, which then send no
    buffers."""

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
    def is_synchronizing(self) -> bool:
        """Whether gradients travel: outside of this handle's no_sync() and of DDP's own."""
        return self._open_count == 0 and all(ddp.require_backward_grad_sync for ddp in self._ddps)


class CollectiveFence:
    """One attachment has one. ``open_count``: how many blocks are open, one inside another."""

    def __init__(self) -> None:
        self.open_count = 0

    @contextlib.contextmanager
    def around(self, complete: Callable[[], bool]) -> Iterator[None]:
        """``complete``: waits until nothing travels. False if another thread is in backward, so that more will."""
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
        """Raises inside a block. ``what``: would send something."""
        if self.open_count > 0:
            raise refused(
                f"{what} inside handle.collective() would send among the program's own collectives; end the block first"
            )
