"""Open ``no_sync()`` blocks, inside which gradients stay on their worker and add up."""

import weakref
from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel


class NoSyncBlocks:
    """The open no_sync() blocks of one attachment. They also set the switches of its DDP modules, which then send no
    buffers."""

    def __init__(self, ddps: Iterable[DistributedDataParallel] = ()) -> None:
        # A handle that the program keeps must not keep its DDP alive.
        self._ddps: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet(ddps)
        # By open block: the DDP modules that synchronized outside of it.
        self._synchronizing: list[weakref.WeakSet[DistributedDataParallel]] = []

    def enter(self) -> None:
        self._synchronizing.append(weakref.WeakSet(ddp for ddp in self._ddps if ddp.require_backward_grad_sync))
        for ddp in self._ddps:
            ddp.require_backward_grad_sync = False

    def leave(self) -> None:
        for ddp in self._synchronizing.pop():
            ddp.require_backward_grad_sync = True

    @property
    def is_synchronizing(self) -> bool:
        """Whether gradients travel: outside of this handle's no_sync() and of DDP's own."""
        return not self._synchronizing and all(ddp.require_backward_grad_sync for ddp in self._ddps)
