"""``gradcast.verify``: compares one step of gradcast with one of DDP on a model, from equal state."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast.errors import refused
from gradcast.training.acceptance import joined
from gradcast.training.attach import attach
from gradcast.training.compat import extension
from gradcast.training.compat.sharding import has_parts
from gradcast.training.compat.wrappers import unwrapped
from gradcast.training.options import Options
from gradcast.training.ranks.group import callers_of


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of ``verify``.

    ``largest_difference``: between gradcast's and DDP's gradients, over all elements; ``where``: its parameter.
    ``bound``: how much the order of a sum may change that element. ``ok``: every element is within its bound.
    """

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
    module: nn.Module | Sequence[nn.Module],
    compute_loss: Callable[[Any], torch.Tensor],
    *,
    process_group: Any = None,
    options: Options | None = None,
) -> Verification:
    """Compares one step of gradcast with one of DDP on copies of ``module``; the module itself does not change.

    ``compute_loss(module)`` runs forward on this worker's data and returns the loss. It is called several times and
    must return the same value each time; random number generators are reset for each call. Of a list of modules it gets
    a list. gradcast runs in overlap mode with a learning rate of 0, through its warm-up, so that the step compared
    follows a real plan. Collective.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(process_group) < 2:
        raise refused("verify compares workers: start two or more, and call init_process_group() first")
    are_several = isinstance(module, list | tuple)
    given: Any = module
    whole: Any = joined(given) if are_several else unwrapped(given)
    if isinstance(whole, nn.Module) and has_parts(whole):
        raise refused("verify compares with DDP, which takes no DTensors; compare with torch's replicate() yourself")
    # adapt=False: the plan is followed even if it gains nothing. DDP has no weights.
    options = options or Options()
    options = dataclasses.replace(options, plan=dataclasses.replace(options.plan, adapt=False), weight=None)
    random_state = torch.get_rng_state()
    device_states = torch.cuda.get_rng_state_all()  # empty without CUDA

    def run_backward(called: list[nn.Module]) -> None:
        torch.set_rng_state(random_state)
        torch.cuda.set_rng_state_all(device_states)
        compute_loss(called if are_several else called[0]).backward()

    def parts(whole: Any) -> list[nn.Module]:
        return list(whole) if are_several else [whole]

    theirs, ours = copy.deepcopy(whole), copy.deepcopy(whole)
    ddps = [_in_ddp(each, process_group) for each in parts(theirs)]
    local = copy.deepcopy(theirs)  # with rank 0's parameters
    run_backward(ddps)
    run_backward(parts(local))
    optimizer = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.0)
    handle = attach(parts(ours), optimizer, process_group=process_group, options=options)
    for _ in range(options.plan.warmup_steps + 2):
        optimizer.zero_grad()
        run_backward(parts(ours))
        optimizer.step()
    handle.detach()
    return _compare(_gradients(ours), _gradients(theirs), _bounds(_gradients(local), process_group), process_group)


def _in_ddp(module: nn.Module, process_group: Any) -> nn.Module:
    """DDP around a module, unless it has nothing to reduce."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, process_group=process_group)


def _gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def _bounds(local: dict[str, torch.Tensor], process_group: Any) -> dict[str, torch.Tensor]:
    """Bounds by parameter and element. Two sums of the same W terms in different orders differ by at most
    2 (W - 1) u sum |term|, with u = eps / 2 (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2, to
    first order)."""
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
        # NaN counts as the largest difference.
        if worst > largest or worst != worst:
            largest, where, bound = worst, name, bounds[name].flatten()[difference.argmax()].item()
    answers = callers_of(process_group, next(iter(theirs.values())).device).gather((ok, equal))
    return Verification(
        ok=all(answer[0] for answer in answers),
        bit_equal=all(answer[1] for answer in answers),
        largest_difference=largest,
        where=where,
        bound=bound,
        world_size=len(answers),
    )
