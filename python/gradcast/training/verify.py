"""Does gradcast give DDP's numbers on this model? One step of both, from equal state, compared."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import Error
from gradcast.training.acceptance import unwrapped
from gradcast.training.compat import extension
from gradcast.training.handle import attach
from gradcast.training.options import Options
from gradcast.training.ranks.group import gather, on_device


@dataclasses.dataclass(frozen=True)
class Verification:
    """``largest_difference``: over all gradients, between gradcast and DDP; ``where``: the parameter that has it.
    ``bound``: what the order of a sum may change there. ``ok``: every gradient is within its bound."""

    ok: bool
    bit_equal: bool
    largest_difference: float
    where: str
    bound: float
    world_size: int

    def __str__(self) -> str:
        if self.bit_equal:
            return f"gradcast's gradients equal DDP's bit for bit ({self.world_size} workers)"
        verdict = "within" if self.ok else "ABOVE"
        return (
            f"gradcast's gradients differ from DDP's by at most {self.largest_difference:.3g}, in {self.where}: "
            f"{verdict} what the order of a sum of {self.world_size} terms may change ({self.bound:.3g})"
        )


def verify(
    module: nn.Module,
    compute_loss: Callable[[nn.Module], torch.Tensor],
    *,
    process_group: Any = None,
    options: Options | None = None,
) -> Verification:
    """Compares one step of gradcast with one of DDP on copies of ``module``; the module itself stays as it is.

    ``compute_loss(module)`` runs forward on this worker's data and returns the loss; it is called several times and
    must give the same each time (random numbers are reset for each call). gradcast runs in overlap mode with a learning
    rate of 0, through its warm-up, so that the step compared follows a real plan. Collective.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(process_group) < 2:
        raise Error("verify compares workers: start two or more, and call init_process_group() first", "invalid_use")
    module = unwrapped(module)
    # The plan is what is compared, also where it gains nothing.
    options = dataclasses.replace(options or Options(), adapt=False)
    passes = _Passes(compute_loss)
    ddp = DistributedDataParallel(copy.deepcopy(module), process_group=process_group)
    theirs = passes.gradients(ddp, ddp.module)
    # DDP has given every rank rank 0's parameters: the local gradients belong to them.
    local = passes.gradients(*[copy.deepcopy(ddp.module)] * 2)
    ours = _ours(copy.deepcopy(module), passes, options, process_group)
    return _compare(ours, theirs, _bounds(local, process_group), process_group)


class _Passes:
    """Backward passes that all start from the same random state."""

    def __init__(self, compute_loss: Callable[[nn.Module], torch.Tensor]) -> None:
        self._compute_loss = compute_loss
        self._random_state = torch.get_rng_state()
        self._device_states = torch.cuda.get_rng_state_all()  # empty where there is none

    def run(self, called: nn.Module) -> None:
        torch.set_rng_state(self._random_state)
        torch.cuda.set_rng_state_all(self._device_states)
        self._compute_loss(called).backward()

    def gradients(self, called: nn.Module, owner: nn.Module) -> dict[str, torch.Tensor]:
        self.run(called)
        return _gradients(owner)


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def _ours(module: nn.Module, passes: _Passes, options: Options, process_group: Any) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.0)
    handle = attach(module, optimizer, process_group=process_group, options=options)
    for _ in range(options.warmup_steps + 2):
        optimizer.zero_grad()
        passes.run(module)
        optimizer.step()
    handle.detach()
    return _gradients(module)


def _bounds(local: dict[str, torch.Tensor], process_group: Any) -> dict[str, torch.Tensor]:
    """Per element: two sums of the same W terms in different orders differ by at most 2 (W - 1) u sum |term|, with
    u = eps / 2 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2, to first order)."""
    group = process_group or dist.group.WORLD
    world_size = group.size()
    bounds = {}
    for name, gradient in local.items():
        magnitudes = gradient.double().abs() / world_size
        extension.load().all_reduce(group, magnitudes)
        bounds[name] = magnitudes * ((world_size - 1) * torch.finfo(gradient.dtype).eps)
    return bounds


def _compare(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], bounds: dict[str, torch.Tensor], process_group: Any
) -> Verification:
    largest, where, bound, ok, equal = 0.0, next(iter(theirs)), 0.0, True, True
    for name, expected in theirs.items():
        difference = (ours[name].double() - expected.double()).abs()
        equal = equal and torch.equal(ours[name], expected)
        ok = ok and bool((difference <= bounds[name]).all())
        worst = difference.max().item()
        # A difference that is no number must win, too.
        if worst > largest or worst != worst:
            largest, where, bound = worst, name, bounds[name].flatten()[difference.argmax()].item()
    device = next(iter(theirs.values())).device
    with on_device(device):
        answers = gather(process_group or dist.group.WORLD, (ok, equal), device)
    return Verification(
        ok=all(answer[0] for answer in answers),
        bit_equal=all(answer[1] for answer in answers),
        largest_difference=largest,
        where=where,
        bound=bound,
        world_size=len(answers),
    )
