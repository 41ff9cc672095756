"""GRADCAST_DISABLE=1: ``attach`` leaves everything to stock DDP. So one variable shows whether gradcast is to blame."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training.acceptance import Accepted
from gradcast.training.compat.module_hooks import around_forward
from gradcast.training.no_sync import NoSyncBlocks
from gradcast.training.options import Options
from gradcast.training.ranks.group import Group
from gradcast.training.step.clipping import ClipOnce
from gradcast.training.step.partial_step import StepInterception
from gradcast.training.step.update_callbacks import UpdateCallbacks
from gradcast.training.training_session import TrainingSession

# This module alone reads the variable.
VARIABLE = "GRADCAST_DISABLE"


def is_disabled() -> bool:
    """Whether GRADCAST_DISABLE is set. Raises Error(invalid_use) for values other than 0 and 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise Error(f"{VARIABLE} is {value!r}; 1 (stock DDP) or 0 is expected", "invalid_use")
    return value == "1"


class DisabledSession(TrainingSession):
    """Trains without gradcast. A DDP module is left alone; a bare module gets the hooks
    of a hidden DDP module around it."""

    def __init__(
        self,
        accepted: Accepted,
        optimizers: Sequence[Optimizer],
        group: Group,
        options: Options,
        callbacks: UpdateCallbacks,
    ) -> None:
        self.callbacks = callbacks
        module = accepted.called
        self.mode = "ddp"
        self.group = group
        self._removables: list[Any] = []
        if options.clips:
            # Clipping that the user has asked of gradcast stays.
            self.early_clipping = clip = ClipOnce(module, options)
            self._interceptions = [
                StepInterception(optimizer, functools.partial(self._on_step, number))
                for number, optimizer in enumerate(optimizers)
            ]
            self._removables += [clip, *self._interceptions]
        self._wrapper: DistributedDataParallel | None = None  # around a bare module
        if accepted.ddp is None and group.world_size > 1:
            self._module = module
            # find_unused_parameters: attach accepts steps that leave parameters out.
            self._broadcast_buffers = options.broadcast_buffers
            self._wrapper = DistributedDataParallel(
                module,
                process_group=group.shared,
                find_unused_parameters=True,
                broadcast_buffers=options.broadcast_buffers,
            )
            self._removables += around_forward(module, self._before_forward, self._after_forward)
        self.no_sync_blocks = NoSyncBlocks(self._wrapper if accepted.ddp is None else accepted.ddp)

    def release(self, *, reusable: bool) -> None:
        self.group.leave(reusable=reusable)
        for removable in self._removables:
            removable.remove()
        self._removables, self.early_clipping = [], None
        if self._wrapper is not None:
            self._wrapper.reducer._remove_autograd_hooks()
        self.released = True

    def _on_step(self, number: int) -> None:
        assert self.early_clipping is not None, "steps are intercepted for clipping only"
        self.early_clipping.before_step()
        self._interceptions[number].run_whole()

    def _before_forward(self, _: Any, _compiled: bool) -> None:
        # In evaluation the other ranks take no part, as with gradcast.
        if torch.is_grad_enabled():
            self._wrapper.broadcast_buffers = self._broadcast_buffers and self._module.training
            self._wrapper._pre_forward()

    def _after_forward(self, output: Any, _: bool) -> Any:
        """DDP passes the outputs on and notes through which of them backward will come."""
        return self._wrapper._post_forward(output) if torch.is_grad_enabled() else None
