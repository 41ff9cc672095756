"""Goes on from the newest snapshot of a folder."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.random_state import restore_random_state
from gradcast.snapshots import store
from gradcast.snapshots.state import (
    COMMON,
    VERSION,
    by_name,
    from_bytes,
    group_names,
    local_path,
    model_tensors,
    own_path,
)
from gradcast.training.acceptance import unwrapped, unwrapped_optimizer
from gradcast.training.attached_modules import attached_to
from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.local.session import LocalStepsSession
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.kinds import TrainingSession, require_attached

_PIECE_BYTES = 4 << 20


@dataclasses.dataclass
class Resumed:
    """``plan``: for handle.load_state_dict(). ``module``: refers to the one
    that has taken the snapshots; None for the one that resume() was given."""

    step: int
    plan: dict[str, Any] | None = None
    module: Callable[[], nn.Module | None] | None = None


# By folder, what this process has resumed or has taken itself: handle.snapshots() goes on from there.
resumed: dict[Path, Resumed] = {}


def resume(
    folder: str | Path,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> int | None:
    """Puts a training into the state of the newest complete snapshot in ``folder``. Returns its step, or None if there
    is none. Call it on every rank that trains the model, before or after ``attach``, and before ``handle.snapshots``.
    Before ``attach``, all workers of the program call it. With local steps it comes after ``attach``.

    ``model``, ``optimizer``: as for ``attach``, in the form that the snapshot was taken of. ``loader``, ``extra``: as
    for ``handle.snapshots``. Random states are set now, and once more where the first training forward pass begins, so
    that making the loader's iterator changes nothing; with another number of workers they are left alone. Where hosts
    keep parts of their own, they send each other what they lack.

    Raises Error(invalid_use) on every rank, with the first difference, if the snapshot is of another model or optimizer
    or not whole, or was taken inside a round of local steps of another number of ranks, before anything is changed.
    """
    folder, extra = Path(folder).resolve(), by_name(extra)
    session = _session_of(model[0] if isinstance(model, list | tuple) else model)
    group = _workers() if session is None or session.group.own is None else session.group
    step = _newest_step(folder, group)
    if step is None:
        return None
    reading = _complete(step, folder, group)
    modules = list(model) if isinstance(model, list | tuple) else [model]
    module = unwrapped(modules[0]) if modules == [model] else nn.ModuleList(modules)
    given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    optimizers = [unwrapped_optimizer(each) for each in given]
    common, own = _objects(reading, group, step, folder)
    rounds, local = None, session if isinstance(session, LocalStepsSession) else None
    failure = None
    try:
        difference = _difference(reading, common, module, optimizers, loader, extra, group, local)
        if difference is not None:
            difference += "; resume with the model and optimizer that it was taken of, or name another folder"
        else:  # all is read before anything is changed: damage may be one rank's alone
            values = reading.tensors(path for path in reading.contents if path[0] == "model")
            states = [optimizer_state(reading, each, number) for number, each in enumerate(common["optimizers"])]
            if local is not None:
                rounds = own["plan"] | {"tensors": _tensors_of_rounds(reading)}
                local.check(rounds)
    except Error as error:
        difference = str(error)
    except Exception as error:  # of damaged bytes: anything
        difference, failure = None, f"rank {group.rank} cannot read it ({type(error).__name__}: {error})"
    _gather_or_refuse(group, None, failure, step, folder)
    difference = next((each for each in group.gather(difference) if each is not None), None)
    if difference is not None:
        raise refused(f"the snapshot of step {step} in {folder} does not fit: {difference}")
    if loader is not None:  # first, since it may be of other data and refuse this
        loader.load_state_dict(own["loader"])
    for name, tensor in model_tensors(module).items():
        tensor.detach().copy_(values["model", name])
    for name, value in common["model"].items():
        module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    for number, each in enumerate(optimizers):
        _restore_optimizer(*states[number], common["optimizers"][number], module, each)
    for name, state in common["extra"].items():
        extra[name].load_state_dict(state)
    if local is not None:
        local.load_state_dict(rounds)
    if group.world_size == common["world_size"]:
        restore_random_states(own["random"], modules, next(module.parameters()).device)
    resumed[folder] = Resumed(step, None if local is not None else own["plan"])
    return step


def _session_of(module: nn.Module) -> TrainingSession | None:
    """That of a module to which gradcast is attached. Nothing of it is in flight then."""
    attached = attached_to(module)
    if attached is None:
        return None
    require_attached(attached.session)
    attached.session.flush()
    return attached.session


def _workers() -> Group:
    is_distributed = dist.is_available() and dist.is_initialized()
    return Group(dist.get_rank(), dist.get_world_size(), own=dist.group.WORLD) if is_distributed else Group(0, 1)


def _newest_step(folder: Path, group: Group) -> int | None:
    """The newest step of which all ranks see a complete snapshot; None if no rank sees any, or only a first one that
    was not complete on all. Raises Error(invalid_use)."""
    answers = group.gather((store.complete_steps(folder), store.unfinished_steps(folder)))
    seen, unfinished = zip(*answers, strict=True)
    common = set(seen[0]).intersection(*seen)
    if common:
        return max(common)
    for rank, steps in enumerate(seen):
        # Where all ranks have had a snapshot before, each still has one.
        other = next(
            (each for each in range(len(seen)) if steps and steps[-1] not in seen[each] + unfinished[each]), None
        )
        if other is not None:
            raise refused(
                f"rank {rank} sees a snapshot of step {steps[-1]} in {folder}, and rank {other} does not; start on the "
                "hosts that have taken it, or copy the folder, or name an empty one to begin anew"
            )
    resumed[folder] = Resumed(0)
    return None


def _complete(step: int, folder: Path, group: Group) -> store.Reading:
    """Opens the snapshot, after files that a rank lacks were sent from one that has them. Raises Error(invalid_use) on
    every rank if nobody has one, or one cannot be written. Collective."""
    reading, own, failure = None, None, None
    try:
        reading = store.Reading(store.place_of(folder, step))
        own = reading.missing(reading.contents), reading.missing(_read_by(group.rank, reading))
    except Exception as error:  # of unpickling: anything
        failure = f".metadata cannot be read ({type(error).__name__}: {error})"
    missing, lacking = zip(*_gather_or_refuse(group, own, failure, step, folder), strict=True)
    for name in sorted(set().union(*lacking)):
        sender = next((each for each, names in enumerate(missing) if name not in names), None)
        if sender is None:
            _gather_or_refuse(group, None, f"{name} is cut off or not there", step, folder)
        failure = _send(reading, group, name, sender, lacking)
        _gather_or_refuse(group, None, failure, step, folder)
    return reading


def _read_by(rank: int, reading: store.Reading) -> list[store.Path_]:
    """The paths of what this rank reads: with local steps, of other ranks' states nothing."""
    ranks = sum(path[0] == own_path(0)[0] for path in reading.contents)
    is_local = any(path[0] == local_path(0)[0] for path in reading.contents)
    own = (own_path(rank % ranks), local_path(rank % ranks), COMMON)
    return [path for path in reading.contents if not is_local or path[:2] in own]


