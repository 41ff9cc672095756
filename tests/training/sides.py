"""One program under stock DDP and under gradcast, and where their results differ."""

from collections.abc import Callable, Iterator

import gradcast
from training import compare
from training.attached import attach, not_refused
from training.needs import torch

nn = torch.nn
DDP = nn.parallel.DistributedDataParallel
STEPS = 8


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


class Side:
    """``name``: "ddp", "hook" or "overlap". A program calls ``attach`` where its user would; DDP does nothing."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.handles: list[gradcast.Handle] = []

    @property
    def handle(self) -> gradcast.Handle | None:
        """The last one; None on DDP's side."""
        return self.handles[-1] if self.handles else None

    def attach(self, module: nn.Module, optimizer, process_group=None, **options) -> None:
        if self.name != "ddp":
            self.handles.append(attach(module, optimizer, self.name, process_group, **options))

    def called(self, module: nn.Module, optimizer, process_group=None, ddp_options=None, **options) -> nn.Module:
        """What the loop calls: DDP around the module, or the module itself, attached."""
        if self.name == "ddp":
            return DDP(module, process_group=process_group, **(ddp_options or {}))
        self.attach(module, optimizer, process_group, **options)
        return module

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + self.rank))

    def steps(self, called: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> Iterator[int]:
        """Between backward and step() of each step, its number; a generator's caller does there what it likes."""
        for number in range(first, STEPS):
            optimizer.zero_grad()
            dtype = next(called.parameters()).dtype
            called(self.batch(number).to(dtype)).square().sum().backward()
            yield number
            optimizer.step()

    def result(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> dict:
        """Parameters, the gradients of the last step, and the optimizers' states."""
        for handle in self.handles:
            handle.flush()
        named = list(module.named_parameters())
        found = {name: p.detach().clone() for name, p in named}
        found |= {f"gradient of {name}": None if p.grad is None else p.grad.clone() for name, p in named}
        return found | {f"optimizer {number}": each.state_dict() for number, each in enumerate(optimizers)}

    def trained(self, called: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        for _ in self.steps(called, optimizer):
            pass
        return self.result(module, optimizer)


def differences(rank, program: Callable[..., object], mode: str, *arguments) -> list[str]:
    """What ``program(side, *arguments)`` returns with gradcast, compared bit for bit with what it returns with DDP."""
    theirs = program(Side("ddp", rank.index), *arguments)
    side = Side(mode, rank.index)
    try:
        return compare.trees(program(side, *arguments), theirs)
    finally:
        for handle in side.handles:
            handle.detach()


def refused(rank, program: Callable[[Side], object], mode: str, *words: str) -> list[str]:
    """What is wrong with the words in which gradcast refuses the program as wrong use."""
    return not_refused(lambda: program(Side(mode, rank.index)), *words)
