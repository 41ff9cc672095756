"""FSDP2's groups of parameters (``fully_shard``, ``replicate``), whose all-reduce over replicas gradcast takes over.

This file alone knows private names of torch.distributed.fsdp and of DTensor, those of torch 2.11 and 2.15;
``groups_of`` refuses others. A group whose mesh has a dimension of replicas is given a mesh without it. FSDP then stops
behind its reduce-scatter: ``.grad`` is the mean over the shards on this replica. Parameters and placements stay as they
are.
"""

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gradcast.errors import refused

_PRIVATE = frozenset({
    "fsdp_params", "mesh_info", "post_forward_mesh_info", "all_reduce_grads", "reduce_grads", "gradient_divide_factor",
    "post_backward", "unshard", "wait_for_unshard", "is_unsharded", "offload_policy", "device_handle", "comm_ctx",
    "_all_gather_result", "_all_reduce_hook", "_partial_reduce_output",
})  # fmt: skip
# A group of torch 2.11 has none of these, one of 2.15 all.
_LATER = frozenset({"_get_partial_reduce_grad", "_get_reduce_dtype", "_post_backward_pending", "_reset_iter_state"})


class Reduced(NamedTuple):
    """A parameter whose ``.grad`` is the sharded gradient of one backward pass. ``earlier``: what it was before."""

    parameter: nn.Parameter
    earlier: torch.Tensor | None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, also of one that is pending; any other tensor itself."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return tensor
    return module.DTensor._local_tensor.__get__(tensor)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a DTensor, collective over its mesh; any other tensor itself."""
    whole: Any = tensor
    return tensor if local_of(tensor) is tensor else whole.full_tensor()


def is_part(tensor: torch.Tensor) -> bool:
    """Returns whether it is a DTensor, of which this rank has a part."""
    return local_of(tensor) is not tensor


def has_parts(module: nn.Module) -> bool:
    """Returns whether the module has parameters of which this rank has a part: FSDP's, or tensor-parallel ones."""
    return any(map(is_part, module.parameters()))


def mesh_groups(tensors: Iterable[Any]) -> list[Any]:
    """The process groups of the meshes of DTensors."""
    meshes = {id(each.device_mesh): each.device_mesh for each in tensors if is_part(each)}
    return [group for mesh in meshes.values() for group in mesh.get_all_groups()]


def is_sharded(module: nn.Module) -> bool:
    """Returns whether fully_shard() or replicate() manages a part of the module."""
    return bool(_sharded_modules(module))


