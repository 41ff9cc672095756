"""The ranks that train together, and a process group of gradcast's own for them.

Operations of one process group must come in the same order on all ranks. In the user's group, the user's collectives
and the blocks of a plan would mix: on Gloo that gives wrong sums without an error, or ends the process. gradcast uses
the user's group in ``attach`` only.
"""

import copyreg
import dataclasses
import datetime
import logging
import operator
import os
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradcast import _core
from gradcast.errors import refused
from gradcast.host_traffic import TWO_LEVEL, Hosts, exchange_form
from gradcast.training.compat import extension
from gradcast.training.compat.sharding import local_of
from gradcast.training.options import Nccl
from gradcast.training.ranks import dropped, group_pool
from gradcast.training.ranks.nccl_settings import AS_THE_PROGRAM, Settings, settings_for, stream_settings
from gradcast.training.ranks.store_gather import StoreGather
from gradcast.training.ranks.together import RanksTogether

_log = logging.getLogger("gradcast")
_ONE_HOST = Hosts((0,))  # of a single worker
_DROPPED_WITHIN_S = 5.0  # how long attach waits for blocks of models that the program has dropped
_MAKING = "making a process group for gradcast"


# Ranks send each other profiles and plans as the JSON of their files, so that all have the same rounded numbers.
_kind: Any
for _kind in (_core.Profile, _core.Plan):
    copyreg.pickle(_kind, lambda value: (operator.methodcaller("from_json", value.to_json()), (type(value),)))


def backend_of(process_group: Any, device_type: str) -> str:
    """The backend for tensors on this type of device, even if the user named none or several."""
    by_device = dict(each.split(":") for each in dist.get_backend_config(process_group).split(","))
    return by_device.get(device_type, "gloo")


class Message(NamedTuple):
    """A block on its way. ``wire``: the type of its numbers on a narrow wire; None for their own."""

    op: str
    dtype: torch.dtype
    size_bytes: int
    wire: torch.dtype | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """NCCL chooses an algorithm by the size, within a factor of two nearly always the same."""
        return self.op, self.dtype, self.wire, self.size_bytes.bit_length()


_SMALL_BYTES = 1 << 20  # messages for which there is memory
# One number, and DDP's first and other buckets.
DDP_MESSAGES = [Message("all_reduce", torch.float32, size_bytes) for size_bytes in (4, 1 << 20, 25 << 20)]


