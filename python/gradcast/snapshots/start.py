"""``handle.snapshots``: checks the call on all ranks, and puts a Snapshots object on the training."""

import contextlib
import dataclasses
import math
import numbers
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.intervals import united
from gradcast.key_value_store import own_store
from gradcast.snapshots import store
from gradcast.snapshots.agreement import Agreement
from gradcast.snapshots.files import Pace
from gradcast.snapshots.frequency import PlannedStep
from gradcast.snapshots.newest import on_every_rank
from gradcast.snapshots.plain import require_plain, to_bytes
from gradcast.snapshots.resuming import resumed
from gradcast.snapshots.sampler import PlaceInData
from gradcast.snapshots.snapshots import Snapshots
from gradcast.snapshots.state import by_name, extra_state, group_names, optimizers_in, plain_groups
from gradcast.snapshots.writer import Place, SnapshotOptions
from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.ranks.group import Group
from gradcast.training.state import TrainingState, UpdateCallback

_SEEN_WITHIN_S = 1.0


def start(
    training: TrainingState,
    module: nn.Module,
    folder: str | Path,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    options: SnapshotOptions,
) -> Snapshots:
    """See Handle.snapshots."""
    group = training.group
    folder = on_every_rank(group, lambda: store.folder_of(folder))
    own = training.optimizers
    optimizers = on_every_rank(group, lambda: own if optimizer is None else optimizers_in(optimizer))
    options = on_every_rank(group, lambda: dataclasses.replace(options, extra=by_name(options.extra)))
    before = resumed.get(folder)
    if before is not None and before.module is not None and before.module() is not module:
        before = None  # another training of this program
    start_step = 0 if before is None else before.step
    on_every_rank(group, lambda: _require_arguments(folder, before is not None, module, optimizers, options))
    on_every_rank(group, lambda: _require_plain_states(module, optimizers, options, group.rank))
    alike: dict[str, Any] = {name: getattr(options, name) for name in ("overhead", "keep", "every")}
    alike |= {"extra": sorted(options.extra), "loader": options.loader is not None}
    alike |= {"signals": sorted(map(int, set(options.signals)))}
    alike |= {"plan": before is not None and before.plan is not None}
    name, place = agree_on_folder(group, folder, start_step, alike, () if before is None else before.damaged)
    if before is not None and before.plan is not None:
        training.load(before.plan)
    pace = Pace(options.write_bytes_per_s)
    if options.over_network and place.world_size > 1:
        pace.is_network_busy = lambda: training.session.report.is_sending
        pace.planned = lambda: planned_step(training)
    asked = own_store(f"gradcast snapshots {name}") if place.world_size > 1 else None
    snapshots = Snapshots(
        place,
        Agreement(asked, place.rank, place.world_size),
        module,
        optimizers,
        training,
        start_step,
        options,
        pace,
    )
    hooks = [each.register_forward_pre_hook(UncopiedHook(snapshots.before_forward)) for each in training.called]
    hooks += [each.register_step_pre_hook(snapshots.before_step) for each in optimizers]
    functions: dict[str, Any] = {"without_forward": snapshots.begin_copy, "on_detach": snapshots.abandon}
    callback = UpdateCallback(snapshots.on_update, after_step=snapshots.after_step, **functions)
    snapshots.follow(training.follow(callback), hooks)
    return snapshots


def agree_on_folder(
    group: Group, folder: Path, start_step: int, alike: dict[str, Any], damaged: Collection[int]
) -> tuple[str, Place]:
    """Returns a new name for these snapshots, and what this rank does for them. ``damaged``: steps of snapshots that
    were not resumed. Collective. Raises Error(invalid_use) on every rank if one cannot write, or if they do not ask for
    the same."""
    for rank, answer in enumerate(answers := group.gather((start_step, alike))):
        if answer != answers[0]:
            raise refused(
                f"rank 0 goes on from step {answers[0][0]} with {answers[0][1]}, rank {rank} from step {answer[0]} "
                f"with {answer[1]}; call gradcast.resume() and handle.snapshots() alike on all ranks"
            )
    name = group.from_first(secrets.token_hex(8))
    marks = [folder / f"{store.MARK}-{name}-{rank}" for rank in range(group.world_size)]
    try:
        on_every_rank(group, lambda: _leave_mark(folder, marks[group.rank]))
        # Ranks that see one another's marks share the folder.
        seen = _seen(marks)
        everybody = group.gather(seen)
    finally:
        with contextlib.suppress(OSError):
            marks[group.rank].unlink()
    if any(everybody[other] != each for each in everybody for other in each):
        raise refused(f"the ranks see different files in {folder}; name a folder on local disks, or one that all share")
    shared = len(seen) == group.world_size
    if not shared:
        group.warning(
            "%s is not one folder for all ranks: each host keeps its own part of a snapshot there, and only with all "
            "of these hosts it can be resumed; name a folder that all hosts see if others may take their place",
            folder,
        )
    place = Place(folder, name, group.rank, group.world_size, completes=seen[0] == group.rank, shared=shared)
    on_every_rank(group, lambda: _take_over(place, None if shared else start_step, damaged))  # nobody writes before
    return name, place


