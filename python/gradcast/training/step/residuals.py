"""Residuals: the rounding errors of this rank's gradients (wire format int8), in checkpoints and with scalers."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gradcast.errors import refused
from gradcast.training.ranks.group import Group
from gradcast.training.step import partial_step
from gradcast.training.step.gradient_buffers import GradientBuffers

KEY = "residuals"


def saved(buffers: GradientBuffers, group: Group) -> dict[str, Any]:
    """The residuals, by name, for a checkpoint; empty for other wire formats. REQUIRES: nothing is in flight."""
    tensors = {buffers.names[index]: buffers.residual_of(index).clone() for index in buffers.with_groups}
    return {KEY: {"rank": group.rank, "world_size": group.world_size, "tensors": tensors}} if tensors else {}


def restore(buffers: GradientBuffers, group: Group, state: dict[str, Any]) -> str | None:
    """Restores the residuals that this rank has saved. Returns why it cannot, so that they are zero again.

    Raises Error(invalid_use) for residuals of another model. REQUIRES: nothing is in flight.
    """
    found = state.get(KEY)
    for residual in buffers.residuals.values():
        residual.zero_()
    if not buffers.residuals or found is None:
        return "the checkpoint has none" if buffers.residuals else None
    tensors = found["tensors"]
    own = {buffers.names[index]: buffers.residual_of(index) for index in buffers.with_groups}
    for name in [*own, *tensors]:
        here, there = _shape(own, name), _shape(tensors, name)
        if here != there:
            raise refused(f"the checkpoint's residuals are of another model: {name} {there} in it and {here} here")
    if found["world_size"] != group.world_size:
        return f"they are of {found['world_size']} workers, this training has {group.world_size}"
    if found["rank"] != group.rank:
        return f"they are those of rank {found['rank']}; each rank has to load the state that it has saved"
    for name, residual in own.items():
        residual.copy_(tensors[name])
    return None


def refuse_scalers_of(parameters: Iterable[torch.Tensor], owner: object) -> Any:
    """Refuses scalers in the steps of all optimizers of these parameters, while their owner lives. Returns the handle
    that ends it."""
    own, reference = set(map(id, parameters)), weakref.ref(owner)

    def before_step(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        is_ours = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
        if is_ours and reference() is not None and partial_step.is_called_by_scaler():
            raise refused(
                "a GradScaler changes the scale of gradients, but int8 keeps their rounding errors for the next step; "
                "use options.wire='bf16', or train without the scaler"
            )

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(owner, handle.remove)
    return handle


def _shape(tensors: dict[str, Any], name: str) -> str:
    return f"has shape {tuple(tensors[name].shape)}" if name in tensors else "is missing"
