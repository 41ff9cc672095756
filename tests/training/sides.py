"""One program under stock DDP and under gradcast, and where their results differ."""

from collections.abc import Callable, Iterator

import gradcast
from training import compare
from training.attached import error_of
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
        self.handle: gradcast.Handle | None = None

    def attach(self, module: nn.Module, optimizer: torch.optim.Optimizer, **options) -> None:
        if self.name != "ddp":
            chosen = gradcast.Options(**({"adapt": False, "warmup_steps": 3} | options))
            self.handle = gradcast.attach(module, optimizer if self.name == "overlap" else None, options=chosen)

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

    def result(self, module: nn.Module) -> dict:
        """Parameters, and the gradients of the last step."""
        if self.handle is not None:
            self.handle.flush()
        named = list(module.named_parameters())
        found = {name: p.detach().clone() for name, p in named}
        return found | {f"gradient of {name}": None if p.grad is None else p.grad.clone() for name, p in named}

    def trained(self, called: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
        for _ in self.steps(called, optimizer):
            pass
        return self.result(module)


def differences(rank, program: Callable[[Side], object], mode: str) -> list[str]:
    """What ``program`` returns with gradcast, compared bit for bit with what it returns with DDP."""
    theirs = program(Side("ddp", rank.index))
    side = Side(mode, rank.index)
    try:
        return compare.trees(program(side), theirs)
    finally:
        if side.handle is not None:
            side.handle.detach()


def refusal(rank, program: Callable[[Side], object], mode: str) -> str:
    """The words in which gradcast refuses the program as wrong use."""
    code, words = error_of(lambda: program(Side(mode, rank.index)))
    return words if code == "invalid_use" else f"not refused as wrong use, but {code}: {words}"
