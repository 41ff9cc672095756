"""Buffers of a bare module: all ranks get those of rank 0, as with DDP. (A DDP module sends its own.)"""

from torch import nn

from gradcast.training.ranks.group import Group
from gradcast.training.ranks.stall_watchdog import StallWatchdog


class ModuleBuffers:
    """The buffers of one module."""

    def __init__(self, module: nn.Module, group: Group, watch: StallWatchdog) -> None:
        # The dicts, not the buffers themselves: a module may replace a buffer by another tensor.
        self._held = [each._buffers for each in module.modules()]
        self._group, self._watch = group, watch
        self._due = True

    def send(self, *, synchronizing: bool, needed: bool) -> None:
        """Sends the buffers before each forward pass except after a pass in no_sync(), as DDP does. Collective.

        ``needed``: backward of an earlier pass still needs this rank's values, so they stay. (With DDP that backward
        raises.)
        """
        due, self._due = self._due, synchronizing
        if not due:
            return
        held = [buffer for each in self._held for buffer in each.values() if buffer is not None]
        buffers = list({id(buffer): buffer for buffer in held}.values())
        if needed and self._group.rank != 0:
            buffers = [buffer.clone() for buffer in buffers]
        if buffers:
            with self._watch.waiting("the module's buffers from rank 0"):
                self._group.copy_from_first(buffers, "the module's buffers")
