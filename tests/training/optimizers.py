"""The optimizers that the tests train with, by name: ``make("adam fused", module)``.

Not to be used: "sgd fused" with bfloat16 parameters. In torch 2.11 the fused SGD of the CPU leaves momentum buffers of
that type uninitialized in its first step, so that two runs of torch alone differ.
"""

from collections.abc import Callable
from dataclasses import dataclass

from training.needs import torch

nn = torch.nn


@dataclass
class Recipe:
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def after_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()


def two_halves(module: nn.Module, second: type[torch.optim.Optimizer] = torch.optim.SGD) -> list[torch.optim.Optimizer]:
    """One optimizer for the first four parameters, one for the others."""
    parameters = list(module.parameters())
    return [torch.optim.SGD(parameters[:4], lr=0.1), second(parameters[4:], lr=0.01)]


def make(name: str | Callable[[nn.Module], Recipe], module: nn.Module) -> Recipe:
    """``<kind> <form>``: kind is sgd, adam or adamw (two groups and a scheduler), form is plain, foreach or fused.

    Or a function that makes a recipe of its own.
    """
    if not isinstance(name, str):
        return name(module)
    kind, form = name.split()
    forms = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[form]
    if kind == "sgd":
        return Recipe(torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, **forms))
    if kind == "adam":
        return Recipe(torch.optim.Adam(module.parameters(), lr=3e-3, **forms))
    assert kind == "adamw", kind
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, **forms)
    return Recipe(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20))
