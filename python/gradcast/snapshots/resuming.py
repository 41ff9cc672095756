"""Resuming from the newest snapshot of a folder."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.random_state import require_random_state, restore_random_state
from gradcast.snapshots import store
from gradcast.snapshots.newest import newest_whole, on_every_rank
from gradcast.snapshots.parts import Saved, Training, difference, optimizer_state, saved_in, tensors_of_rounds
from gradcast.snapshots.reading import Reading
from gradcast.snapshots.state import by_name, model_tensors, optimizers_in
from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.compat.wrappers import unwrapped
from gradcast.training.ranks.group import Group
from gradcast.training.state import TrainingState


@dataclasses.dataclass
class Resumed:
    """``plan``: for handle.load_state_dict(). ``module``: refers to the one that has taken the snapshots; None for the
    one that resume() was given. ``damaged``: steps of newer snapshots that are not whole."""

    step: int
    plan: dict[str, Any] | None = None
    module: Callable[[], nn.Module | None] | None = None
    damaged: Sequence[int] = ()


# By folder, what this process has resumed or has taken itself: handle.snapshots() goes on from there.
resumed: dict[Path, Resumed] = {}


def resume(
    folder: str | Path,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> int | None:
    """Puts a training into the state of the newest snapshot in ``folder`` that is whole on all ranks; the log names
    newer ones that are not. Returns its step, or None if there is no snapshot. Call it on every rank that trains the
    model, before or after ``attach``, and before ``handle.snapshots``. Before ``attach``, all workers of the program
    call it. With local steps it comes after ``attach``.

    ``model``, ``optimizer``: as for ``attach``, in the form that the snapshot was taken of. ``loader``, ``extra``: as
    for ``handle.snapshots``. Random states are set now, and once more where the first training forward pass begins, so
    that making the loader's iterator changes nothing; with another number of workers they are left alone. Where hosts
    keep parts of their own, they send each other what they lack.

    Raises Error(invalid_use) on every rank before anything is changed: if no snapshot is whole; with the first
    difference, if the snapshot is of another model or optimizer, or was taken inside a round of local steps of another
    number of ranks; if the folder is none, or of another program. If ``load_state_dict`` of ``loader`` or of an object
    in ``extra`` raises, model and optimizer are as before.
    """
    attached = _attached_to(model)
    group = _workers() if attached is None or attached.group.own is None else attached.group
    folder = on_every_rank(group, lambda: store.folder_of(folder))
    training = on_every_rank(group, lambda: _training_of(model, optimizer, loader, extra, attached))
    reading, damaged = newest_whole(folder, group)
    if reading is None:
        resumed[folder] = Resumed(0)
        return None
    saved = on_every_rank(group, lambda: saved_in(reading, group.rank))
    ready = on_every_rank(group, lambda: _checked(reading, saved, training, group, folder))
    on_every_rank(group, lambda: _restore_objects(saved, training, group.rank, reading.step))
    on_every_rank(group, lambda: _restore(reading, saved, training, ready))
    if training.local is not None and ready.rounds is not None:
        training.local.load(ready.rounds)
    if group.world_size == reading.world_size:
        device = next(training.module.parameters()).device
        restore_random_states(saved.own["random"], training.modules, device)
    plan = None if training.local is not None else saved.own["plan"]
    resumed[folder] = Resumed(reading.step, plan, damaged=damaged)
    return reading.step


def _attached_to(model: Any) -> TrainingState | None:
    first = model[0] if isinstance(model, list | tuple) and model else model
    return TrainingState.of_module(first) if isinstance(first, nn.Module) else None


def _workers() -> Group:
    is_distributed = dist.is_available() and dist.is_initialized()
    return Group(dist.get_rank(), dist.get_world_size(), own=dist.group.WORLD) if is_distributed else Group(0, 1)


def _training_of(model: Any, optimizer: Any, loader: Any, extra: Any, attached: TrainingState | None) -> Training:
    modules = list(model) if isinstance(model, list | tuple) else [model]
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise refused(f"{model!r:.60} is no module; give the model of the training")
    module = unwrapped(modules[0]) if modules == [model] else nn.ModuleList(modules)
    local = attached if attached is not None and attached.session.mode == "local" else None
    return Training(modules, module, optimizers_in(optimizer), loader, by_name(extra), local)


@dataclasses.dataclass
class _Ready:
    """States to restore. ``optimizers``: see optimizer_state. ``rounds``: of local steps, None without."""

    optimizers: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]]
    rounds: dict[str, Any] | None = None


def _checked(reading: Reading, saved: Saved, training: Training, group: Group, folder: Path) -> _Ready:
    """Returns checked states, and changes nothing yet. Raises Error(invalid_use)."""
    try:
        first = difference(reading, saved.common, training, group)
        if first is not None:
            raise refused(f"{first}; resume with the model and optimizer that it was taken of, or name another folder")
        if group.world_size == reading.world_size:
            require_random_state(saved.own["random"])
        each = enumerate(saved.common["optimizers"])
        ready = _Ready([optimizer_state(reading.tensors, state, number) for number, state in each])
        if training.local is not None:
            ready.rounds = saved.own["plan"] | {"tensors": tensors_of_rounds(reading)}
            training.local.session.checkpoint.check(ready.rounds)
        return ready
    except Error as error:
        raise refused(f"the snapshot of step {reading.step} in {folder} does not fit: {error}") from None


def _restore_objects(saved: Saved, training: Training, rank: int, step: int) -> None:
    """Restores the program's own objects, which may refuse their states."""
    module, objects = training.module, []
    for name, value in saved.common["model"].items():
        owner = module.get_submodule(name.rpartition(".")[0])
        objects.append((f"the model's {name}", owner.set_extra_state, value))
    if training.loader is not None:
        objects.append(("the loader", training.loader.load_state_dict, saved.own["loader"]))
    for name, state in saved.common["extra"].items():
        objects.append((f"extra[{name!r}]", training.extra[name].load_state_dict, state))
    for what, load, state in objects:
        try:
            load(state)
        except Error:
            raise
        except Exception as error:  # of the program: anything
            raise refused(
                f"rank {rank}: {what} does not take its state of step {step} ({type(error).__name__}: {error}); the "
                "model's and the optimizer's tensors are as before"
            ) from error


def _restore(reading: Reading, saved: Saved, training: Training, ready: _Ready) -> None:
    module, common = training.module, saved.common
    for name, tensor in model_tensors(module).items():
        tensor.detach().copy_(reading.tensors["model", name])
    for optimizer, (state, entries), its in zip(
        training.optimizers, ready.optimizers, common["optimizers"], strict=True
    ):
        _restore_optimizer(state, entries, its, module, optimizer)


def restore_random_states(state: dict[str, Any], modules: Sequence[nn.Module], device: torch.device) -> None:
    """Sets them now, and once more where the first training forward pass of one of ``modules`` begins."""
    restore_random_state(state, device)
    hooks: list[Any] = []

    def before_forward(_module: nn.Module, _inputs: Any, _compiled: bool) -> None:
        if hooks and torch.is_grad_enabled():
            restore_random_state(state, device)
            while hooks:
                hooks.pop().remove()

    hooks += [each.register_forward_pre_hook(UncopiedHook(before_forward)) for each in modules]


def _restore_optimizer(
    state: dict[str, Any],
    entries: dict[str, dict[str, Any]],
    common: dict[str, Any],
    module: nn.Module,
    optimizer: Optimizer,
) -> None:
    """Restores an optimizer. ``state``, ``entries``: see optimizer_state."""
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
