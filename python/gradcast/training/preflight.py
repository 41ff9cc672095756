"""Checks of ``attach`` that concern options, and that all ranks call it alike. acceptance.py checks the module and its
optimizers."""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcast.errors import Error, refused
from gradcast.training.acceptance import Accepted
from gradcast.training.compat.pipeline_stages import Stage
from gradcast.training.compat.sharding import is_part, is_sharded, local_of
from gradcast.training.compat.wrappers import the_ddp
from gradcast.training.options import Options
from gradcast.training.plan.proposals import rehearse
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.hosts import Place, own_place
from gradcast.training.step.gradient_buffers import GradientSizes
from gradcast.training.step.parameter_state import shown
from gradcast.training.step.sent_tensors import sent_tensors

_log = logging.getLogger("gradcast")


def check_local_steps(options: Options, optimizers: Sequence[Any], module: Any, *, disabled: bool) -> None:
    if options.local is None:
        return
    if disabled:
        raise refused(
            "GRADCAST_DISABLE is set, and stock DDP averages gradients in every step; options.local needs "
            "gradcast, so unset the variable"
        )
    if not optimizers:
        raise refused(
            "options.local counts the steps of an optimizer, so it needs one, and hook mode has none: "
            "gradcast.attach(module, optimizer, options=...)"
        )
    members = module if isinstance(module, list | tuple) else [module]
    if any(isinstance(each, nn.Module) and the_ddp(each) is not None for each in members):
        raise refused(
            "the module holds a DistributedDataParallel, which averages gradients in every backward pass, and "
            "options.local is there to avoid that; give the plain module (ddp.module), train with it, and delete "
            "the DistributedDataParallel"
        )
    if options.plan.path is not None:
        raise refused("GRADCAST_PLAN is set, and local steps follow no plan; unset it, or omit options.local")


def check_clipping(options: Options, given: Sequence[Any]) -> None:
    """Raises if gradcast cannot clip. ``given``: the optimizers as the user has them, wrapped or not."""
    if not options.clips:
        return
    if not given:
        raise refused(
            "options.clip clips inside step(), so it needs the optimizer (overlap mode); in hook mode call "
            f"torch.nn.utils.clip_grad_{'value' if options.clip.norm is None else 'norm'}_ yourself"
        )
    # Accelerate keeps the step() from before attach and lets the scaler call that, which does not clip.
    if any(isinstance(getattr(each, "scaler", None), torch.amp.GradScaler) for each in given):
        raise refused(
            "options.clip does not reach the steps of an optimizer whose framework drives it with a "
            "GradScaler; let the framework clip, or use bf16, which needs no scaler"
        )


_NOT_SHARDED = {
    "weight": "FSDP's reduce-scatter counts all shards alike",
    "local": "local steps average whole parameters",
    "split_compiled": "forward waits where FSDP gathers parameters",
}

_NOT_IN_STAGES = {
    "clip": "the norm spans all stages, and gradcast knows those of this rank; clip in the loop",
    "weight": "a pipeline runs several backward passes per step",
    "local": "not tried with pipelines",
    "split_compiled": "not tried with pipelines",
}

_NOT_IN_PARTS = {
    "clip": "clip in the loop, since a norm would be that of this rank's parts",
    "local": _NOT_SHARDED["local"],
    "split_compiled": "not tried with DTensors",
}


def check_sharded(options: Options, accepted: Accepted, *, disabled: bool) -> None:
    """Raises for what gradcast cannot do with a module that FSDP shards."""
    _refuse_options(options, _NOT_SHARDED, "a module that FSDP shards")
    shards = {group.shard_count for group in accepted.shards}
    if shards != {group.part_count for group in accepted.shards} or len(shards) > 1:
        _refuse_options(
            options,
            {"clip": _NOT_IN_PARTS["clip"]},
            "a module that FSDP shards in several ways, or that is tensor-parallel, too",
        )
    if disabled and accepted.shards[0].replicas is None:
        raise refused(
            "without gradcast nothing averages the gradients over the replicas that attach was given, and "
            "GRADCAST_DISABLE is set; unset it, or shard the module with a mesh of two dimensions"
        )


