"""Which parameters a module has and which its optimizers update: notices, in microseconds, when that changes."""

import itertools
import operator
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer


class Structure:
    """As it was when this object was made."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        # Two modules that differ in a parameter differ in one of these dicts.
        self._members = [held for each in module.modules() for held in (each._parameters, each._modules)]
        self._optimizers = list(optimizers)
        self._held = self._now()
        self._frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]

    def changed(self) -> bool:
        """A parameter was added, removed, replaced or thawed, or given to an optimizer or taken from it.

        Not when one is frozen: that is a parameter without gradient, and loops (of GANs, say) freeze and thaw by turns.
        """
        now = self._now()
        if len(now) != len(self._held) or not all(map(operator.is_, now, self._held)):
            return True
        return any(parameter.requires_grad for parameter in self._frozen)

    def _now(self) -> list[object]:
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return list(itertools.chain(*(held.values() for held in self._members), *groups))
