"""The user's own module and optimizer inside the wrappers of frameworks and torch."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import refused


def the_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel in the module's tree: the module itself, or one inside torch.compile() or another
    wrapper. None if there is none."""
    found = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
    if len(found) > 1:
        raise refused(
            f"the module holds {len(found)} DistributedDataParallel modules; attach to each, with its own optimizer"
        )
    return found[0] if found else None


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module, inside of wrappers."""
    ddp = the_ddp(module)
    return module if ddp is None else ddp.module


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer whose step() updates, inside a framework's wrapper (Accelerate's, Lightning's), which has no
    parameter groups of its own. The wrapper keeps working around that step."""
    while isinstance(optimizer, Optimizer) and "param_groups" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer
