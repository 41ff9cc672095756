"""The process groups that gradcast has made: an attach uses again what an earlier one has left, or what the program has
dropped without detach(), and at the end of the program all are destroyed (docs/internals/shutdown.md).

Do not destroy one earlier: torch gives the name of a destroyed group to a new one, and Gloo confuses them. A group that
has failed is forgotten instead: destroying it would wait for ranks that may have died; the transport has aborted it.
"""

import atexit
import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradcast.training.compat import extension
from gradcast.training.ranks.nccl_settings import Settings, options_with


class Key(NamedTuple):
    """Properties that must be equal for a group to be used again. ``ranks``: global ones. The rest: see make_group."""

    ranks: tuple[int, ...]
    timeout: datetime.timedelta | None
    backend: str
    nccl: Settings
    device: torch.device


@dataclasses.dataclass(eq=False)
class OwnGroup:
    process_group: Any
    key: Key | None  # None: only one part of the program uses it
    idle: bool = False
    has_failed: bool = False  # an operation of this rank has, so messages may be on their way that nobody awaits
    process: int = dataclasses.field(default_factory=os.getpid)

    @property
    def state(self) -> tuple[str, int] | None:
        """Its name and how many operations this rank has begun. Equal on all ranks, where it is idle and nothing has
        failed: nothing is in flight in it. None: its backend does not count them."""
        begun = extension.load().operations_begun(self.process_group)
        return None if begun is None else (self.process_group.group_name, begun)


# In the order in which they were made.
_own_groups: list[OwnGroup] = []


def idle_groups(key: Key) -> list[OwnGroup]:
    """Returns the unused groups with this key in which nothing has failed. The caller sets ``idle`` of one it uses."""
    _drop_destroyed()
    return [each for each in _own_groups if each.idle and not each.has_failed and each.key == key]


def _drop_destroyed() -> None:
    """Forgets groups that the program has destroyed: their threads end when nothing holds them."""
    _own_groups[:] = [each for each in _own_groups if each.process_group in dist.distributed_c10d._world.pg_map]


def leave(process_group: Any, *, reusable: bool) -> None:
    """Ends the use of a group. ``reusable``: nothing in it has failed. Does nothing for groups of the program."""
    made = find(process_group)
    if made is not None and reusable and not made.has_failed:
        made.idle = True
    elif made is not None:
        _own_groups.remove(made)


def on_dropped(made: OwnGroup) -> None:
    """Called when its user was garbage-collected, perhaps on another thread in the middle of any function here."""
    made.idle = True


def on_failure(process_group: Any) -> None:
    """Called when an operation of this group has failed. Does nothing for other groups."""
    made = find(process_group)
    if made is not None:
        made.has_failed = True


def find(process_group: Any) -> OwnGroup | None:
    return next((each for each in _own_groups if each.process_group is process_group), None)


def new_group(key: Key) -> Any:
    """Makes a process group. Collective over the key's ranks."""
    options = options_with(key.nccl, key.timeout) if "nccl" in key.backend else None
    group = _make(key.ranks, key.timeout, key.backend, "gradcast", options)
    _own_groups.append(OwnGroup(group, key))
    return group


def lasting_group(
    ranks: Sequence[int], timeout: datetime.timedelta, backend: str, description: str, nccl: Settings = ()
) -> Any:
    """A process group that lasts until the program ends. Collective over ``ranks``, which are global ranks."""
    options = options_with(nccl, timeout) if "nccl" in backend else None
    group = _make(ranks, timeout, backend, f"gradcast {description}", options)
    if backend == "gloo":  # destroying a group of another backend may wait for ranks that have died
        _own_groups.append(OwnGroup(group, None))
    return group


def _make(
    ranks: Sequence[int], timeout: datetime.timedelta | None, backend: str, description: str, options: Any = None
) -> Any:
    _drop_destroyed()
    with _not_split_off(ranks):
        return dist.new_group(
            ranks=list(ranks),
            timeout=timeout,
            backend=_of_one_kind(backend),
            pg_options=options,
            use_local_synchronization=True,  # collective over these ranks only
            group_desc=description,
        )


def _of_one_kind(backend: str) -> str:
    """WORKAROUND(torch 2.11 to 2.15): once the program has registered any backend of its own, a group of
    "cpu:gloo,cuda:gloo" has no default backend, and torch warns of that where the group is destroyed; one of "gloo" is
    the same group."""
    kinds = {each.split(":")[-1] for each in backend.split(",")}
    return "gloo" if kinds == {"gloo"} else backend


@contextlib.contextmanager
def _not_split_off(ranks: Sequence[int]) -> Iterator[None]:
    """WORKAROUND(torch 2.11 to 2.15, NCCL): if init_process_group() was given a device_id, torch splits a new group off
    from the communicator of all ranks. NCCL then waits for all of them, and those outside the group never come. Without
    the device_id the group gets a communicator of its own."""
    everybody = dist.distributed_c10d._get_default_group()
    device = everybody.bound_device_id
    if device is None or len(ranks) == everybody.size():
        yield
        return
    everybody.bound_device_id = None
    try:
        yield
    finally:
        everybody.bound_device_id = device


@atexit.register
def _end_all() -> None:
    """Destroys the groups: their threads must end before Python does. A forked child does not have these threads."""
    while _own_groups and _own_groups[-1].process == os.getpid():
        made = _own_groups.pop()
        if made.has_failed:
            continue
        with contextlib.suppress(Exception):  # the program or a peer may have destroyed it
            dist.destroy_process_group(made.process_group)