def _leave_mark(folder: Path, mark: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.open("x").close()
    except OSError as error:
        raise _unwritable(folder, error) from None


def _take_over(place: Place, beyond: int | None, damaged: Collection[int]) -> None:
    """Removes what an earlier training has left. ``beyond``: see store.remove_leftovers."""
    if not place.completes:
        return
    try:
        store.take_over(place.folder, place.name)
    except OSError as error:
        raise _unwritable(place.folder, error) from None
    try:
        store.set_aside(place.folder, damaged)
        store.remove_leftovers(place.folder, beyond)
    except OSError as error:
        raise refused(
            f"what an earlier training has left in {place.folder} cannot be removed ({error}); end that training if it "
            "still runs, or remove it"
        ) from None


def _unwritable(folder: Path, error: OSError) -> Error:
    return refused(f"the folder {folder} cannot be written ({error}); make room or name another one for snapshots")


def _seen(marks: Sequence[Path]) -> tuple[int, ...]:
    """The ranks whose marks show here, which may take a moment."""
    end_s = time.monotonic() + _SEEN_WITHIN_S
    while True:
        found = [rank for rank, mark in enumerate(marks) if os.path.lexists(mark)]
        if len(found) == len(marks) or time.monotonic() > end_s:
            return tuple(found)
        time.sleep(0.05)


def _require_arguments(
    folder: Path,
    goes_on: bool,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    options: SnapshotOptions,
) -> None:
    """Raises Error(invalid_use). ``goes_on``: from the snapshots in the folder."""
    overhead, keep, every, rate = options.overhead, options.keep, options.every, options.write_bytes_per_s
    if not optimizers:
        raise refused("a snapshot needs the optimizer, which hook mode is not given: handle.snapshots(optimizer=...)")
    if not _is_above_0(overhead) or not _is_count(keep) or not (every is None or _is_count(every)):
        raise refused(
            f"overhead={overhead!r}, keep={keep!r}, every={every!r}; give a share above 0, and whole numbers from 1 on"
        )
    if rate is not None and not _is_above_0(rate):
        raise refused(f"write_bytes_per_s={rate!r}; give bytes per second above 0, or omit it")
    signals, known = options.signals, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if not isinstance(signals, Collection) or not all(isinstance(each, int) and each in known for each in signals):
        raise refused(
            f"signals={signals!r}; give a list of signals that a program can handle, such as [signal.SIGTERM]"
        )
    for name, each in {"loader": options.loader, **options.extra}.items():
        if each is not None and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise refused(
                f"{name} is a {type(each).__name__} without state_dict() and load_state_dict(); for a DataLoader, pass "
                "gradcast.ResumableLoader(loader)"
            )
        if isinstance(each, PlaceInData):
            raise refused(
                f"{name} is a {type(each).__name__}, whose place nobody counts; pass gradcast.ResumableLoader(loader)"
            )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    group_names(optimizers, names)
    store.require_room(folder)
    steps = store.complete_steps(folder)
    if steps and not goes_on:
        raise refused(
            f"{folder} holds a snapshot of step {steps[-1]}, which this program has not resumed; call "
            "gradcast.resume() before handle.snapshots(), or name another folder"
        )


def _require_plain_states(
    module: nn.Module, optimizers: Sequence[Optimizer], options: SnapshotOptions, rank: int
) -> None:
    """Raises Error(invalid_use) if one of the program's objects has a state that cannot be saved."""
    reads: dict[str, Callable[[], Any]] = {
        "the model": lambda: extra_state(module),
        "the optimizer": lambda: [plain_groups(each) for each in optimizers],
    }
    named = {"the loader": options.loader} | {f"extra[{name!r}]": each for name, each in options.extra.items()}
    reads |= {what: each.state_dict for what, each in named.items() if each is not None}
    for what, read in reads.items():
        try:
            state = read()
        except Exception as error:  # of the program: anything
            raise refused(f"rank {rank}: {what} has no state ({type(error).__name__}: {error})") from error
        require_plain(to_bytes(state, what), what)


def _is_above_0(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < cast(float, value) < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and cast(int, value) >= 1


def planned_step(training: TrainingState) -> PlannedStep | None:
    """Returns the predicted step; None as for TrainingState.predicted_step."""
    predicted = training.predicted_step()
    if predicted is None:
        return None
    mode, timeline, link, leaving_share = predicted
    busy = united((each.launch_ns / 1e9, each.finish_ns / 1e9) for each in timeline.blocks)
    # In hook mode forward begins when the last block has arrived, and what is read then waits for it.
    reads_s = [(each.arrival_ns / 1e9, each.read_ns / 1e9) for each in timeline.tensors]
    if mode == "hook":
        reads_s = [(busy[-1][1], busy[-1][1])]
    byte_s = link.all_reduce.pieces[-1].beta_ns_per_byte / 1e9
    ranks = max(training.group.hosts.sizes)
    return PlannedStep(timeline.iteration_ns / 1e9, tuple(busy), tuple(reads_s), byte_s / leaving_share, ranks)
