"""What attach refuses before training begins."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training.group import Group


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with gradients by name, each once; names without the prefix that DDP's wrapper adds."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    found = {}
    for name, parameter in inner.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise _use(f"{name} is not initialized yet; run one forward pass before attach")
        if parameter.requires_grad and parameter.numel() > 0:
            found[name] = parameter
    if not found:
        raise _use("the module has no parameter that needs a gradient")
    devices = {parameter.device for parameter in found.values()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise _use(f"the module lies on several devices ({names}); gradcast needs it on one per process")
    device = next(iter(devices))
    if device.type not in ("cpu", "cuda"):
        raise _use(f"the module lies on {device}; gradcast knows cpu and cuda")
    return found


def check_ddp(ddp: DistributedDataParallel, process_group: Any) -> None:
    if process_group is not None and process_group is not ddp.process_group:
        raise _use("process_group is not the group of this DDP module; leave it out")
    if getattr(ddp, "_comm_hooks", None):
        raise _use(
            "a communication hook is registered on this DDP module, and gradcast would take its place; "
            "attach to a DDP module without one"
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise _use("DDP's mixed_precision reduces gradients in its own way; use torch.autocast with gradcast")
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise _use("DDP's delay_all_reduce_named_params is not supported; make the DDP module without it")


def check_optimizers(optimizers: Sequence[Any], parameters: dict[str, nn.Parameter]) -> None:
    """Every trainable parameter must be in exactly one optimizer, and nothing else in any."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise _use(
                f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer or a list of them is expected"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names and parameter.requires_grad and parameter.numel() > 0:
                    raise _use(
                        f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not in the "
                        "module; make it from module.parameters() of the module given here"
                    )
                if owner.setdefault(id(parameter), number) != number:
                    raise _use(f"{names.get(id(parameter), 'a parameter')} is in two of the optimizers")
    missing = [name for key, name in names.items() if key not in owner] if optimizers else []
    if missing:
        raise _use(f"{missing[0]} is in none of the optimizers; give all optimizers of the module to attach, as a list")


def check_same_model(group: Group, parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]) -> None:
    """Raises on every rank, naming the first difference between rank 0's model and another's. Collective."""
    mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in parameters.items()]
    mine += [(f"buffer {name}", tuple(b.shape), str(b.dtype)) for name, b in buffers.items()]
    everyone = group.gather(mine)
    for rank, theirs in enumerate(everyone):
        difference = _first_difference(everyone[0], theirs)
        if difference:
            raise _use(f"the model differs between ranks: rank 0 has {difference[0]}, rank {rank} has {difference[1]}")


def _first_difference(first: list, other: list) -> tuple[str, str] | None:
    for index in range(max(len(first), len(other))):
        a, b = first[index : index + 1], other[index : index + 1]
        if a != b:
            return _describe(a), _describe(b)
    return None


def _describe(entry: list) -> str:
    if not entry:
        return "nothing more"
    name, shape, dtype = entry[0]
    return f"{name} of shape {shape} and type {dtype}"


def _use(message: str) -> Error:
    return Error(message, "invalid_use")