def _sharded_modules(module: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before the program has imported it
    return [] if fsdp is None else [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]


def groups_of(module: nn.Module) -> "list[ShardGroup]":
    """Raises Error(invalid_use) for a torch whose groups gradcast does not know."""
    found: dict[int, Any] = {}
    for each in _sharded_modules(module):
        state = each._get_fsdp_state()
        # torch 2.11 has one group or none, later versions have several.
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        found |= {id(group): group for group in groups if group is not None}
    for group in found.values():
        names = _PRIVATE | _LATER if any(hasattr(group, name) for name in _LATER) else _PRIVATE
        missing = sorted(name for name in names if not hasattr(group, name))
        if missing:
            raise refused(
                f"the FSDP of torch {torch.__version__} has no {missing[0]} in its parameter groups, so gradcast does "
                "not know it; use a version that gradcast's documentation names, or train without gradcast"
            )
    return [ShardGroup(group) for group in found.values()]


class ShardGroup:
    """One group of parameters, which FSDP gathers and reduce-scatters together. ``replicas``: the process group of the
    mesh's dimension of replicas, ``shards``: of that of shards; None if it has none."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._mesh_infos = group.mesh_info, group.post_forward_mesh_info
        self.replicas: Any = getattr(group.mesh_info, "replicate_process_group", None)
        self.shards: Any = getattr(group.mesh_info, "shard_process_group", None)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Sharded, frozen ones included."""
        return [each.sharded_param for each in self._group.fsdp_params]

    @property
    def all_reduces(self) -> bool:
        """False where the program keeps a pass's gradients on their replica, for a later pass
        (set_requires_all_reduce)."""
        return self._group.all_reduce_grads

    @property
    def averages(self) -> bool:
        """False where the program gives the divisor (set_gradient_divide_factor), and replicas are summed."""
        return self._group.gradient_divide_factor is None

    @property
    def shard_count(self) -> int:
        return getattr(self._group.mesh_info, "shard_mesh_size", 1)

    @property
    def part_count(self) -> int:
        """The number of ranks that hold parts of its parameters: shards, times those of tensor parallelism."""
        meshes: list[Any] = [each for each in self.parameters if is_part(each)]
        replicas = 1 if self.replicas is None else self.replicas.size()
        return max([self.shard_count, *(each.device_mesh.size() // replicas for each in meshes)])

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        """The type that gradients are reduced in; None for that of the parameters. Where the program names none, torch
        2.11 reduces in the type that computes, later versions in that of the parameters."""
        policy = self._group.fsdp_params[0].mp_policy
        return policy.reduce_dtype or (None if hasattr(self._group, "_get_reduce_dtype") else policy.param_dtype)

    def reason_against(self) -> str | None:
        """Returns why gradcast cannot reduce this group, and what to do; None if it can."""
        group, (info, after_forward) = self._group, self._mesh_infos
        own = {each.dtype for each in self.parameters if each.requires_grad}
        reduced = self._reduce_dtype
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            return "its parameters are offloaded to the CPU; omit offload_policy"
        if group._all_reduce_hook is not None:
            return "it has an all-reduce hook; omit set_all_reduce_hook()"
        if group._partial_reduce_output is not None:
            return "it holds gradients that have not been all-reduced; attach between steps"
        if any(each.requires_grad and each.grad_dtype != each.dtype for each in self.parameters):
            return "its parameters have gradients of another type; omit grad_dtype"
        if torch.float16 in (own if reduced is None else {reduced}):
            return "its gradients are reduced in fp16; give MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        if len(own) > 1:
            return "its parameters have different types; shard those of each type by themselves"
        if reduced is not None and any(reduced.itemsize > each.itemsize for each in own):
            return (
                f"its gradients are reduced in {reduced}, but cast to {min(map(str, own))} before they reach gradcast; "
                f"keep the parameters in {reduced} (param_dtype computes in another type), or omit reduce_dtype"
            )
        if reduced is not None and any(reduced.itemsize < each.itemsize for each in own):
            return (
                f"its gradients are reduced in {reduced}, but cast to {min(map(str, own))} before they reach gradcast; "
                "give MixedPrecisionPolicy(reduce_dtype=torch.float32), and gradcast.Options(wire='bf16') to send half "
                "the bytes between replicas"
            )
        if after_forward is not None and after_forward != info:
            return "reshard_after_forward is a number, which gradcast does not support; give True or False"
        return None

    def take_over(
        self,
        before_read: Callable[["ShardGroup"], None],
        on_reduced: Callable[["ShardGroup", list[Reduced]], None],
        kept: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Ends FSDP's own all-reduce, until ``remove``.

        ``before_read`` is called before parameters are gathered (prefetches included) or, if there is nothing to
        gather, used. ``on_reduced`` is called where a backward pass has reduce-scattered gradients, on the stream that
        writes them. ``kept``: the sums of passes that were not all-reduced. Wherever torch 2.15 comes to the end of a
        group, it reduces a zero for a parameter that has such a sum and no new gradient; torch 2.11 waits for the next
        gradient.
        """
        group = self._group
        if self.replicas is not None:
            group.mesh_info = _without_replicas(group.mesh_info)
            if group.post_forward_mesh_info is not None:
                group.post_forward_mesh_info = group.mesh_info
        self._before_read, self._on_reduced = before_read, on_reduced
        self._reader = "unshard" if self.shard_count > 1 else "wait_for_unshard"
        setattr(group, self._reader, functools.partial(self._read, getattr(group, self._reader)))
        group.post_backward = functools.partial(self._reduce, group.post_backward)
        if hasattr(group, "_get_partial_reduce_grad"):
            group._get_partial_reduce_grad = lambda each: kept.get(each.sharded_param)
            group._reset_iter_state = _refuse_reset

    def remove(self) -> None:
        """Gives the all-reduce back to FSDP."""
        group, (info, after_forward) = self._group, self._mesh_infos
        group.mesh_info = info
        if group.post_forward_mesh_info is not None:  # else FSDP has found since that this is the root
            group.post_forward_mesh_info = after_forward
        for name in (self._reader, "post_backward", "_get_partial_reduce_grad", "_reset_iter_state"):
            vars(group).pop(name, None)
        del self._before_read, self._on_reduced

    def _read(self, own: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        group = self._group
        is_begun = group._all_gather_result is not None
        if not group.is_unsharded and is_begun == (self._reader == "wait_for_unshard"):
            self._before_read(self)
            self._order_gathers()
        return own(*arguments, **named)

    def _order_gathers(self) -> None:
        """On a device, orders FSDP's streams, which copy and gather, behind updates on the current one."""
        if self._group.device.type == "cpu":
            return
        here = self._group.device_handle.current_stream()
        for name in ("all_gather_copy_in_stream", "all_gather_stream"):  # made in the first forward pass
            if hasattr(self._group.comm_ctx, name):
                getattr(self._group.comm_ctx, name).wait_stream(here)

    def _reduce(self, own: Callable[..., Any], *arguments: Any) -> None:
        """FSDP's post_backward(), with this pass's gradients separate from earlier ones."""
        group = self._group
        if not group.reduce_grads:
            own(*arguments)
            return
        earlier = [Reduced(each, each.grad) for each in self.parameters]
        for each in earlier:
            each.parameter.grad = None
        reduced: list[Reduced] = []
        try:
            own(*arguments)
        finally:
            for each in earlier:
                if each.parameter.grad is not None:
                    reduced.append(each)
                else:
                    each.parameter.grad = each.earlier
        if reduced:
            with self._writing_stream():
                self._on_reduced(self, reduced)

    def _writing_stream(self) -> contextlib.AbstractContextManager[Any]:
        group = self._group
        if group.device.type == "cpu":
            return contextlib.nullcontext()
        return group.device_handle.stream(group.comm_ctx.reduce_scatter_stream)


def _refuse_reset() -> None:
    raise refused(
        "reset_iter_state() would leave gradcast with gradients of the failed pass; end the program, and go on from a "
        "checkpoint"
    )


def _without_replicas(info: Any) -> Any:
    """The same mesh, of which FSDP reduces over the shards only."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

    own = copy.copy(info)
    own.__class__ = FSDPMeshInfo if isinstance(info, FSDPMeshInfo) else DataParallelMeshInfo
    return own


def the_replicas(groups: Sequence[ShardGroup], given: Any) -> Any:
    """The process group of the replicas of all groups. ``given``: that of attach, for a mesh without replicas."""
    found = {id(each.replicas): each.replicas for each in groups}
    if len(found) > 1:
        raise refused(
            "parts of the module have different replicas (their meshes differ); shard them with one mesh, or attach to "
            "each part by itself"
        )
    (own,) = found.values()
    if own is not None and given is not None and given is not own:
        raise refused("process_group is not the group of the mesh's replicas; omit it")
    if own is None and given is None:
        raise refused(
            "the module has no replicas, and gradcast sends gradients between replicas only; give fully_shard() a mesh "
            "of two dimensions (replicas, shards), or give attach your replicas' process group, process_group="
        )
    replicas = given if own is None else own
    if replicas.size() == 1:
        raise refused(
            "the module has one replica, and gradcast sends gradients between replicas; train without gradcast"
        )
    return replicas


def the_shards(groups: Sequence[ShardGroup]) -> Any:
    """The process group of the shards of all groups; None if each rank has whole parameters."""
    found = {id(each.shards): each.shards for each in groups if each.shard_count > 1}
    if len(found) > 1:
        raise refused(
            "parts of the module have different shards (their meshes differ); shard them with one mesh, or attach to "
            "each part by itself"
        )
    return next(iter(found.values()), None)
