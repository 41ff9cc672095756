"""One training on a pair of sides, with gradcast and with stock DDP, equal bit for bit on two ranks.

``Pair`` trains a task on both, step by step. ``differences`` runs a whole program on one side after the other: of loops
that are not made of such steps, or of several modules.
"""

import ctypes
from collections.abc import Callable, Iterator

import gradcast
from training import compare, optimizers
from training.attached import attach, not_refused, planning
from training.models import task_of
from training.needs import torch

nn = torch.nn
DDP = nn.parallel.DistributedDataParallel
STEPS = 8


def net() -> nn.Module:
    torch.manual_seed(0)
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
        """The module that the loop calls: DDP around the given one, or that itself, attached."""
        if self.name == "ddp":
            return DDP(module, process_group=process_group, **(ddp_options or {}))
        self.attach(module, optimizer, process_group, **options)
        return module

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + self.rank))

    def steps(self, called: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
        """Between backward and step() of each step, its number; a generator's caller does there what it likes."""
        for number in range(STEPS):
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


class Training(Side):
    """A task on one side. In overlap mode nothing is flushed between steps.

    Each rank starts from parameters of its own: DDP and attach have to make them rank 0's. ``model``: a task's name, or
    a function that makes a module for the plain task. ``wrap``: gradcast is attached to a DDP module. ``ddp_options``:
    of DDP, on each side.
    """

    def __init__(
        self, rank, model="plain", optimizer="adam plain", mode="overlap", *, wrap=False, ddp_options=None, **options
    ) -> None:
        super().__init__(mode, rank)
        self.task = task_of(model)
        self.module = self.forward = self.task.module(seed=rank)
        self.recipe = optimizers.make(optimizer, self.module)
        self.optimizer = self.recipe.optimizer
        self.ddp_options = ddp_options or {}
        self.count = 0
        self.warmup_steps = options.get("plan", planning()).warmup_steps
        if wrap or mode == "ddp":
            self.wrap()
        self.attach(self.forward, self.optimizer, **options)

    def wrap(self) -> None:
        """DDP needs a new wrapper where the parameters have changed."""
        self.forward = DDP(self.module, **self.ddp_options)

    def no_sync(self):
        return (self.handle or self.forward).no_sync()

    def batch(self, number: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """That of the next step, if no number is given."""
        return self.task.batch(self.rank, self.count if number is None else number)

    def loss(self, *arguments) -> torch.Tensor:
        """Of the next step. ``arguments``: of forward."""
        return self.task.loss(self.forward, self.batch(), *arguments)

    def backward(self, *arguments) -> float:
        loss = self.loss(*arguments)
        loss.backward()
        return loss.item()

    def step(self, *arguments, between: Callable | None = None, set_to_none=True) -> float:
        """Returns the loss. ``between(side)`` runs after backward."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss = self.backward(*arguments)
        if between is not None:
            between(self)
        self.optimizer.step()
        self.after_step()
        return loss

    def after_step(self) -> None:
        self.recipe.after_step()
        self.count += 1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


class Pair:
    """A task on both sides, in turns. The arguments are those of ``Training``."""

    def __init__(self, rank, model="plain", optimizer="adam plain", *, ddp_options=None, **options) -> None:
        self.rank = rank
        self.ours = Training(rank.index, model, optimizer, ddp_options=ddp_options, **options)
        self.theirs = Training(rank.index, model, optimizer, "ddp", ddp_options=ddp_options)
        self.sides = self.theirs, self.ours
        self.signals = 0

    @property
    def handle(self) -> gradcast.Handle:
        return self.ours.handle

    @property
    def modules(self) -> tuple[nn.Module, nn.Module]:
        """DDP's, then gradcast's."""
        return self.theirs.module, self.ours.module

    def rounds(self, count: int) -> Iterator[tuple[int, Training]]:
        """The number of each step, with DDP's side and then gradcast's: the caller takes the step on that side."""
        for number in range(count):
            for side in self.sides:
                yield number, side
            for side in self.sides:
                side.after_step()

    def step(self, *arguments, **how) -> None:
        """One step on both sides. The arguments are those of ``Training.step``."""
        for side in self.sides:
            side.step(*arguments, **how)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def pending_step(self) -> None:
        """One step on both sides; that of gradcast cannot have finished, unless it is of the warm-up, which waits.

        Rank 1's gradients come once rank 0 has looked. Whoever reads a parameter then sees a stale value, unless
        gradcast makes it wait.
        """
        self.theirs.step()
        # The ranks agree on the plan at the first step after the warm-up.
        if self.ours.count <= self.ours.warmup_steps:
            self.ours.step()
            return
        self.ours.optimizer.zero_grad()
        loss = self.ours.loss()
        # The one way to look that cannot be made to wait, nor is seen: addresses taken while values are finished.
        places = [(parameter.data_ptr(), parameter.nbytes) for parameter in self.ours.module.parameters()]
        before = [ctypes.string_at(*place) for place in places]
        self.signals += 1
        if self.rank.index != 0:
            self.rank.wait_for(f"looked{self.signals}")
        loss.backward()
        self.ours.optimizer.step()
        if self.rank.index == 0:
            moved = sum(ctypes.string_at(*place) != old for place, old in zip(places, before, strict=True))
            assert moved == 0, f"{moved} parameters were updated without the other rank's gradients"
            self.rank.signal(f"looked{self.signals}")
        self.ours.after_step()

    def differences(self) -> list[str]:
        """Where the sides differ after a flush."""
        assert self.rank.size == 2, "with more ranks the sides differ by rounding"
        theirs, ours = (side.result(side.module, side.optimizer) for side in self.sides)
        return compare.modules(*reversed(self.modules)) + compare.trees(ours, theirs)

    def end(self) -> list[str]:
        """The differences after the last step; gradcast is detached."""
        found = self.differences()
        self.handle.detach()
        return found


def differences(rank, program: Callable[..., object], mode: str, *arguments) -> list[str]:
    """Where the result of ``program(side, *arguments)`` with gradcast differs from that with DDP."""
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
