"""GRADCAST_DISABLE=1: ``attach`` leaves all to stock DDP, so that one variable tells whether gradcast is to blame."""

import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training.acceptance import Accepted
from gradcast.training.compat.module_hooks import around_forward
from gradcast.training.options import Options
from gradcast.training.ranks.group import Group
from gradcast.training.step.clipping import ClipOnce
from gradcast.training.step.partial_step import StepInterception

# Read only here.
VARIABLE = "GRADCAST_DISABLE"


def is_disabled() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise Error(f"{VARIABLE} is {value!r}; 1 (stock DDP) or 0 is expected", "invalid_use")
    return value == "1"


class DisabledSession:
    """A DDP module is left alone. A bare one gets the hooks of a DDP module that wraps it, out of sight."""

    has_plan = False

    def __init__(self, accepted: Accepted, optimizers: Sequence[Optimizer], group: Group, options: Options) -> None:
        module = accepted.called
        self.mode = "ddp"
        self.group = group
        self.profile = None
        self.released = False
        self.steps = 0
        self._removables: list[Any] = []
        self._clip: ClipOnce | None = None
        self._synchronized: list[bool] = []  # outside of each no_sync() that is open
        if options.max_grad_norm is not None:
            # What the user asked of gradcast in DDP's place, stays.
            self._clip = clip = ClipOnce(module, options.max_grad_norm)
            self._interceptions = [
                StepInterception(optimizer, functools.partial(self._on_step, number))
                for number, optimizer in enumerate(optimizers)
            ]
            self._removables += [clip, *self._interceptions]
        self._wrapper: DistributedDataParallel | None = None  # around a bare module
        if accepted.ddp is None and group.world_size > 1:
            self._module = module
            # Also for a step that leaves parameters out, which attach lets pass.
            self._wrapper = DistributedDataParallel(module, process_group=group.shared, find_unused_parameters=True)
            self._removables += around_forward(module, self._before_forward, self._after_forward)

        ddp = self._wrapper if accepted.ddp is None else accepted.ddp
        self._ddp = None if ddp is None else weakref.ref(ddp)  # a handle that the program keeps must not keep it

    @property
    def session(self) -> "DisabledSession":
        return self

    def flush(self, limit_s: float | None = None) -> None:
        """DDP waits at the end of backward."""

    def no_sync(self, entering: bool) -> None:
        ddp = None if self._ddp is None else self._ddp()
        if ddp is None:
            return
        if entering:
            self._synchronized.append(ddp.require_backward_grad_sync)
        ddp.require_backward_grad_sync = False if entering else self._synchronized.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, "world_size": self.group.world_size, "profile": None, "plan": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no plan."""

    def release(self, *, reusable: bool) -> None:
        self.group.leave(reusable=reusable)
        for removable in self._removables:
            removable.remove()
        self._removables, self._clip = [], None
        if self._wrapper is not None:
            self._wrapper.reducer._remove_autograd_hooks()
        self.released = True

    def _on_step(self, number: int) -> None:
        assert self._clip is not None, "only then steps are intercepted"
        self._clip.before_step()
        self._interceptions[number].run_whole()

    def _before_forward(self, _: Any, _compiled: bool) -> None:
        # Evaluation is no business of the other ranks, as with gradcast.
        if torch.is_grad_enabled():
            self._wrapper.broadcast_buffers = self._module.training
            self._wrapper._pre_forward()

    def _after_forward(self, output: Any, _: bool) -> Any:
        """DDP's: it passes the outputs on, and sees which of them backward comes through."""
        return self._wrapper._post_forward(output) if torch.is_grad_enabled() else None
