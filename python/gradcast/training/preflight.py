"""Checks of ``attach`` that concern options, and that all ranks call it alike. acceptance.py checks the module and its
optimizers."""

import dataclasses
import itertools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcast.errors import Error, refused
from gradcast.training.acceptance import the_ddp
from gradcast.training.compat import extension
from gradcast.training.options import Options
from gradcast.training.ranks.group import Group, backend_of, device_of_messages, gather, naming, shared_group
from gradcast.training.ranks.hosts import Place, own_place


def check_local_steps(options: Options, optimizers: Sequence[Any], module: Any, *, disabled: bool) -> None:
    if options.sync_every is None:
        return
    if disabled:
        raise refused(
            "GRADCAST_DISABLE is set, and stock DDP averages gradients in every step; options.sync_every needs "
            "gradcast, so unset the variable"
        )
    if not optimizers:
        raise refused(
            "options.sync_every counts the steps of an optimizer, so it needs one, and hook mode has none: "
            "gradcast.attach(module, optimizer, options=...)"
        )
    members = module if isinstance(module, list | tuple) else [module]
    if any(isinstance(each, nn.Module) and the_ddp(each) is not None for each in members):
        raise refused(
            "the module holds a DistributedDataParallel, which averages gradients in every backward pass, and "
            "options.sync_every is there to avoid that; give the plain module (ddp.module), train with it, and delete "
            "the DistributedDataParallel"
        )
    if options.plan_path is not None:
        raise refused("GRADCAST_PLAN is set, and local steps follow no plan; unset it, or leave options.sync_every out")


def check_clipping(options: Options, given: Sequence[Any]) -> None:
    """Raises if gradcast cannot clip. ``given``: the optimizers as the user has them, wrapped or not."""
    if not options.clips:
        return
    name = "max_grad_norm" if options.max_grad_norm is not None else "max_grad_value"
    if not given:
        raise refused(
            f"options.{name} clips inside step(), so it needs the optimizer (overlap mode); in hook mode call "
            f"torch.nn.utils.{name.replace('max', 'clip')}_ yourself"
        )
    # Accelerate keeps the step() from before attach and lets the scaler call that, which does not clip.
    if any(isinstance(getattr(each, "scaler", None), torch.amp.GradScaler) for each in given):
        raise refused(
            f"options.{name} does not reach the steps of an optimizer whose framework drives it with a "
            "GradScaler; let the framework clip, or use bf16, which needs no scaler"
        )


# This module alone reads the variable for training.
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_connections(mode: str, process_group: Any, device: torch.device) -> None:
    """Raises if blocks and the program's own collectives could wait for each other in the device's only queue.

    With one queue, a kernel waits for all that was queued before it. Blocks are queued when their gradients are ready,
    so beside collectives of forward the order differs between ranks, and each rank may wait for what another one has
    queued behind. In hook mode blocks travel in backward only, as DDP's buckets do.
    """
    shared = shared_group(process_group)
    if mode not in ("overlap", "local") or shared is None or shared.size() == 1:
        return
    if backend_of(shared, device.type) == "nccl" and os.environ.get(CONNECTIONS_VARIABLE) == "1":
        raise refused(
            f"{CONNECTIONS_VARIABLE} is 1, so the GPU has one queue, in which blocks under forward and collectives of "
            "the program's own may wait for each other for good; unset the variable, or use hook mode: "
            "gradcast.attach(module) without the optimizer"
        )


# Options that may differ: those of the plan, which rank 0 makes, and those about one rank alone. If others did, ranks
# would wait for each other at different places or compute differently.
_MAY_DIFFER = (
    "plan",
    "policy",
    "policy_parameters",
    "in_flight",
    "unseen_reads",
    "split_compiled",
    "evaluate",
    "evaluate_batch",
    "timeout_s",
    "stall_warning_s",
    "dump_dir",
    "timeline_steps",
    "on_alarm",
)


