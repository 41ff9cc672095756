"""What attach refuses before training begins."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error
from gradcast.training.group import Group, naming
from gradcast.training.options import Options


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The one whose step() updates, inside of a framework's wrapper (Accelerate's, Lightning's), which has no parameter
    groups of its own. What the wrapper does before and after that step goes on as before."""
    while isinstance(optimizer, Optimizer) and "param_groups" not in vars(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def trainable(module: nn.Module, known: Collection[int] = ()) -> dict[str, nn.Parameter]:
    """Parameters with gradients by name, each once; names without the prefix that DDP's wrapper adds. ``known``: ids of
    some that count though they are frozen."""
    if not isinstance(module, nn.Module):
        raise _use(f"the module is a {type(module).__name__}; a torch.nn.Module is expected")
    found = {}
    for name, parameter in unwrapped(module).named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise _use(f"{name} is not initialized yet; run one forward pass before attach")
        if not parameter.requires_grad and id(parameter) not in known:
            continue
        if type(parameter.detach()) is not torch.Tensor:
            raise _use(
                f"{name} is a {type(parameter.detach()).__name__}, a tensor that is more than its values; gradcast "
                "reduces ordinary tensors only"
            )
        if parameter.is_complex():
            raise _use(f"{name} is complex; gradcast sends real gradients only")
        if parameter.numel() > 0:
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


def check_ignored(module: nn.Module) -> None:
    """DDP leaves these to each rank, where they may differ (experts, parts of a table)."""
    inner = unwrapped(module)
    ignored = {*getattr(module, "parameters_to_ignore", ()), *getattr(inner, "_ddp_params_and_buffers_to_ignore", ())}
    if ignored:
        raise _use(
            f"DDP is told to ignore {min(ignored)}, which each rank then has for itself, and gradcast would average "
            "it; leave it out of the module that is attached, or train with DDP"
        )


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


def refuse_capture(device: torch.device) -> None:
    """Where a training's pass begins, and before anything is waited for: a CUDA graph replays kernels, and what the
    host does in between, sending blocks, is no part of it. To make a stream that is captured wait for traffic would end
    the capture with an error of CUDA's that does not say why."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _use(
            "this pass is being captured in a CUDA graph, which would leave gradcast's traffic out when it is "
            "replayed; capture forward and backward with torch.cuda.make_graphed_callables before attach, or train "
            "without a graph (what does not train can be captured: call handle.flush() before)"
        )


def check_clipping(max_grad_norm: float | None, given: Sequence[Any]) -> None:
    """``given``: the optimizers as the user has them, wrapped or not."""
    if max_grad_norm is None:
        return
    if not given:
        raise _use(
            "options.max_grad_norm clips inside of step(), so it needs the optimizer (overlap mode); in hook mode call "
            "torch.nn.utils.clip_grad_norm_ yourself"
        )
    # Accelerate keeps the step() from before attach and lets the scaler call that one, which does not clip.
    if any(isinstance(getattr(each, "scaler", None), torch.amp.GradScaler) for each in given):
        raise _use(
            "options.max_grad_norm does not reach the steps of an optimizer whose framework drives it with a "
            "GradScaler; let the framework clip, or use bf16, which needs no scaler"
        )


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


# Options in which the ranks would do different things: wait for each other at different places, or compute differently.
_SAME_OPTIONS = ("warmup_steps", "adapt", "compare_every", "max_grad_norm", "wire")


def check_same_call(process_group: Any, refusal: Error | None, mode: str, options: Options) -> None:
    """Raises on every rank what one of them refuses, and where they call attach in different ways. Collective.

    Over the user's group: gradcast's own cannot be made where one rank has left already.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(process_group) < 0:
        if refusal is not None:
            raise refusal
        return
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    settings = {name: getattr(options, name) for name in _SAME_OPTIONS}
    mine = (None if refusal is None else (str(refusal), refusal.code), mode, settings)
    with naming("comparing the ranks' calls of attach", dist.get_rank(process_group), len(everyone)):
        dist.all_gather_object(everyone, mine, group=process_group)
    if refusal is not None:
        raise refusal
    for rank, (refused, *_) in enumerate(everyone):
        if refused is not None:
            raise Error(f"rank {rank} refuses to attach: {refused[0]}", refused[1])
    _, first_mode, first_settings = everyone[0]
    for rank, (_, other_mode, other_settings) in enumerate(everyone):
        if other_mode != first_mode:
            raise _use(
                f"rank 0 attaches in {first_mode} mode, rank {rank} in {other_mode} mode; give all ranks an "
                "optimizer, or none"
            )
        for name in _SAME_OPTIONS:
            if other_settings[name] != first_settings[name]:
                raise _use(
                    f"options.{name} is {first_settings[name]} on rank 0 and {other_settings[name]} on rank {rank}; "
                    "give all ranks the same"
                )


def check_same_model(group: Group, module: nn.Module) -> None:
    """Raises on every rank, naming the first difference between rank 0's model and another's. Collective."""
    mine = [_features(name if p.requires_grad else f"frozen {name}", p) for name, p in module.named_parameters()]
    mine += [_features(f"buffer {name}", b) for name, b in module.named_buffers()]
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
    name, shape, dtype, strides = entry[0]
    return f"{name} of shape {shape}, type {dtype} and strides {strides}"


def _features(name: str, tensor: torch.Tensor) -> tuple:
    """What has to be the same. Gradients are summed as they lie in memory: strides count, where they mean anything."""
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return name, tuple(tensor.shape), str(tensor.dtype), tuple(strides)


def _use(message: str) -> Error:
    return Error(message, "invalid_use")