def _send(reading: store.Reading, group: Group, name: str, sender: int, lacking: Sequence[Sequence[str]]) -> str | None:
    """Copies a file from one rank to those that lack it. Returns why this rank has failed, if so. Collective."""
    rank, failure, offset = group.rank, None, 0
    file = reading.place / name
    new = file.with_name(f"{name}.{os.getpid()}")  # ranks of a host may write the same one at once
    while True:
        piece = b""
        try:
            if rank == sender:
                with file.open("rb") as stream:
                    stream.seek(offset)
                    piece = stream.read(_PIECE_BYTES)
        except OSError as error:
            failure = f"rank {rank} cannot read {name} ({error})"
        piece = group.gather(piece)[sender]
        try:
            if piece and name in lacking[rank] and failure is None:
                with new.open("ab" if offset else "wb") as stream:
                    stream.write(piece)
            elif name in lacking[rank] and failure is None:
                new.replace(file)
        except OSError as error:
            failure = f"rank {rank} cannot write {name} ({error})"
        if not piece:
            return failure
        offset += len(piece)


def _objects(reading: store.Reading, group: Group, step: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the snapshot holds besides tensors: for all ranks, and for this one, which goes on as the rank of that
    number did; where there were fewer, from the first one again. From here on ``reading`` has that rank's tensors.
    Raises Error(invalid_use), on every rank, if one cannot read it. Collective."""
    common, own, failure = {}, {}, None
    try:
        common = from_bytes(reading.object(COMMON))
        rank = group.rank % common["world_size"]
        own = from_bytes(reading.object(own_path(rank)))
        if common.get("is_local", False):
            common = own["common"]
            reading.enter(local_path(rank))
    except Exception as error:  # of unpickling: anything
        failure = f"rank {group.rank} cannot read it ({type(error).__name__}: {error})"
    _gather_or_refuse(group, None, failure, step, folder)
    return common, own


def _tensors_of_rounds(reading: store.Reading) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that a state of local steps holds beside the model's: by kind and name."""
    found: dict[str, dict[str, torch.Tensor]] = {"values": {}, "momentum": {}, "local": {}}
    for (what, name), each in reading.tensors(path for path in reading.contents if path[0] in found).items():
        found[what][name] = each
    return found


def _gather_or_refuse(group: Group, value: Any, failure: str | None, step: int, folder: Path) -> list[Any]:
    """Every rank's value, unless one has failed. Collective."""
    answers = group.gather((value, failure))
    first = next((each for _, each in answers if each is not None), None)
    if first is not None:
        raise refused(
            f"the snapshot of step {step} in {folder} is not whole: {first}; delete the folder step-{step} to go on "
            "from the one before"
        )
    return [each for each, _ in answers]


def restore_random_states(state: dict[str, Any], modules: Sequence[nn.Module], device: torch.device) -> None:
    """Now, and once more where the first training forward pass of one of ``modules`` begins."""
    restore_random_state(state, device)
    hooks: list[Any] = []

    def before_forward(_module: nn.Module, _inputs: Any, _compiled: bool) -> None:
        if hooks and torch.is_grad_enabled():
            restore_random_state(state, device)
            while hooks:
                hooks.pop().remove()

    hooks += [each.register_forward_pre_hook(UncopiedHook(before_forward)) for each in modules]


def _difference(
    reading: store.Reading,
    common: dict[str, Any],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    loader: Any,
    extra: Mapping[str, Any],
    group: Group,
    local: LocalStepsSession | None,
) -> str | None:
    if common["version"] != VERSION:
        return f"its format has the version {common['version']}, and this gradcast reads {VERSION}"
    is_local = common.get("is_local", False)
    if is_local and local is None:
        raise refused("it is of local steps; call gradcast.attach() with options.sync_every before gradcast.resume()")
    if not is_local and local is not None:
        raise refused("it is of a training without local steps; leave options.sync_every out, or name another folder")
    own = {name: (tensor.shape, tensor.dtype) for name, tensor in model_tensors(module).items()}
    saved = {path[1]: value for path, value in reading.contents.items() if path[0] == "model"}
    for name in [*own, *saved]:
        if own.get(name) != saved.get(name):
            return f"{name} is {_described(own.get(name))} in the model and {_described(saved.get(name))} in it"
    extra_state = sorted(name for name in module.state_dict(keep_vars=True) if name.endswith("_extra_state"))
    if extra_state != sorted(common["model"]):
        return f"the model has the extra state {extra_state}, and it is of {sorted(common['model'])}"
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
    for what, mine, theirs in (
        ("loader", loader is not None, common["has_loader"]),
        ("extra", sorted(extra), sorted(common["extra"])),
    ):
        if mine != theirs:
            return f"resume() is given {what}={mine}, and it was taken with {what}={theirs}"
    workers = group.world_size
    if workers != common["world_size"] and not common["is_global"]:
        return f"the place of its loader is of {common['world_size']} workers, and these are {workers}"
    return None


def _described(value: tuple[torch.Size, torch.dtype] | None) -> str:
    return "missing" if value is None else f"{tuple(value[0])} in {value[1]}"


def optimizer_state(
    reading: store.Reading, common: dict[str, Any], number: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The state dict of an optimizer, in host memory, and by parameter the state in it. ``common``: what the snapshot
    holds of it besides tensors."""
    contents = reading.contents.items()
    paths = [path for path, value in contents if path[:2] == ("optimizer", str(number)) and value is not None]
    tensors = reading.tensors(paths)
    entries: dict[str, dict[str, Any]] = {name: dict(each) for name, each in common["scalars"].items()}
    for (_, _, name, key), tensor in tensors.items():
        entries[name][key] = tensor
    order = [name for group in common["names"] for name in group]
    index = {name: place for place, name in enumerate(order)}
    groups = [
        group | {"params": [index[name] for name in names]}
        for group, names in zip(common["groups"], common["names"], strict=True)
    ]
    state = {index[name]: entry for name, entry in entries.items() if entry}
    return {"state": state | common["others"], "param_groups": groups}, entries


def _restore_optimizer(
    state: dict[str, Any],
    entries: dict[str, dict[str, Any]],
    common: dict[str, Any],
    module: nn.Module,
    optimizer: Optimizer,
) -> None:
    """``state``, ``entries``: see optimizer_state."""
    parameters = dict(module.named_parameters())
    for name, entry in entries.items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and key not in common["on_host"][name]:
                entry[key] = value.to(parameters[name].device)
    optimizer.load_state_dict(state)
    # load_state_dict() gives state the type of its parameter, which would round fp32 state of bf16 parameters.
    for name, entry in entries.items():
        for key, value in entry.items():
            held = optimizer.state[parameters[name]]
            if isinstance(value, torch.Tensor) and held[key].dtype != value.dtype:
                held[key] = value
