"""Detects, within microseconds per forward pass, changes of a module's parameters, their types or their optimizers, a
forward pass with other tensors in place of the module's own, and one of a pipeline's stage."""

import itertools
import sys
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from gradcast.training.compat import extension
from gradcast.training.compat.sharding import ShardGroup

_STATELESS = "torch.nn.utils.stateless"


class ModelLayout:
    """The layout when this object was made. ``trained``: the parameters of the session."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], trained: Iterable[nn.Parameter]) -> None:
        self._module, self._optimizers, self._trained = module, list(optimizers), list(trained)
        self._parameters = self._all_parameters()
        known = set(map(id, self._trained))
        self._frozen = [each for each in module.parameters() if not each.requires_grad and id(each) not in known]
        self._hold()

    def changed(self) -> bool:
        """True if a parameter was added, removed, replaced, converted or thawed, or an optimizer's parameters changed.

        Freezing a parameter does not count: it has no gradient then, and loops (of GANs, for example) freeze and thaw
        parameters in turn.
        """
        if not extension.load().contain([*self._members, *self._updated()], self._held):
            if list(map(id, self._all_parameters())) != list(map(id, self._parameters)):
                return True
            self._hold()  # a part without parameters was replaced: a metric, or a loss with this step's weights
        if self._kinds() != self._held_kinds:
            return True
        return any(parameter.requires_grad for parameter in self._frozen)

    def _hold(self) -> None:
        # Any change of a parameter or submodule changes one of these dicts.
        all_members = (held for each in self._module.modules() for held in (each._parameters, each._modules))
        # A module of TorchScript has something else.
        self._members = [held if isinstance(held, dict) else list(held.values()) for held in all_members]
        in_modules = (held.values() if isinstance(held, dict) else held for held in self._members)
        self._held = list(itertools.chain(*in_modules, *self._updated()))
        self._held_kinds = self._kinds()

    def _kinds(self) -> object:
        return extension.load().kinds(self._trained)

    def _all_parameters(self) -> list[object]:
        return list(itertools.chain(self._module.parameters(), *self._updated()))

    def _updated(self) -> list[list[object]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]


class ShardedLayout:
    """The same of a module that FSDP shards, whose members are other tensors while its groups are gathered."""

    def __init__(self, shards: Sequence[ShardGroup], optimizers: Sequence[Optimizer]) -> None:
        self._shards, self._optimizers = shards, optimizers
        self._before = self._present()

    def changed(self) -> bool:
        now = self._present()
        return now[0] != self._before[0] or not now[1] <= self._before[1]

    def _present(self) -> tuple[list[object], set[int]]:
        """Parameters by identity, type and contents, and those that are trained."""
        members = [each for group in self._shards for each in group.parameters]
        updated = [id(each) for it in self._optimizers for group in it.param_groups for each in group["params"]]
        trained = {id(each) for each in members if each.requires_grad}
        return [*map(id, members), *updated, extension.load().kinds(members)], trained


def in_functional_call() -> bool:
    """True if torch.func.functional_call() runs this forward pass, with other tensors in place of the module's own."""
    frame = sys._getframe(1) if _STATELESS in sys.modules else None
    while frame is not None:
        if frame.f_globals.get("__name__") == _STATELESS:
            return True
        frame = frame.f_back
    return False


def holds_other_tensors(module: nn.Module) -> bool:
    """True if a tensor that is no parameter is in the place of one, because other code borrows the module."""
    held = (each for part in module.modules() for each in part._parameters.values())
    return any(each is not None and not isinstance(each, nn.Parameter) for each in held)