@dataclasses.dataclass(eq=False)
class Group(RanksTogether):
    """The ranks of one session. together.py has their agreements.

    ``shared`` is the user's group; ``own`` carries everything that gradcast sends once it exists. ``device``: the
    module's, which may differ from the thread's current one. ``shard``: the number of the shard whose replicas these
    are; None for whole modules. ``baseline``: for the log, by whom gradients are sent without gradcast.
    """

    rank: int
    world_size: int
    shared: Any = None
    own: Any = None
    timeout_s: float | None = None  # of an operation on ``own``, None if it is not known
    device: torch.device | None = None
    hosts: Hosts = _ONE_HOST  # attach sets those of several ranks
    store: StoreGather | None = None
    shard: int | None = None
    baseline: str = "DDP"
    # Frees ``own`` if the program drops this object without leave(); attach makes it.
    dropped: "weakref.finalize[..., Group] | None" = None
    _connected: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)  # kinds of messages

    @property
    def backend(self) -> str:
        """The backend of blocks. REQUIRES: several ranks, and a device."""
        # Not by torch's list of groups, which does not have a quorum's.
        return str(self.own._get_backend(self.device).name())

    def copy_from_first(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Copies rank 0's values into these tensors of every rank, in pieces of a few MB. Collective; nothing else of
        ``own`` may be in flight.

        ``what``: what the tensors are, for errors, such as "the module's buffers".
        """
        if self.world_size == 1:
            return
        self.meet()
        with self.naming(f"sending {what} from rank 0"):
            extension.load().copy_from_first(self.own, list(map(local_of, tensors)))

    def connect(self, messages: Iterable[Message]) -> None:
        """Makes NCCL connect the devices for these messages now, so that errors are raised here, and no step waits for
        it: NCCL connects for each kind of operation, and for each algorithm, when it is first used. Sends the largest
        message of each kind that has not been sent for this before. Does nothing over other backends. Collective;
        nothing else of ``own`` may be in flight."""
        if self.world_size == 1 or self.device is None or self.backend != "nccl":
            return
        largest = {each.kind: each for each in sorted(messages, key=lambda each: each.size_bytes)}
        new = [each for kind, each in largest.items() if kind not in self._connected]
        if not new:
            return
        most_bytes = max(each.size_bytes for each in new)
        if most_bytes > _SMALL_BYTES and not all(
            self.computed_by_each(lambda: _has_room(2 * most_bytes, self.device), "looking for memory to connect in")
        ):
            self.info(
                f"a device has no memory to connect for blocks of up to {most_bytes / 1e6:.1f} MB beforehand; NCCL "
                "connects in the first step that sends them"
            )
            return
        self.meet()
        with self.naming("connecting the ranks' devices"):
            for each in new:
                extension.load().connect(self.own, self.device, *each)
        self._connected.update(each.kind for each in new)

    def info(self, message: str, *arguments: Any) -> None:
        """Logs on rank 0 only, as ``warning`` does. Of a module's shards the first one speaks, the others at level
        debug."""
        self._say(logging.DEBUG if self.shard else logging.INFO, message, arguments)

    def warning(self, message: str, *arguments: Any) -> None:
        self._say(logging.WARNING, message, arguments)

    def _say(self, level: int, message: str, arguments: Sequence[Any]) -> None:
        if self.rank == 0:
            _log.log(level, self.logged_name + message, *arguments)

    @property
    def logged_name(self) -> str:
        """The beginning of log lines."""
        return "" if self.shard is None else f"replicas of shard {self.shard}: "

    def names_of(self, ranks: Sequence[int]) -> str:
        """Ranks of this group in words: of a shard's replicas, with their ranks among all."""
        if self.shard is None:
            return _listed("rank", ranks)
        everyone = dist.get_process_group_ranks(self.shared)
        return _listed("replica", [f"{rank} (rank {everyone[rank]})" for rank in ranks])

    def leave(self, *, reusable: bool) -> None:
        """Stops using this group. Idempotent.

        ``reusable``: nothing in it has failed, and all ranks leave it here; the next attach of the same ranks uses it
        again.
        """
        own, self.own = self.own, None
        if self.dropped is not None:
            self.dropped.detach()
        if own is not None:
            group_pool.leave(own, reusable=reusable)


def _has_room(size_bytes: int, device: torch.device | None) -> bool:
    try:
        torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def _listed(what: str, names: Sequence[Any]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]}"
    return f"{what}s {', '.join(map(str, names[:-1]))} and {names[-1]}"


def make_group(
    process_group: Any,
    device: torch.device,
    timeout_s: float | None,
    *,
    reuses: bool = False,
    nccl: Nccl = AS_THE_PROGRAM,
) -> Group:
    """The ranks of ``process_group`` with a group of gradcast's own. Collective.

    ``process_group``: None for the default group, or for a single worker if torch.distributed is not initialized.
    ``timeout_s``: None for the process group's. ``reuses``: takes a group that was left or dropped, if every rank has
    it, and lets the next one take it if this one is dropped; the same on every rank. ``nccl``: the rest is as in
    ``process_group``. Raises Error if this process is not in the group, or if the network fails.
    """
    callers = callers_of(process_group, device)
    if callers.world_size == 1:
        return callers
    rank, world_size, shared = callers.rank, callers.world_size, callers.shared
    with callers.together(_MAKING):
        timeout = _timeout_of(shared, device) if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        ranks, backend = dist.get_process_group_ranks(shared), dist.get_backend_config(shared)
        key = group_pool.Key(tuple(ranks), timeout, backend, nccl_settings(shared, device, nccl), device)
        own = _left(key, callers) if reuses else None
    is_new = own is None
    if is_new:
        own = group_pool.new_group(key)
    group = Group(rank, world_size, shared, own, None if timeout is None else timeout.total_seconds(), device)
    if reuses:
        group.dropped = weakref.finalize(group, group_pool.on_dropped, group_pool.find(own))
        group.dropped.atexit = False
    with group.together(_MAKING):
        if is_new:
            group.connect(DDP_MESSAGES[:1])
        # Stores outlive groups, and groups of the same name follow each other.
        store = StoreGather(group.from_first(secrets.token_hex(8)), rank, world_size, group.timeout_s)
    group.store = store
    return group


