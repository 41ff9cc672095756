"""The ranks that train together: a process group of gradcast's own, and collectives of small values between steps.

Operations of one process group must come in the same order on all ranks. In the user's group, the user's collectives
and the blocks of a plan would mix: on Gloo that gives wrong sums without an error, or ends the process. gradcast uses
the user's group in ``attach`` only.
"""

import contextlib
import copyreg
import dataclasses
import datetime
import logging
import operator
import os
import pickle
import re
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.host_traffic import Hosts
from gradcast.training.compat import extension
from gradcast.training.ranks import dropped, group_pool
from gradcast.training.ranks.store_gather import StoreGather

T = TypeVar("T")
_log = logging.getLogger("gradcast")
_ONE_HOST = Hosts((0,))  # of a single worker
_DROPPED_WITHIN_S = 5.0  # how long attach waits for blocks of models that the program has dropped
# NCCL's words in 2.28, and in 2.30.
_SAME_GPU = re.compile("Duplicate GPU|using the same GPU")


# Ranks send each other profiles and plans as the JSON of their files, so that all have the same rounded numbers.
for _kind in (_core.Profile, _core.Plan):
    copyreg.pickle(_kind, lambda value: (operator.methodcaller("from_json", value.to_json()), (type(value),)))


def backend_of(process_group: Any, device_type: str) -> str:
    """The backend for tensors on this type of device, even if the user named none or several."""
    by_device = dict(each.split(":") for each in dist.get_backend_config(process_group).split(","))
    return by_device.get(device_type, "gloo")


