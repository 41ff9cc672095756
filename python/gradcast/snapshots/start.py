"""``handle.snapshots``: checks the call on all ranks, and puts a Snapshots object on the training."""

import contextlib
import math
import numbers
import secrets
import signal
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.host_traffic import leaving_share
from gradcast.intervals import united
from gradcast.snapshots import store
from gradcast.snapshots.agreement import Agreement, store_of
from gradcast.snapshots.frequency import PlannedStep
from gradcast.snapshots.resuming import resumed
from gradcast.snapshots.sampler import PlaceInData
from gradcast.snapshots.snapshots import Snapshots
from gradcast.snapshots.state import group_names
from gradcast.snapshots.writer import Place, SnapshotOptions
from gradcast.training.acceptance import unwrapped_optimizer
from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.handle import Handle
from gradcast.training.local.session import LocalStepsSession
from gradcast.training.ranks.group import Group
from gradcast.training.sessions.kinds import TrainingSession
from gradcast.training.sessions.session import Session

_SEEN_WITHIN_S = 1.0


def start(
    handle: Handle,
    module: nn.Module,
    folder: str | Path,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    options: SnapshotOptions,
) -> Snapshots:
    """See Handle.snapshots."""
    folder = Path(folder).resolve()
    optimizers = [each() for each in handle._optimizers]
    if optimizer is not None:
        given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [unwrapped_optimizer(each) for each in given]
    before = resumed.get(folder)
    if before is not None and before.module is not None and before.module() is not module:
        before = None  # another training of this program
    start_step = 0 if before is None else before.step
    failure = None
    try:
        _require_arguments(folder, before is not None, optimizers, options)
        group_names(optimizers, {id(parameter): name for name, parameter in module.named_parameters()})
    except Error as error:
        failure = str(error)
    alike: dict[str, Any] = {name: getattr(options, name) for name in ("overhead", "keep", "every")}
    alike |= {"extra": sorted(options.extra), "loader": options.loader is not None}
    alike |= {"signals": sorted(map(int, set(options.signals))) if failure is None else None}
    alike |= {"plan": before is not None and before.plan is not None}
    name, place = agree_on_folder(handle._session.group, folder, start_step, alike, failure)
    if before is not None and before.plan is not None:
        handle.load_state_dict(before.plan)
    paces = options.over_network and place.world_size > 1 and hasattr(handle._session, "exchange")
    pace = store.Pace(options.write_bytes_per_s)
    if paces:
        pace.is_network_busy = lambda: handle._session.exchange.busy
        pace.planned = lambda: planned_step(handle._session)
    snapshots = Snapshots(
        place,
        Agreement(store_of(name) if place.world_size > 1 else None, place.rank, place.world_size),
        module,
        optimizers,
        lambda: handle._session,
        _plan_state(handle),
        start_step,
        options,
        pace,
    )
    hooks = [each().register_forward_pre_hook(UncopiedHook(snapshots.before_forward)) for each in handle._called]
    hooks += [each.register_step_pre_hook(snapshots.before_step) for each in optimizers]
    snapshots.follow(handle._follow(snapshots), hooks)
    return snapshots


def agree_on_folder(
    group: Group, folder: Path, start_step: int, alike: dict[str, Any], failure: str | None
) -> tuple[str, Place]:
    """Returns a new name for these snapshots, and what this rank does for them. Collective. ``failure``: why this rank
    cannot take any. Raises Error(invalid_use) on every rank if one cannot, or if they do not ask for the same."""
    name = group.from_first(secrets.token_hex(8))
    mark = folder / f".rank-{group.rank}"
    try:
        if failure is None:
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(name)
    except OSError as error:
        failure = f"rank {group.rank} cannot write into the folder {folder} ({error}); name one that can be written"
    try:
        answers = group.gather((failure, start_step, alike))
        first = next((each for each, _, _ in answers if each is not None), None)
        if first is not None:
            raise refused(first)
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise refused(
                    f"rank 0 goes on from step {answers[0][1]} with {answers[0][2]}, rank {rank} from step {answer[1]} "
                    f"with {answer[2]}; call gradcast.resume() and handle.snapshots() alike on all ranks"
                )
        # Ranks that see one another's marks share the folder.
        seen = _seen(folder, name, group.world_size)
        everybody = group.gather(seen)
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
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
    failure = None
    try:
        if place.completes:
            store.take_over(folder, name)
            store.remove_leftovers(folder, None if shared else start_step)
    except OSError as error:
        failure = (
            f"what an earlier training has left in {folder} cannot be removed ({error}); end that training if it still "
            "runs, or remove it"
        )
    first = next((each for each in group.gather(failure) if each is not None), None)  # nobody writes before
    if first is not None:
        raise refused(first)
    return name, place


def _seen(folder: Path, name: str, world_size: int) -> tuple[int, ...]:
    """The ranks whose marks show here, which may take a moment."""
    end_s = time.monotonic() + _SEEN_WITHIN_S
    found: set[int] = set()
    while True:
        for rank in set(range(world_size)) - found:
            with contextlib.suppress(OSError):
                if (folder / f".rank-{rank}").read_text() == name:
                    found.add(rank)
        if len(found) == world_size or time.monotonic() > end_s:
            return tuple(sorted(found))
        time.sleep(0.05)


def _require_arguments(
    folder: Path,
    goes_on: bool,
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
        raise refused(f"write_bytes_per_s={rate!r}; give bytes per second above 0, or leave it out")
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
    steps = store.complete_steps(folder)
    if steps and not goes_on:
        raise refused(
            f"{folder} holds a snapshot of step {steps[-1]}, which this program has not resumed; call "
            "gradcast.resume() before handle.snapshots(), or name another folder"
        )


def _is_above_0(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < value < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1


def planned_step(session: TrainingSession) -> PlannedStep | None:
    """The step that the plan in force predicts; None if it has no measured link, or if no block leaves a host."""
    hosts = session.group.hosts
    if not isinstance(session, Session) or hosts.count == 1:
        return None
    agreed, exchange = session.controller.agreed, session.exchange
    link = agreed.profile.link
    if link is None:  # a warm-up's plan, or a pinned one
        return None
    timeline = _core.play(agreed.profile, link, agreed.in_force)
    busy = united((each.launch_ns / 1e9, each.finish_ns / 1e9) for each in timeline.blocks)
    # In hook mode forward begins when the last block has arrived, and what is read then waits for it.
    reads_s = [(each.arrival_ns / 1e9, each.read_ns / 1e9) for each in timeline.tensors]
    if session.mode == "hook":
        reads_s = [(busy[-1][1], busy[-1][1])]
    byte_s = link.all_reduce.pieces[-1].beta_ns_per_byte / 1e9
    leaving = leaving_share(hosts, exchange.form, exchange.wire)
    return PlannedStep(timeline.iteration_ns / 1e9, tuple(busy), tuple(reads_s), byte_s / leaving, max(hosts.sizes))


def _plan_state(handle: Handle) -> Callable[[], dict[str, Any]]:
    """handle.state_dict(), whose large parts are made again only when they have changed."""
    session, tensors = handle._session, {}
    if isinstance(session, LocalStepsSession):
        return lambda: session.state_dict(tensors)
    kept: list[Any] = [None, None]

    def plan_state() -> dict[str, Any]:
        version = (handle.plan_version, handle.measuring)
        # With 8 bits on the wire it holds what rounding has left, which changes with every step.
        if kept[0] != version or handle.stats()["wire"] == "int8":
            kept[:] = [version, handle.state_dict()]
        return kept[1] | {"mean_weight": handle._session.mean_weight}

    return plan_state
