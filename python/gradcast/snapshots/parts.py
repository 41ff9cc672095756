"""The parts of a snapshot, checked before any of them is put into a training."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.snapshots import store
from gradcast.snapshots.files import DamageError, require_fields
from gradcast.snapshots.reading import Reading
from gradcast.snapshots.state import extra_state, group_names, model_tensors
from gradcast.snapshots.store import Path_
from gradcast.training.ranks.group import Group
from gradcast.training.state import TrainingState


@dataclasses.dataclass
class Training:
    """The arguments of ``resume``. ``module``: the only one of ``modules``, without wrappers, or all. ``local``: with
    local steps."""

    modules: list[nn.Module]
    module: nn.Module
    optimizers: list[Optimizer]
    loader: Any
    extra: dict[str, Any]
    local: TrainingState | None


@dataclasses.dataclass
class Saved:
    """The objects of a snapshot. ``common``: for all ranks. ``own``: for this one."""

    common: dict[str, Any]
    own: dict[str, Any]


def saved_in(reading: Reading, rank: int) -> Saved:
    """Returns the objects for ``rank``, which continues the rank of that number; where there were fewer, from the first
    one again. Afterwards ``reading`` has that rank's tensors. Raises Error(invalid_use)."""
    number = rank % reading.world_size
    file = store.file_of(number)
    try:
        own = reading.object(file)
        require_fields(file, own, random=dict, plan=dict, loader=object)
        if reading.is_local:
            require_fields(file, own, common=dict)
            reading.enter(store.local_path(number))
        else:
            file = store.COMMON
        common = own["common"] if reading.is_local else reading.object(file)
        kinds = {"has_loader": bool, "is_global": bool, "optimizers": list, "model": dict, "extra": dict}
        require_fields(file, common, **kinds)
        for place, each in enumerate(common["optimizers"]):
            where = f"{file}: optimizers[{place}]"
            require_fields(where, each, kind=str, names=list, groups=list, scalars=dict, on_host=dict, others=dict)
            names = {name for group in each["names"] for name in group}
            if not names == set(each["scalars"]) == set(each["on_host"]) or len(each["groups"]) != len(each["names"]):
                raise DamageError(f"{where}: names are not those of scalars, on_host and groups")
    except DamageError as damage:
        raise refused(f"the snapshot {reading.place} cannot be used: {damage}") from None
    return Saved(common, own)


def difference(reading: Reading, common: dict[str, Any], training: Training, group: Group) -> str | None:
    """Returns the first difference between the snapshot's training and this one. Raises Error(invalid_use)."""
    module, optimizers, loader, extra = training.module, training.optimizers, training.loader, training.extra
    if reading.is_local and training.local is None:
        raise refused("it is of local steps; call gradcast.attach() with options.local before gradcast.resume()")
    if not reading.is_local and training.local is not None:
        raise refused("it is of a training without local steps; omit options.local, or name another folder")
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in model_tensors(module).items()}
    tensors = {path: reading.tensors[path] for path in reading.paths if path[0] == "model"}
    saved = {path[1]: (each.shape, each.dtype) for path, each in tensors.items()}
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            return f"{name} is {_described(own.get(name))} in the model and {_described(saved.get(name))} in it"
    extra_states = sorted(extra_state(module))
    if extra_states != sorted(common["model"]):
        return f"the model has the extra state {extra_states}, and it is of {sorted(common['model'])}"
    if len(optimizers) != len(common["optimizers"]):
        return f"{len(optimizers)} optimizers are given, and it is of {len(common['optimizers'])}"
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = group_names(optimizers, names)
    for each, mine, theirs in zip(optimizers, groups, common["optimizers"], strict=True):
        if type(each).__name__ != theirs["kind"]:
            return f"the optimizer is a {type(each).__name__}, and it is of a {theirs['kind']}"
        if len(mine) != len(theirs["names"]):
            return f"the optimizer has {len(mine)} parameter groups, and it has {len(theirs['names'])}"
        for number, (here, there) in enumerate(zip(mine, theirs["names"], strict=True)):
            if here != there:
                first = next((n for n in [*here, *there] if (n in here) != (n in there)), "the order")
                return f"group {number} of the optimizer has other parameters ({first})"
    for what, ours, its in (
        ("loader", loader is not None, common["has_loader"]),
        ("extra", sorted(extra), sorted(common["extra"])),
    ):
        if ours != its:
            return f"resume() is given {what}={ours}, and it was taken with {what}={its}"
    workers = group.world_size
    if workers != reading.world_size and not common["is_global"]:
        return f"the place of its loader is of {reading.world_size} workers, and these are {workers}"
    return None


def _described(value: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if value is None else f"{tuple(value[0])} in {value[1]}"


def optimizer_state(
    tensors: dict[Path_, torch.Tensor], common: dict[str, Any], number: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The state dict of an optimizer, in host memory, and the state in it by parameter. ``common``: the snapshot's part
    of it besides tensors."""
    entries: dict[str, dict[str, Any]] = {name: dict(each) for name, each in common["scalars"].items()}
    for path, tensor in tensors.items():
        if path[:2] == ("optimizer", str(number)):
            _, _, name, key = path
            entries[name][key] = tensor
    order = [name for group in common["names"] for name in group]
    index = {name: place for place, name in enumerate(order)}
    groups = [
        group | {"params": [index[name] for name in names]}
        for group, names in zip(common["groups"], common["names"], strict=True)
    ]
    state = {index[name]: entry for name, entry in entries.items() if entry}
    return {"state": state | common["others"], "param_groups": groups}, entries


def tensors_of_rounds(reading: Reading) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that a state of local steps holds beside the model's: by kind and name."""
    found: dict[str, dict[str, torch.Tensor]] = {"values": {}, "momentum": {}, "local": {}}
    for path, each in reading.tensors.items():
        if path[0] in found:
            found[path[0]][path[1]] = each
    return found
