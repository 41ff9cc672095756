"""``handle.snapshots``: checks the call on all ranks, and puts a Snapshots object on the training."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.snapshots import store
from gradcast.snapshots.resuming import resumed
from gradcast.snapshots.snapshots import Snapshots, check
from gradcast.snapshots.state import group_names
from gradcast.training.acceptance import unwrapped_optimizer
from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.handle import Handle


def start(
    handle: Handle,
    module: nn.Module,
    folder: str | Path,
    overhead: float,
    keep: int,
    every: int | None,
    loader: Any,
    extra: dict[str, Any],
    optimizer: Optimizer | Sequence[Optimizer] | None,
) -> Snapshots:
    folder = Path(folder).resolve()
    optimizers = [each() for each in handle._optimizers]
    if optimizer is not None:
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [unwrapped_optimizer(each) for each in given]
    before = resumed.get(folder)
    start_step = 0 if before is None else before.step
    failure = None
    try:
        _require_arguments(folder, overhead, keep, every, loader, extra, optimizers)
        group_names(optimizers, {id(parameter): name for name, parameter in module.named_parameters()})
    except Error as error:
        failure = str(error)
    options = {"overhead": overhead, "keep": keep, "every": every, "extra": sorted(extra), "loader": loader is not None}
    options["plan"] = before is not None and before.plan is not None
    group = handle._session.group
    check(group, folder, start_step, options, failure)
    if before is not None and before.plan is not None:
        handle.load_state_dict(before.plan)
    snapshots = Snapshots(
        folder,
        module,
        optimizers,
        group,
        lambda: handle._session.due_names(),
        lambda: handle._session.complete_due_updates(),
        _plan_state(handle),
        start_step=start_step,
        overhead=overhead,
        keep=keep,
        every=every,
        loader=loader,
        extra=extra,
    )
    hooks = [each().register_forward_pre_hook(UncopiedHook(snapshots.before_forward)) for each in handle._called]
    hooks += [each.register_step_pre_hook(snapshots.before_step) for each in optimizers]
    snapshots.follow([handle._follow(snapshots), *hooks])
    return snapshots


def _require_arguments(
    folder: Path,
    overhead: float,
    keep: int,
    every: int | None,
    loader: Any,
    extra: dict[str, Any],
    optimizers: Sequence[Optimizer],
) -> None:
    """Raises Error(invalid_use)."""
    if not optimizers:
        raise refused("a snapshot needs the optimizer, which hook mode is not given: handle.snapshots(optimizer=...)")
    if overhead <= 0 or keep < 1 or (every is not None and every < 1):
        raise refused(f"overhead={overhead}, keep={keep}, every={every}; give a share above 0, and numbers from 1 on")
    for name, each in {"loader": loader, **extra}.items():
        if each is not None and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise refused(
                f"{name} is a {type(each).__name__} without state_dict() and load_state_dict(); for a DataLoader, pass "
                "gradcast.ResumableLoader(loader)"
            )
    steps = store.complete_steps(folder)
    if steps and folder not in resumed:
        raise refused(
            f"{folder} holds a snapshot of step {steps[-1]}, which this program has not resumed; call "
            "gradcast.resume() before handle.snapshots(), or name another folder"
        )


def _plan_state(handle: Handle) -> Callable[[], dict[str, Any]]:
    """handle.state_dict(), made again only when it has changed."""
    kept: list[Any] = [None, None]

    def plan_state() -> dict[str, Any]:
        version = (handle.plan_version, handle.measuring)
        # With 8 bits on the wire it holds what rounding has left, which changes with every step.
        if kept[0] != version or handle.stats()["wire"] == "int8":
            kept[:] = [version, handle.state_dict()]
        return kept[1]

    return plan_state
