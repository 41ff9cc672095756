"""Residuals in checkpoints: what rounding has taken from this rank's gradients (wire format int8)."""

from typing import Any

from gradcast.errors import Error
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_buffers import GradientBuffers

KEY = "residuals"


def saved(buffers: GradientBuffers, group: Group) -> dict[str, Any]:
    """The part of a checkpoint with the residuals, by name; empty for other wire formats. REQUIRES: nothing travels."""
    tensors = {buffers.names[index]: buffers.residual_of(index).clone() for index in buffers.with_groups}
    return {KEY: {"rank": group.rank, "world_size": group.world_size, "tensors": tensors}} if tensors else {}


def restore(buffers: GradientBuffers, group: Group, state: dict[str, Any]) -> str | None:
    """Restores what this rank has saved. Returns why it cannot, so that the residuals are zero again.

    Raises Error(invalid_use) for residuals of another model. REQUIRES: nothing travels.
    """
    found = state.get(KEY)
    for residual in buffers.residuals.values():
        residual.zero_()
    if not buffers.residuals or found is None:
        return "the checkpoint has none" if buffers.residuals else None
    tensors = found["tensors"]
    own = {buffers.names[index]: buffers.residual_of(index) for index in buffers.with_groups}
    differing = sorted(name for name in {*own, *tensors} if _size(own.get(name)) != _size(tensors.get(name)))
    if differing:
        raise Error(f"the checkpoint's residuals are of another model: {differing[0]} differs", "invalid_use")
    if found["world_size"] != group.world_size:
        return f"they are of {found['world_size']} workers, this training has {group.world_size}"
    if found["rank"] != group.rank:
        return f"they are those of rank {found['rank']}; each rank has to load the state that it has saved"
    for name, residual in own.items():
        residual.copy_(tensors[name])
    return None


def _size(tensor: Any) -> int | None:
    return None if tensor is None else tensor.numel()
