"""Stages of torch.distributed.pipelining: what a schedule does with one.

A schedule runs the backward pass of each micro-batch by itself, by one of two methods of the stage, for the last one
with ``last_backward=True``. Behind it, it divides the stage's gradients by the number of micro-batches. Some schedules
make gradients of parameters without autograd's accumulation, so that no hook sees them: "by hand" below. If FSDP shards
the stage's module, its groups reduce nothing in these passes, and all of them behind the last one, outside of autograd.
This file alone knows these names, those of torch 2.11 and 2.15.

A module in a stage is refused without the stage, where both are known first: in attach, or where torch makes the stage.
"""

import contextlib
import enum
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused
from gradcast.training.compat.sharding import groups_of

_MODULE = "torch.distributed.pipelining.stage"
_REASON = (
    "and schedules make some gradients without the hooks that gradcast, like DDP, waits for, so the ranks would drift "
    "apart"
)
_REMEDY = "attach to the stage: gradcast.attach(stage, optimizer, process_group=its_replicas)"
_BACKWARD, _BY_HAND, _SCALE = "backward_one_chunk", "backward_weight_one_chunk", "scale_grads"
_REDUCE, _START_REDUCTION = "perform_reduce_grad", "start_gradient_reduction"  # torch 2.15 has the second one, too


class Makes(enum.Enum):
    """The way in which a call of a stage makes gradients: hooks see them, no hook sees them, or FSDP reduces them."""

    BY_AUTOGRAD = enum.auto()
    BY_HAND = enum.auto()
    BY_REDUCTION = enum.auto()


AroundCall = Callable[..., contextlib.AbstractContextManager[None]]


class _Stages:
    """``base``: torch's class of stages. ``may_exist``: the program may have made some. ``attached``: returns the
    parameters that gradcast is attached to without their stage; torch refuses to make stages of them."""

    def __init__(self) -> None:
        self.may_exist = _MODULE in sys.modules
        self.base: Any = importlib.import_module(_MODULE)._PipelineStageBase
        self.attached: Callable[[], Collection[nn.Parameter]] = list
        own_init = self.base.__init__

        @functools.wraps(own_init)
        def init(stage: Any, submodule: nn.Module, *arguments: Any, **named: Any) -> None:
            self.may_exist = True
            if _overlap(self.attached(), submodule.parameters()):
                raise refused(
                    f"gradcast is attached to the module of this stage, {_REASON}; call handle.detach(), {_REMEDY}"
                )
            own_init(stage, submodule, *arguments, **named)

        self.base.__init__ = init

    def having(self, parameters: Collection[nn.Parameter]) -> bool:
        """Returns whether a living stage has some of these."""
        found = gc.get_objects() if self.may_exist else ()
        stages: list[Any] = [each for each in found if issubclass(type(each), self.base) and hasattr(each, "submod")]
        return any(_overlap(parameters, each.submod.parameters()) for each in stages)


def _overlap(some: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> bool:
    return not set(map(id, some)).isdisjoint(map(id, others))


_stages = _Stages()


def stages_in(module: Any) -> "tuple[Stage, ...]":
    """The stages among the argument of attach. Raises Error(invalid_use) if only some of a list are stages."""
    given = module if isinstance(module, list | tuple) else [module]
    stages = [each for each in given if isinstance(each, _stages.base)]
    if stages and len(stages) < len(given):
        raise refused("some of the list are stages of a pipeline and some are not; give the stages of this rank only")
    return tuple(map(Stage, stages))


def refuse_modules(parameters: Collection[nn.Parameter]) -> None:
    """Raises Error(invalid_use) if a stage has some of these parameters, which attach has been given without it. All
    ranks do so, and none waits in a schedule for one that has failed there."""
    if _stages.having(parameters):
        raise refused(f"the module is in a stage of a pipeline (torch.distributed.pipelining), {_REASON}; {_REMEDY}")


def refuse_new_stages(attached: Callable[[], Collection[nn.Parameter]]) -> None:
    """Makes torch refuse stages of modules that gradcast is attached to. ``attached``: returns their parameters."""
    _stages.attached = attached


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
        """Those of FSDP's groups, if it shards the module."""
        groups = groups_of(self.module)
        return [each for group in groups for each in group.parameters] or list(self.module.parameters())

    def take_over(self, around: AroundCall, on_scale: Callable[[int], bool]) -> None:
        """Until ``remove``: makes gradients inside of ``around(Makes, is_last=...)``, and calls ``on_scale`` with the
        divisor in place of the division. If that returns False, the stage divides."""
        stage = self._stage
        stage.submod = self.module
        self._shards = groups_of(self.module)
        self._replace(_BACKWARD, functools.partial(self._backward, around, Makes.BY_AUTOGRAD))
        self._replace(_BY_HAND, functools.partial(self._backward, around, Makes.BY_HAND))
        self._replace(_SCALE, functools.partial(self._scale, on_scale))
        if self._shards:
            starts = hasattr(stage, _START_REDUCTION)
            self._replace(_START_REDUCTION if starts else _REDUCE, functools.partial(self._reduce, around))

    def _replace(self, name: str, call: Callable[..., Any]) -> None:
        setattr(self._stage, name, functools.partial(call, getattr(self._stage, name)))

    def remove(self) -> None:
        if self.ddp is not None:
            self._stage.submod = self.ddp
        for name in (_BACKWARD, _BY_HAND, _SCALE, _REDUCE, _START_REDUCTION):
            vars(self._stage).pop(name, None)

    def _backward(
        self,
        around: AroundCall,
        makes: Makes,
        own: Callable[..., Any],
        *arguments: Any,
        last_backward: bool = False,
        **named: Any,
    ) -> Any:
        if not self._stage.has_backward:  # schedule.eval()
            return own(*arguments, last_backward=last_backward, **named)
        if self._shards:
            makes = Makes.BY_AUTOGRAD
        elif self._stage.dw_builder is not None:  # which makes some gradients of weights
            makes = Makes.BY_HAND
        with around(makes, is_last=last_backward and not self._shards):
            return own(*arguments, last_backward=last_backward, **named)

    def _scale(self, on_scale: Callable[[int], bool], own: Callable[[int], None], divisor: int) -> None:
        if self._stage.has_backward and divisor != 1 and not on_scale(divisor):
            own(divisor)

    def _reduce(self, around: AroundCall, own: Callable[..., None], *divisor: int) -> None:
        """FSDP's reduction. ``divisor``: by which it would divide behind that."""
        if not self._stage.has_backward:
            own(*divisor)
            return
        with around(Makes.BY_REDUCTION, is_last=True):
            own(*(1 for _ in divisor))
        if divisor:
            self._stage.scale_grads(*divisor)