def check_stages(options: Options, stages: Sequence[Stage], process_group: Any, *, disabled: bool) -> None:
    """Raises for what gradcast cannot do with stages of a pipeline."""
    _refuse_options(options, _NOT_IN_STAGES, "stages of a pipeline")
    parameters = [each for stage in stages for each in stage.parameters]
    if not any(each.requires_grad for each in parameters):
        raise refused("all stages of this rank are frozen, and nothing is sent for them; omit attach on such ranks")
    if len({id(each) for each in parameters}) < len(parameters):
        raise refused(
            "stages of this rank have a parameter in common; give each a copy, and add up their gradients between "
            "schedule.step() and step()"
        )
    if any(is_sharded(stage.module) for stage in stages):
        return  # the mesh has the replicas, and FSDP averages where gradcast does not
    if process_group is None:
        raise refused(
            "attach to a pipeline's stage needs the ranks that have the same stage: give process_group=, of "
            "init_device_mesh() for example mesh.get_group('dp')"
        )
    if disabled:
        raise refused(
            "nothing but gradcast averages the gradients of a pipeline's stage, and GRADCAST_DISABLE is set; unset it, "
            "or make the stage of a DistributedDataParallel and train without gradcast"
        )


def check_tensor_parallel(options: Options, module: nn.Module, group: Group, *, disabled: bool = False) -> None:
    """Raises for DTensors unless the ranks of ``group``, which average, have the same part of each."""
    parts = {name: each for name, each in [*module.named_parameters(), *module.named_buffers()] if is_part(each)}
    if not parts:
        return
    _refuse_options(options, _NOT_IN_PARTS, "tensor-parallel parameters")
    if disabled and group.world_size > 1:
        raise refused(
            "stock DDP would train the module, and it takes no DTensors, but GRADCAST_DISABLE is set; unset it, or "
            "train without gradcast by torch's replicate()"
        )
    averaging = {0} if group.world_size == 1 else set(dist.get_process_group_ranks(group.shared))
    for name, part in parts.items():
        mesh: Any = part
        ranks = mesh.device_mesh.mesh.flatten().tolist()
        if len(averaging.intersection(ranks)) > 1:
            raise refused(
                f"{name} is a DTensor over the ranks {ranks}, of which attach got several as data-parallel ranks; make "
                "a mesh of two dimensions, (data-parallel, tensor-parallel), parallelize over the second one, and give "
                "attach the group of the first one as process_group"
            )


def _refuse_options(options: Options, reasons: dict[str, str], what: str) -> None:
    for name in options.changed(reasons):
        raise refused(f"options.{name} is given with {what}: {reasons[name]}; omit it")


def warn_of_left_alone(accepted: Accepted) -> None:
    """Warns of trainable parameters outside of FSDP's groups."""
    in_groups = {id(each) for group in accepted.shards for each in group.parameters}
    outside = [name for name, p in accepted.module.named_parameters() if p.requires_grad and id(p) not in in_groups]
    if outside:
        _log.warning(
            "outside of FSDP's groups, so that neither FSDP nor gradcast averages their gradients: %s", shown(outside)
        )


def check_same_values(group: Group, parameters: dict[str, nn.Parameter]) -> None:
    """Raises on every rank, naming a parameter that differs between replicas, which FSDP does not make equal.
    Collective."""

    def own() -> dict[str, str]:
        return {name: _digest(local_of(each)) for name, each in parameters.items()}

    everyone = group.computed_by_each(own, "comparing the replicas' parameters")
    for rank, theirs in enumerate(everyone):
        name = next((name for name in everyone[0] if theirs.get(name) != everyone[0][name]), None)
        if name is not None:
            raise refused(
                f"{name} differs between replicas 0 and {rank}, and FSDP does not make replicas equal; give all of "
                "them the same seed, or load the same checkpoint, before attach"
            )