@dataclasses.dataclass(eq=False)
class Group:
    """The ranks of one session.

    ``shared`` is the user's group; ``own`` carries everything that gradcast sends once it exists. ``device``: the
    module's, which may differ from the thread's current one.
    """

    rank: int
    world_size: int
    shared: Any = None
    own: Any = None
    timeout_s: float | None = None  # of an operation on ``own``, None if it is not known
    device: torch.device | None = None
    hosts: Hosts = _ONE_HOST  # attach sets those of several ranks
    store: StoreGather | None = None
    # Frees ``own`` if the program drops this object without leave(); attach makes it.
    dropped: "weakref.finalize[..., Group] | None" = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Collective; nothing else of ``own`` may be in flight."""
        if self.world_size == 1:
            return [value]
        with self.naming("the agreement between the ranks"):
            return gather(self.own, value, self.device)

    def gather_beside_blocks(self, value: Any) -> list[Any]:
        """As ``gather``, but through the store: blocks and the program's own collectives may be in flight. Slower."""
        if self.world_size == 1:
            return [value]
        with self.naming("the agreement between the ranks"):
            return self.store.gather(value)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Collective; nothing else of ``own`` may be in flight."""
        if self.world_size == 1:
            return value
        text = pickle.dumps(value) if self.rank == 0 else b""
        with self.naming("the agreement between the ranks"):
            return pickle.loads(extension.load().from_first(self.own, text, device_of_messages(self.own, self.device)))

    def computed_by_first(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns on rank 0, on every rank. If it raises Error there, every rank raises it, so none
        waits for a result that never comes. Collective, as ``from_first``."""
        result: Any = None
        if self.rank == 0:
            try:
                result = compute()
            except Error as error:
                result = error
        result = self.from_first(result)
        if isinstance(result, Error):
            raise result
        return result

    def computed_by_each(self, compute: Callable[[], T], what: str) -> list[T]:
        """What ``compute`` returns on each rank, in rank order, on every rank. If it fails on one, every rank raises
        Error that names that rank, so none waits for a value that never comes. Collective, as ``gather``.

        ``what``: what is computed, for errors, such as "measuring the plan's steps".
        """
        if self.world_size == 1:
            return [compute()]
        value, failure, cause = None, None, None
        try:
            value = compute()
        except Exception as error:
            failure, cause = f"{type(error).__name__}: {error}".splitlines()[0], error
        # A device that has failed sends nothing any more. A quorum's group has no store.
        by_device = self.store is not None and device_of_messages(self.own, self.device).type != "cpu"
        for rank, each in enumerate((self.gather_beside_blocks if by_device else self.gather)(failure)):
            if each is not None:
                raise Error(f"{what} failed on rank {rank} of {self.world_size}: {each}", "communication") from cause
        return self.gather(value)

    def copy_from_first(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Rank 0's values into these tensors of every rank, in pieces of a few MB. Collective; nothing else of ``own``
        may be in flight.

        ``what``: what the tensors are, for errors, such as "the module's buffers".
        """
        if self.world_size == 1:
            return
        with self.naming(f"sending {what} from rank 0"):
            extension.load().copy_from_first(self.own, list(tensors))

    def connect(self) -> None:
        """Makes NCCL connect the devices now, so that errors are raised here, and no rank connects anything in
        training. Otherwise it connects them at the first block, since with "cpu:gloo,cuda:nccl" the ranks' agreements
        go over Gloo. Does nothing over other backends. Collective."""
        if backend_of(self.shared, self.device.type) != "nccl":
            return
        with self.naming("connecting the ranks' devices"):
            extension.load().connect(self.own, self.device, each_to_each=False)

    def connect_each_to_each(self) -> None:
        """As ``connect``, for the all-to-all of a narrow wire. Collective."""
        with self.naming("connecting each rank's device with each other"):
            extension.load().connect(self.own, self.device, each_to_each=True)

    def info(self, message: str, *arguments: Any) -> None:
        """Logs on rank 0 only, as ``warning`` does."""
        if self.rank == 0:
            _log.info(message, *arguments)

    def warning(self, message: str, *arguments: Any) -> None:
        if self.rank == 0:
            _log.warning(message, *arguments)

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

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Around an operation of ``own``. ``what``: for errors."""
        try:
            with on_device(self.device), naming(what, self.rank, self.world_size):
                yield
        except BaseException:
            group_pool.on_failure(self.own)
            raise


def ranks_named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Put this around collectives of objects. Over NCCL torch puts them on the thread's current device, which need not
    be the module's (DDP does not require it)."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def naming(what: str, rank: int, world_size: int) -> Iterator[None]:
    """Turns torch's RuntimeError into an Error that says what failed, and on which rank."""
    try:
        yield
    except Error:
        raise
    except RuntimeError as error:
        if _SAME_GPU.search(str(error)):
            raise refused(
                f"rank {rank} of {world_size} and another rank use the same GPU, which NCCL refuses; give each rank a "
                "GPU of its own, with torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
                "init_process_group(), or use Gloo"
            ) from error
        raise Error(f"{what} failed on rank {rank} of {world_size}: {error}", "communication") from error


def gather(process_group: Any, value: Any, device: torch.device | None) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Collective."""
    texts = extension.load().gather(process_group, pickle.dumps(value), device_of_messages(process_group, device))
    return [pickle.loads(text) for text in texts]


def device_of_messages(process_group: Any, device: torch.device | None) -> torch.device:
    """The device for messages: the host, unless the group has no backend for it. ``device``: the module's, if known."""
    kinds = [each.type for each in process_group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    if device is not None and device.type in kinds:
        return device
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def make_group(
    process_group: Any,
    device: torch.device,
    timeout_s: float | None,
    *,
    reuses: bool = False,
    max_ctas: int | None = None,
) -> Group:
    """The ranks of ``process_group`` with a group of gradcast's own. Collective.

    ``process_group``: None for the default group, or for a single worker if torch.distributed is not initialized.
    ``timeout_s``: None for the process group's. ``reuses``: takes a group that was left or dropped, if every rank has
    it, and lets the next one take it if this one is dropped; the same on every rank. ``max_ctas``: the most thread
    blocks of a kernel of NCCL, None for its own choice. Raises Error if this process is not in the group, or if the
    network fails.
    """
    if not dist.is_available() or not dist.is_initialized():
        return _without_group(process_group)
    shared = shared_group(process_group)
    if shared is None:
        raise refused("this process is not in process_group; call attach only on its members")
    rank, world_size = dist.get_rank(shared), shared.size()
    if world_size == 1:
        return Group(0, 1, shared)
    timeout = _timeout_of(shared, device) if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    ranks, backend = dist.get_process_group_ranks(shared), dist.get_backend_config(shared)
    key = group_pool.Key(tuple(ranks), timeout, backend, max_ctas, device)
    own = _left(key, shared, rank, world_size) if reuses else None
    is_new = own is None
    if is_new:
        own = group_pool.new_group(key)
    group = Group(rank, world_size, shared, own, None if timeout is None else timeout.total_seconds(), device)
    if reuses:
        group.dropped = weakref.finalize(group, group_pool.on_dropped, group_pool.find(own))
        group.dropped.atexit = False
    if is_new:
        group.connect()
    # Stores outlive groups, and groups of the same name follow each other.
    name = group.from_first(secrets.token_hex(8))
    group.store = StoreGather(name, rank, world_size, group.timeout_s)
    return group


def _left(key: group_pool.Key, shared: Any, rank: int, world_size: int) -> Any:
    """The last process group that nobody uses on any rank, or None. Collective."""
    dropped.end_all(_DROPPED_WITHIN_S)
    idle = {state: each for each in group_pool.idle_groups(key) if (state := each.state) is not None}
    with on_device(key.device), naming("looking for a process group to use again", rank, world_size):
        offers = gather(shared, list(idle), key.device)
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


def _without_group(process_group: Any) -> Group:
    workers = os.environ.get("WORLD_SIZE", "1")
    if process_group is not None or workers not in ("", "1"):
        raise refused(
            f"torch.distributed is not initialized, but {workers} workers were started; "
            "call torch.distributed.init_process_group() before gradcast.attach()"
        )
    return Group(0, 1)


def _timeout_of(group: Any, device: torch.device) -> datetime.timedelta | None:
    """The timeout of the user's group, which new_group() would not inherit. None if the backend does not tell it."""
    return getattr(getattr(_backend(group, device), "options", None), "_timeout", None)


def _backend(group: Any, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:
        raise refused(
            f"the process group has no backend for tensors on {device.type} (it has {dist.get_backend_config(group)}); "
            f"name one, for instance init_process_group('cpu:gloo,cuda:nccl')"
        ) from None
