"""The oracle: training in which every gradient is reduced by blocking calls and nothing is clever.

It uses nothing of gradcast but values: a plan's blocks and the places of tensors in buffers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from training import compare, optimizers
from training.needs import torch
from training.pair import Training

nn = torch.nn


class Followed(NamedTuple):
    """The plan in force in a backward pass."""

    version: int
    policy: str
    layout: tuple  # of places: name, buffer, lo_bytes, hi_bytes, end_bytes, dtype
    blocks: tuple


def average_by_blocks(module: nn.Module, followed: Followed) -> None:
    """Replaces every gradient by its mean over the ranks: scaled, then summed block after block."""
    parameters, buffers = dict(module.named_parameters()), _flat_buffers(followed.layout)
    views = {}
    for place in followed.layout:
        if place.name.startswith("gradcast."):
            continue
        size = place.dtype.itemsize
        parameter = parameters[place.name]
        assert place.hi_bytes - place.lo_bytes == parameter.numel() * size, place
        # In the order of dimensions in which autograd makes it (channels last, say), as DDP does.
        views[place.name] = buffers[place.buffer].as_strided(
            parameter.size(), parameter.grad.stride(), place.lo_bytes // size
        )
        torch.mul(parameter.grad, 1 / torch.distributed.get_world_size(), out=views[place.name])
    for block in followed.blocks:
        _all_reduce(buffers[block.buffer], block.ranges)
    for name, view in views.items():
        parameters[name].grad = view


def _flat_buffers(layout: Sequence) -> dict[int, torch.Tensor]:
    ends: dict[int, int] = {}
    types = {}
    for place in layout:
        # With the padding, and all else that is sent.
        ends[place.buffer] = max(ends.get(place.buffer, 0), place.end_bytes)
        types[place.buffer] = place.dtype
    return {buffer: torch.zeros(end // types[buffer].itemsize, dtype=types[buffer]) for buffer, end in ends.items()}


def _all_reduce(buffer: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    size = buffer.element_size()
    parts = [buffer[lo // size : hi // size] for lo, hi in ranges]
    if len(parts) == 1:
        torch.distributed.all_reduce(parts[0])
        return
    packed = torch.cat(parts)
    torch.distributed.all_reduce(packed)
    for part, sums in zip(parts, packed.split([part.numel() for part in parts]), strict=True):
        part.copy_(sums)


def beside_plain_loop(
    ours: Training, optimizer: str, steps: int, average: Callable[[nn.Module, Followed], None] = average_by_blocks
) -> tuple[list[str], list[tuple[float, float]], list[Followed]]:
    """Trains with gradcast, and in a plain loop that averages by blocking calls: how they differ, both losses of each
    step, and the plans that were followed."""
    reference = ours.task.module(seed=0)
    recipe = optimizers.make(optimizer, reference)
    losses, followed = [], []

    def note(side: Training) -> None:
        handle, plan = side.handle, side.handle.plan
        followed.append(Followed(handle.plan_version, plan.policy, handle.layout, plan.blocks))

    for number in range(steps):
        loss = ours.step(between=note)
        for buffer in reference.buffers():
            torch.distributed.broadcast(buffer, 0)
        recipe.optimizer.zero_grad()
        expected = ours.task.loss(reference, ours.batch(number))
        expected.backward()
        average(reference, followed[-1])
        recipe.optimizer.step()
        recipe.after_step()
        losses.append((loss, expected.item()))
    ours.handle.flush()
    found = compare.modules(ours.module, reference) + compare.optimizers(ours.optimizer, recipe.optimizer)
    return found, losses, followed
