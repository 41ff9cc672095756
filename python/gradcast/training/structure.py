"""Which parameters a module has and which its optimizers update: notices, in microseconds, when that changes."""

import itertools
import operator
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer


class Structure:
    """As it was when this object was made, with a session of ``trained``."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], trained: Iterable[nn.Parameter]) -> None:
        self._module, self._optimizers = module, list(optimizers)
        self._parameters = self._all_parameters()
        known = set(map(id, trained))
        self._frozen = [each for each in module.parameters() if not each.requires_grad and id(each) not in known]
        self._hold()

    def changed(self) -> bool:
        """A parameter was added, removed, replaced or thawed, or given to an optimizer or taken from it.

        Not when one is frozen: that is a parameter without gradient, and loops (of GANs, say) freeze and thaw by turns.
        """
        if not _same(self._now(), self._held):
            if not _same(self._all_parameters(), self._parameters):
                return True
            self._hold()  # a part without parameters was replaced: a metric, a loss of this step's weights
        return any(parameter.requires_grad for parameter in self._frozen)

    def _hold(self) -> None:
        # Two modules that differ in a parameter differ in one of these dicts.
        self._members = [held for each in self._module.modules() for held in (each._parameters, each._modules)]
        self._held = self._now()

    def _now(self) -> list[object]:
        return list(itertools.chain(*(held.values() for held in self._members), *self._updated()))

    def _all_parameters(self) -> list[object]:
        return list(itertools.chain(self._module.parameters(), *self._updated()))

    def _updated(self) -> list[list[object]]:
        return [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]


def _same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
