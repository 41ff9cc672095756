"""The optimizers that the tests train with, by name: ``make("adam fused", module)``.

Not to be used: "sgd fused" with bfloat16 parameters. In torch 2.11 the fused SGD of the CPU leaves momentum buffers of
that type uninitialized in its first step, so that two runs of torch alone differ.
"""

import types
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


class CountsInGroup(torch.optim.Optimizer):
    """Keeps its count of steps in the group, where a step in parts must not count more than once."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "count": 0, "decay": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["decay"].mul_(0.9)
            for parameter in group["params"]:
                mean = self.state[parameter].get("mean", torch.zeros_like(parameter)) * 0.5 + parameter.grad
                self.state[parameter]["mean"] = mean
                parameter.add_(mean, alpha=-group["lr"] / group["count"] * float(group["decay"]))


class OwnStep(torch.optim.SGD):
    """Does something of its own before and after the step that it inherits."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.5)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.sign_()
        return super().step(closure)


class CountsItself(torch.optim.SGD):
    """Has a count, and a setting that the test changes after each step, as attributes of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.5)
        self.calls, self.decay = 0, 0.01

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - self.decay / self.calls)
        return super().step(closure)


class BoundToItself(torch.optim.SGD):
    """Keeps a method of its own and a closure over itself."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.decay = self._decayed
        self.update = lambda: torch.optim.SGD.step(self)

    @torch.no_grad()
    def _decayed(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.99)

    def step(self, closure=None):
        self.decay()
        self.update()


class ReplacesGroups(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.5)

    def step(self, closure=None):
        self.param_groups = list(self.param_groups)
        return super().step(closure)


class WithHelper(torch.optim.SGD):
    """An object that it keeps refers to it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.helper = types.SimpleNamespace(optimizer=self)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.helper.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.9)


# Optimizers that treat parameters one by one.
KINDS = {
    "sgd_nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam_amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, maximize=True),
    "adamw_capturable_rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, lr_decay=0.1),
    "adagrad_fused": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, fused=True),
    "adadelta": torch.optim.Adadelta,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2, t0=3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "counts_in_its_group": CountsInGroup,
    "counts_itself": CountsItself,
    "own_step": OwnStep,
    "replaces_groups": ReplacesGroups,
}
