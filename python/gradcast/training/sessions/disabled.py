"""GRADCAST_DISABLE=1: ``attach`` leaves everything to stock DDP. So one variable shows whether gradcast is to blame."""

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

from gradcast.errors import Error, refused
from gradcast.training.called_clipping import loop_calls
from gradcast.training.plan.balancing import SamplerCall
from gradcast.training.sessions.hidden_ddp import HiddenDdp
from gradcast.training.sessions.kinds import Setup, TrainingSession
from gradcast.training.sessions.open_blocks import NoSyncBlocks, Progress
from gradcast.training.step.clipping import ClipOnce
from gradcast.training.step.partial_step import intercepted

# This module alone reads the variable.
VARIABLE = "GRADCAST_DISABLE"


def is_disabled() -> bool:
    """Returns whether GRADCAST_DISABLE is set. Raises Error(invalid_use) for values other than 0 and 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise refused(f"{VARIABLE} is {value!r}; 1 (stock DDP) or 0 is expected")
    return value == "1"


def weights_refused() -> Error:
    return refused(f"{VARIABLE} is set, and stock DDP counts all ranks alike; weights need gradcast, so unset it")


class DisabledSession(TrainingSession):
    """A session without gradcast. A DDP module is left alone; a bare module gets the hooks of a hidden DDP module
    around it."""

    early_clipping: ClipOnce | None = None

    def __init__(self, setup: Setup) -> None:
        accepted, options = setup.accepted, setup.options
        self.callbacks = setup.callbacks
        self._module = accepted.module  # the handle refers to it
        self._removables: list[Any] = []
        if options.clips:
            # Clipping that the user has asked of gradcast stays.
            self.early_clipping = clip = ClipOnce(accepted.called, options)
            self._interceptions = intercepted(setup.optimizers, self._on_step)
            self._removables += [clip, *self._interceptions]
            if accepted.shards:
                own = weakref.proxy(self)
                self._removables.append(loop_calls(lambda: own, options.clip, setup.group))
        wrappers = [] if accepted.ddp is None else [accepted.ddp]
        if accepted.ddp is None and not accepted.shards and setup.group.world_size > 1:
            setup.group.meet()
            hidden = HiddenDdp(accepted.called, setup.group.shared, broadcast_buffers=options.broadcast_buffers)
            self._removables.append(hidden)
            wrappers = list(hidden.wrappers.values())
        super().__init__(setup.group, "ddp", Progress(NoSyncBlocks(wrappers)))

    def weight(self, n: Any) -> contextlib.AbstractContextManager[None]:
        if self.group.world_size > 1:
            raise weights_refused()
        return super().weight(n)

    def balance(self, call: Callable[[], SamplerCall]) -> None:
        if self.group.world_size > 1:
            raise weights_refused()
        super().balance(call)

    def release(self, *, reusable: bool) -> None:
        self.group.leave(reusable=reusable)
        for removable in self._removables:
            removable.remove()
        self._removables, self.early_clipping = [], None
        self.released = True

    def _on_step(self, number: int) -> None:
        self.early_clipping.before_step()
        self._interceptions[number].run_whole()