def _digest(tensor: torch.Tensor) -> str:
    """Returns a hash of the tensor's bytes."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).hexdigest()


def check_as_several(accepted: Accepted, mode: str, options: Options) -> None:
    """Raises on a single worker, which follows no plan, what its options would raise on several."""
    modules = accepted.modules_with_buffers(options.broadcast_buffers, mode)
    sent = sent_tensors(accepted.parameters, modules, options, accepted.device)
    refusals = []
    # The wire format that is taken depends on the hosts.
    for wire in dict.fromkeys((options.wire, "fp32")):
        try:
            rehearse(GradientSizes(list(sent), list(sent.values()), wire), mode, options)
            return
        except Error as error:
            refusals.append(error)
    raise refusals[0]


# Options that may differ: those of the plan, which rank 0 makes, and those about one rank alone. If others did, ranks
# would wait for each other at different places or compute differently.
_MAY_DIFFER = (
    "plan.file",
    "plan.policy",
    "plan.policy_parameters",
    "plan.in_flight",
    "unseen_reads",
    "split_compiled",
    "local.evaluate",
    "local.evaluate_batch",
    "watch",
)


_CALLS = "comparing the ranks' calls of attach (each rank has to make one)"
_Call = tuple[str, dict[str, Any], list[int], Place]


def check_same_call(group: Group, mode: str, options: Options, stages: Sequence[Stage] = ()) -> list[Place]:
    """Raises on every rank if they call attach in different ways. Returns every rank's place, which is in the same
    message. Collective.

    ``group``: of the callers, since gradcast's own cannot be made if a rank has left already.
    """
    everyone = group.gather(_call(mode, options, stages), _CALLS)
    _check_same(everyone)
    return [place for *_, place in everyone]


def check_same_restart(group: Group, mode: str, options: Options) -> None:
    """Repeats ``check_same_call`` during training: uses no process group. Collective."""
    _check_same(group.gather(_call(mode, options), beside_blocks=True))


def _call(mode: str, options: Options, stages: Sequence[Stage] = ()) -> _Call:
    return mode, _settings(options), [stage.index for stage in stages], own_place()


def _settings(group: Any, prefix: str = "") -> dict[str, Any]:
    """The settings by name, such as "clip.norm"."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(group):
        name, value = prefix + each.name, getattr(group, each.name)
        if name not in _MAY_DIFFER:
            found |= _settings(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def _check_same(everyone: Sequence[_Call]) -> None:
    first_mode, first_settings, first_stages, _ = everyone[0]
    for rank, (other_mode, other_settings, other_stages, _) in enumerate(everyone):
        if other_mode != first_mode:
            raise refused(
                f"rank 0 attaches in {first_mode} mode, rank {rank} in {other_mode} mode; give all ranks an "
                "optimizer, or none"
            )
        if other_stages != first_stages:
            raise refused(
                f"rank 0 has the stages {first_stages} of a pipeline, rank {rank} has {other_stages}; give attach the "
                "ranks with the same stages as process_group"
            )
        for name, value in first_settings.items():
            if other_settings[name] != value:
                raise refused(
                    f"options.{name} is {value} on rank 0 and {other_settings[name]} on rank {rank}; "
                    "give all ranks the same"
                )


def copy_model_from_first(group: Group, module: nn.Module, options: Options) -> None:
    """Copies rank 0's parameters and, unless the options exclude them, buffers to every rank. Collective."""
    buffers = module.buffers() if options.broadcast_buffers else ()
    group.copy_from_first([*module.parameters(), *buffers], "the module's parameters and buffers")


def check_same_model(group: Group, module: nn.Module) -> None:
    """Raises on every rank, naming the first difference between rank 0's model and another's. Collective."""

    def own() -> list[str]:
        found = [_features(name if p.requires_grad else f"frozen {name}", p) for name, p in module.named_parameters()]
        return found + [_features(f"buffer {name}", b) for name, b in module.named_buffers()]

    everyone = group.computed_by_each(own, "comparing the ranks' models")
    for rank, theirs in enumerate(everyone):
        for ours, other in itertools.zip_longest(everyone[0], theirs, fillvalue="nothing more"):
            if ours != other:
                raise refused(f"the model differs between ranks: rank 0 has {ours}, rank {rank} has {other}")


def _features(name: str, tensor: torch.Tensor) -> str:
    """Features that must be the same on all ranks. Gradients are summed as they lie in memory, so strides count, except
    those of dimensions of size 1."""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    part: Any = tensor
    placed = f", placed as {part.placements}" if is_part(tensor) else ""
    return f"{name} of shape {tuple(tensor.shape)}, type {tensor.dtype} and strides {strides}{placed}"