def transport_of(group: Group, flats: Sequence[torch.Tensor], wire: str, nccl: Nccl = AS_THE_PROGRAM) -> Any:
    """A transport of blocks of these buffers between the ranks."""
    form = exchange_form(group.hosts, wire, on_device=any(flat.device.type != "cpu" for flat in flats))
    host_of = group.hosts.host_of if form == TWO_LEVEL else ()
    return extension.load().Transport(group.own, flats, wire, host_of, *streams_of(group, nccl))


def callers_of(process_group: Any, device: torch.device | None = None) -> Group:
    """The ranks that make a call, over the user's group. ``process_group``: as for ``make_group``; nothing else of it
    may be in flight. Raises Error if this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        return _without_group(process_group)
    shared = shared_group(process_group)
    if shared is None:
        raise refused("this process is not in process_group; call attach only on its members")
    if shared.size() == 1:
        return Group(0, 1, shared)
    return Group(dist.get_rank(shared), shared.size(), shared, shared, None, device)


def _left(key: group_pool.Key, callers: Group) -> Any:
    """The last process group that nobody uses on any rank, or None. Collective."""
    dropped.end_all(_DROPPED_WITHIN_S)
    idle = {state: each for each in group_pool.idle_groups(key) if (state := each.state) is not None}
    offers = callers.gather(list(idle), "looking for a process group to use again")
    state = next((each for each in reversed(offers[0]) if all(each in others for others in offers)), None)
    if state is None:
        return None
    idle[state].idle = False
    return idle[state].process_group


def shared_group(process_group: Any) -> Any:
    """The user's group: the given one, or that of all workers. None if this process is in no such group."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(process_group) < 0:
        return None
    return process_group if process_group is not None else dist.group.WORLD


def require_backend(process_group: Any, device: torch.device) -> None:
    """Raises Error if the group has no backend for tensors on this device; that is the same on all ranks."""
    shared = shared_group(process_group)
    if shared is not None:
        _backend(shared, device)


def nccl_settings(process_group: Any, device: torch.device, nccl: Nccl = AS_THE_PROGRAM) -> Settings:
    """The settings of NCCL for another group of ranks in ``process_group``, with tensors on this device."""
    return settings_for(_backend(process_group, device), nccl)


def streams_of(group: Group, nccl: Nccl) -> tuple[bool, bool, bool]:
    """See ``stream_settings``."""
    shared, device = group.shared, group.device
    return stream_settings(None if shared is None or device is None else _backend(shared, device), nccl)


def _without_group(process_group: Any) -> Group:
    workers = os.environ.get("WORLD_SIZE", "1")
    if process_group is not None or workers not in ("", "1"):
        raise refused(
            f"torch.distributed is not initialized, but {workers} workers were started; "
            "call torch.distributed.init_process_group() before gradcast.attach()"
        )
    return Group(0, 1)


def _timeout_of(group: Any, device: torch.device) -> datetime.timedelta | None:
    """The timeout of the user's group, which new_group() would not inherit. None if the backend does not have it."""
    return getattr(getattr(_backend(group, device), "options", None), "_timeout", None)


def _backend(group: Any, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:
        raise refused(
            f"the process group has no backend for tensors on {device.type} (it has {dist.get_backend_config(group)}); "
            f"name one, for instance init_process_group('cpu:gloo,cuda:nccl')"
        ) from None
