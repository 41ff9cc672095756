"""Stages of torch.distributed.pipelining: what a schedule does with one.

A schedule runs the backward pass of each micro-batch by itself, by one of two methods of the stage, for the last one
with ``last_backward=True``. Behind it, it divides the stage's gradients by the number of micro-batches. Some schedules
make gradients of parameters without autograd's accumulation, so that no hook sees them: "by hand" below. This file
alone knows these names, those of torch 2.11 and 2.15.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused

MODULE = "torch.distributed.pipelining.stage"
_BACKWARD, _BY_HAND, _SCALE = "backward_one_chunk", "backward_weight_one_chunk", "scale_grads"


def is_stage(value: Any) -> bool:
    module: Any = sys.modules.get(MODULE)  # there is no stage before the program has imported it
    return module is not None and isinstance(value, module._PipelineStageBase)


def stages_in(module: Any) -> "tuple[Stage, ...]":
    """The stages among the argument of attach. Raises Error(invalid_use) if only some of a list are stages."""
    given = module if isinstance(module, list | tuple) else [module]
    stages = [each for each in given if is_stage(each)]
    if stages and len(stages) < len(given):
        raise refused("some of the list are stages of a pipeline and some are not; give the stages of this rank only")
    return tuple(map(Stage, stages))


def modules_of(stages: Sequence[Any], module: Any) -> Any:
    """The modules of these stages in place of the argument of attach, which has them."""
    return [each.module for each in stages] if isinstance(module, list | tuple) else stages[0].module


class Stage:
    """``module``: the program's own. ``ddp``: the DDP module around it, which is idle while gradcast has the stage."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self.ddp: DistributedDataParallel | None = None
        self.module: nn.Module = stage.submod
        if isinstance(stage.submod, DistributedDataParallel):
            self.ddp, self.module = stage.submod, stage.submod.module

    @property
    def index(self) -> int:
        """The stage's place in the pipeline."""
        return self._stage.stage_index

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def take_over(
        self,
        around_backward: Callable[..., contextlib.AbstractContextManager[None]],
        on_scale: Callable[[int], bool],
    ) -> None:
        """Until ``remove``: calls each backward pass inside of ``around_backward(is_last=..., by_hand=...)``, and
        ``on_scale`` with the divisor in place of the division. If that returns False, the stage divides."""
        stage = self._stage
        stage.submod = self.module
        for name in (_BACKWARD, _BY_HAND):
            own = getattr(stage, name)
            setattr(stage, name, functools.partial(self._backward, own, around_backward, name == _BY_HAND))
        setattr(stage, _SCALE, functools.partial(self._scale, getattr(stage, _SCALE), on_scale))

    def remove(self) -> None:
        if self.ddp is not None:
            self._stage.submod = self.ddp
        for name in (_BACKWARD, _BY_HAND, _SCALE):
            vars(self._stage).pop(name, None)

    def _backward(
        self,
        own: Callable[..., Any],
        around: Callable[..., contextlib.AbstractContextManager[None]],
        by_hand: bool,
        *arguments: Any,
        last_backward: bool = False,
        **named: Any,
    ) -> Any:
        if not self._stage.has_backward:  # schedule.eval()
            return own(*arguments, last_backward=last_backward, **named)
        with around(is_last=last_backward, by_hand=by_hand):
            return own(*arguments, last_backward=last_backward, **named)

    def _scale(self, own: Callable[[int], None], on_scale: Callable[[int], bool], divisor: int) -> None:
        if self._stage.has_backward and divisor != 1 and not on_scale(divisor):
            own(divisor)
