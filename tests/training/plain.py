"""The oracle: training in which every gradient is reduced by blocking calls and nothing is clever.

It uses nothing of gradcast but values: a plan's blocks and the places of tensors in buffers.
"""

from collections.abc import Callable, Sequence

from training.needs import torch

nn = torch.nn


def average_by_blocks(parameters: dict[str, nn.Parameter], layout: Sequence, blocks: Sequence, world_size: int) -> None:
    """Replaces every gradient by its mean over the ranks: scaled, then summed block after block.

    ``layout`` has the fields of gradcast's places: name, buffer, lo_bytes, hi_bytes, end_bytes, dtype.
    """
    buffers = _flat_buffers(layout)
    views = {}
    for place in layout:
        size = place.dtype.itemsize
        parameter = parameters[place.name]
        assert place.hi_bytes - place.lo_bytes == parameter.numel() * size, place
        # In the order of dimensions in which autograd makes it (channels last, say), as DDP does.
        views[place.name] = buffers[place.buffer].as_strided(
            parameter.size(), parameter.grad.stride(), place.lo_bytes // size
        )
        torch.mul(parameter.grad, 1 / world_size, out=views[place.name])
    for block in blocks:
        _all_reduce(buffers[block.buffer], block.ranges)
    for name, view in views.items():
        parameters[name].grad = view


def _flat_buffers(layout: Sequence) -> dict[int, torch.Tensor]:
    ends: dict[int, int] = {}
    types = {}
    for place in layout:
        # With what lies behind each gradient and travels, too.
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


class PlainLoop:
    """One training step after another, each with the blocks and the layout that it is given."""

    def __init__(self, module: nn.Module, recipe, world_size: int) -> None:
        self.module = module
        self.recipe = recipe
        self.world_size = world_size
        self.parameters = dict(module.named_parameters())

    def step(self, loss: Callable[[nn.Module], torch.Tensor], layout: Sequence, blocks: Sequence) -> float:
        for buffer in self.module.buffers():
            torch.distributed.broadcast(buffer, 0)
        self.recipe.optimizer.zero_grad()
        value = loss(self.module)
        value.backward()
        average_by_blocks(self.parameters, layout, blocks, self.world_size)
        self.recipe.optimizer.step()
        self.recipe.after_step()
        return value.item()
