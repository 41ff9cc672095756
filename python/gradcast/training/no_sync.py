"""Open ``no_sync()`` blocks, inside which gradients stay on their worker and add up."""

import weakref

from torch.nn.parallel import DistributedDataParallel


class NoSyncBlocks:
    """The open no_sync() blocks of one module. They also set the switch of a DDP around it, which sends no buffers."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        # A handle that the program keeps must not keep its DDP alive.
        self._ddp = None if ddp is None else weakref.ref(ddp)
        self._ddp_synchronized: list[bool] = []  # by open block: DDP's switch outside of it

    def enter(self) -> None:
        """Opens a block."""
        ddp = self._live_ddp
        self._ddp_synchronized.append(ddp is None or ddp.require_backward_grad_sync)
        if ddp is not None:
            ddp.require_backward_grad_sync = False

    def leave(self) -> None:
        """Closes the block that was opened last."""
        synchronized, ddp = self._ddp_synchronized.pop(), self._live_ddp
        if ddp is not None:
            ddp.require_backward_grad_sync = synchronized

    @property
    def is_synchronizing(self) -> bool:
        """Whether gradients travel: outside of this handle's no_sync() and of DDP's own."""
        ddp = self._live_ddp
        return not self._ddp_synchronized and (ddp is None or ddp.require_backward_grad_sync)

    @property
    def _live_ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp is None else self._ddp()