def check_same_call(
    shared: Any, refusal: Error | None, mode: str, options: Options, device: torch.device | None
) -> list[Place]:
    """Raises on every rank what one of them refuses, and if they call attach in different ways. Returns every rank's
    place, which travels in the same message. Collective.

    ``shared``: the user's group, which torch.distributed need not know; None for a single worker. gradcast's own cannot
    be made if a rank has left already.
    """
    if shared is None:
        if refusal is not None:
            raise refusal
        return [own_place()]
    with naming("comparing the ranks' calls of attach (each rank has to make one)", shared.rank(), shared.size()):
        everyone = _gathered(shared, _call(refusal, mode, options), device)
    _check_same(everyone, refusal)
    return [place for *_, place in everyone]


def check_same_restart(group: Group, refusal: Error | None, mode: str, options: Options) -> None:
    """As ``check_same_call``, during training: uses no process group. Collective."""
    _check_same(group.gather_beside_blocks(_call(refusal, mode, options)), refusal)


_Call = tuple[tuple[str, str] | None, str, dict[str, Any], Place]


def _call(refusal: Error | None, mode: str, options: Options) -> _Call:
    names = [each.name for each in dataclasses.fields(options) if each.name not in _MAY_DIFFER]
    settings = {name: getattr(options, name) for name in names}
    return None if refusal is None else (str(refusal), refusal.code), mode, settings, own_place()


def _check_same(everyone: Sequence[_Call], refusal: Error | None) -> None:
    if refusal is not None:
        raise refusal
    for rank, (their_refusal, *_) in enumerate(everyone):
        if their_refusal is not None:
            raise Error(f"rank {rank} refuses to attach: {their_refusal[0]}", their_refusal[1])
    _, first_mode, first_settings, _ = everyone[0]
    for rank, (_, other_mode, other_settings, _) in enumerate(everyone):
        if other_mode != first_mode:
            raise refused(
                f"rank 0 attaches in {first_mode} mode, rank {rank} in {other_mode} mode; give all ranks an "
                "optimizer, or none"
            )
        for name, value in first_settings.items():
            if other_settings[name] != value:
                raise refused(
                    f"options.{name} is {value} on rank 0 and {other_settings[name]} on rank {rank}; "
                    "give all ranks the same"
                )


def _gathered(process_group: Any, value: Any, device: torch.device | None) -> list[Any]:
    try:
        extension.load()
    except Error:  # this rank reports it as its refusal
        return _gathered_in_python(process_group, value, device)
    return gather(process_group, value, device)


def _gathered_in_python(process_group: Any, value: Any, device: torch.device | None) -> list[Any]:
    """Sends what ``gather`` in csrc/transport/torch/control.cc sends, to ranks that have loaded the part for torch."""
    where = device_of_messages(process_group, device)
    text = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([len(text)], device=where)
    sizes = [torch.empty_like(size) for _ in range(process_group.size())]
    dist.all_gather(sizes, size, group=process_group)
    own = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=where)
    own[: len(text)] = text
    texts = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(texts, own, group=process_group)
    return [pickle.loads(bytes(each.tolist())[: int(length)]) for each, length in zip(texts, sizes, strict=True)]


def copy_model_from_first(group: Group, module: nn.Module, options: Options) -> None:
    """Rank 0's parameters and, unless the options exclude them, buffers, on every rank. Collective."""
    buffers = module.buffers() if options.broadcast_buffers else ()
    group.copy_from_first([*module.parameters(), *buffers], "the module's parameters and buffers")


def check_same_model(group: Group, module: nn.Module) -> None:
    """Raises on every rank, naming the first difference between rank 0's model and another's. Collective."""
    mine = [_features(name if p.requires_grad else f"frozen {name}", p) for name, p in module.named_parameters()]
    mine += [_features(f"buffer {name}", b) for name, b in module.named_buffers()]
    everyone = group.gather(mine)
    for rank, theirs in enumerate(everyone):
        for ours, other in itertools.zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise refused(f"the model differs between ranks: rank 0 has {ours}, rank {rank} has {other}")


def _features(name: str, tensor: torch.Tensor) -> str:
    """What must be the same on all ranks. Gradients are summed as they lie in memory, so strides count, except those of
    dimensions of size 1."""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return f"{name} of shape {tuple(tensor.shape)}, type {tensor.dtype} and strides {strides}"
