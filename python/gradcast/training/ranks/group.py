"""The ranks that train together: a process group of gradcast's own, and what they tell each other between steps.

A group of its own, because operations of one group must come in the same order on all ranks: on the user's group the
user's own collectives and the blocks of a plan would mix (on Gloo: wrong sums without an error, or a dead process).
Groups that were made here are ended here, at the end of the program (docs/ends.md).
"""

import atexit
import contextlib
import dataclasses
import datetime
import os
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradcast.errors import Error
from gradcast.training.compat import extension


def backend_of(process_group: Any, device_type: str) -> str:
    """Which one carries tensors of this kind, also where none was named or several were."""
    by_device = dict(each.split(":") for each in dist.get_backend_config(process_group).split(","))
    return by_device.get(device_type, "gloo")


@dataclasses.dataclass(eq=False)
class Group:
    """``shared`` is the user's group, for what DDP would send over it; ``own`` carries blocks and agreements.

    ``device``: the module's, which need not be the thread's current one.
    """

    rank: int
    world_size: int
    shared: Any = None
    own: Any = None
    timeout_s: float | None = None  # of an operation on ``own``, where it is known
    device: torch.device | None = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. Collective; nothing else of ``own`` may be in flight."""
        if self.world_size == 1:
            return [value]
        with self._naming("the agreement between the ranks"):
            return gather(self.own, value, self.device)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Collective; nothing else of ``own`` may be in flight."""
        if self.world_size == 1:
            return value
        text = pickle.dumps(value) if self.rank == 0 else b""
        with self._naming("the agreement between the ranks"):
            return pickle.loads(extension.load().from_first(self.own, text, device_of_messages(self.own, self.device)))

    def copy_from_first(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Rank 0's values into these tensors of every rank, in pieces of a few MB. Uses ``shared``, as DDP does.

        ``what`` they are is for an error: "the module's buffers".
        """
        with self._naming(f"sending {what} from rank 0"):
            extension.load().copy_from_first(self.shared, list(tensors))

    def connect(self) -> None:
        """What can go wrong where NCCL connects the devices goes wrong now: it does so when they first send something,
        and with "cpu:gloo,cuda:nccl" what the ranks agree on goes over Gloo. Collective."""
        with self._naming("connecting the ranks' devices"):
            extension.load().all_reduce(self.own, torch.zeros(1, device=self.device))

    def leave(self, *, reusable: bool) -> None:
        """This group is used no more. ``reusable``: nothing of it has failed, and all ranks leave it here; the next
        attach of the same ranks goes on with it. Idempotent."""
        own, self.own = self.own, None
        if own is None:
            return
        made = next((each for each in _made if each.process_group is own), None)
        if made is not None and reusable:
            made.idle = True
        elif made is not None:
            # To end what has failed is to wait for ranks that may have died; the transport has aborted it.
            _made.remove(made)

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        with on_device(self.device), naming(what, self.rank, self.world_size):
            yield


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Around collectives of objects: over NCCL torch puts those on the thread's current device, where nobody has made
    the module's current (with DDP nobody needs to)."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def naming(what: str, rank: int, world_size: int) -> Iterator[None]:
    """Says what has failed, and where, when the network or a peer fails."""
    try:
        yield
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):  # NCCL's words
            raise Error(
                f"rank {rank} of {world_size} and another rank use the same GPU, which NCCL refuses; give each rank "
                "its own, with torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group(), or "
                "use Gloo",
                "invalid_use",
            ) from error
        raise Error(f"{what} failed on rank {rank} of {world_size}: {error}", "communication") from error


@dataclasses.dataclass(eq=False)
class _Made:
    """A process group of gradcast's own. ``key``: what has to be the same where it is used again."""

    process_group: Any
    key: tuple
    idle: bool = False
    process: int = dataclasses.field(default_factory=os.getpid)

    @property
    def exists(self) -> bool:
        """Not after the program's own destroy_process_group()."""
        return self.process_group in dist.distributed_c10d._world.pg_map


# In the order in which they were made.
_made: list[_Made] = []


def gather(process_group: Any, value: Any, device: torch.device | None) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Collective."""
    texts = extension.load().gather(process_group, pickle.dumps(value), device_of_messages(process_group, device))
    return [pickle.loads(text) for text in texts]


def device_of_messages(process_group: Any, device: torch.device | None) -> torch.device:
    """The host, unless the group has no backend for it. ``device``: the module's, where it is known."""
    kinds = [each.type for each in process_group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    if device is not None and device.type in kinds:
        return device
    return torch.device(kinds[0], torch.accelerator.current_device_index())


def make_group(process_group: Any, device: torch.device, timeout_s: float | None, *, reuses: bool = False) -> Group:
    """Collective over ``process_group`` (None: the default group, or a single worker where none was made).

    ``reuses``: takes one that has been left, where every rank has it. On every rank the same."""
    if not dist.is_available() or not dist.is_initialized():
        return _without_group(process_group)
    shared = process_group if process_group is not None else dist.group.WORLD
    rank, world_size = dist.get_rank(shared), dist.get_world_size(shared)
    if rank < 0:
        raise Error("this process is not in process_group; call attach only on its members", "invalid_use")
    if world_size == 1:
        return Group(0, 1, shared)
    timeout = _timeout_of(shared, device) if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    ranks, backend = dist.get_process_group_ranks(shared), dist.get_backend_config(shared)
    key = (tuple(ranks), timeout, backend, device)
    left = _left(key, shared, rank, world_size) if reuses else None
    if left is None:
        options = _nccl_options(timeout) if "nccl" in backend else None
        left = _Made(_new_group(ranks, timeout, backend, "gradcast", options), key)
        _made.append(left)
    left.idle = False
    own = left.process_group
    group = Group(rank, world_size, shared, own, None if timeout is None else timeout.total_seconds(), device)
    if device.type == "cuda":
        group.connect()
    return group


def _left(key: tuple, shared: Any, rank: int, world_size: int) -> _Made | None:
    """A group that was left and that every rank still has; None where one of them has none. Collective."""
    # Those of before a destroy_process_group() are nobody's.
    _made[:] = [each for each in _made if each.exists]
    found = next((each for each in reversed(_made) if each.idle and each.key == key), None)
    name = None if found is None else found.process_group.group_name
    with on_device(key[-1]), naming("looking for a process group to use again", rank, world_size):
        names = gather(shared, name, key[-1])
    return found if all(each == name for each in names) else None


def lasting_group(ranks: Sequence[int], timeout: datetime.timedelta, backend: str, description: str) -> Any:
    """A process group for the rest of the program. Collective over ``ranks``, which are global ones.

    Not to be destroyed before: torch gives the name of a destroyed group to a new one, and Gloo mixes them up.
    """
    group = _new_group(list(ranks), timeout, backend, f"gradcast {description}")
    if backend == "gloo":  # to end that of others is to wait for ranks that may have died
        _made.append(_Made(group, ()))
    return group


def _new_group(
    ranks: list[int], timeout: datetime.timedelta | None, backend: str, description: str, options: Any = None
) -> Any:
    """Collective over ``ranks`` alone."""
    with _not_split_off(ranks):
        return dist.new_group(
            ranks=ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
            group_desc=description,
        )


def _nccl_options(timeout: datetime.timedelta | None) -> Any:
    """Its kernels go before those of compute: a late block delays the next forward pass. Torch's other backends that
    belong to the same group do not look at them."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


@contextlib.contextmanager
def _not_split_off(ranks: Sequence[int]) -> Iterator[None]:
    """WORKAROUND(torch 2.11 to 2.15, NCCL): where init_process_group() was given a device_id, a new group is split off
    from the communicator of all ranks. NCCL waits for every one of them, and those that are not in the group, which
    nobody asks, never come. Such a group gets a communicator of its own."""
    everybody = dist.group.WORLD
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
    """The threads of a group end when it is destroyed and nobody refers to it; after that Python may end. A forked
    child has none of them."""
    while _made and _made[-1].process == os.getpid():
        made = _made.pop()
        with contextlib.suppress(Exception):  # the program has destroyed it, or a peer has; the others are to end, too
            dist.destroy_process_group(made.process_group)


def is_one_of_several(process_group: Any) -> bool:
    """Whether this process is in the group, and others are too."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_rank(process_group) < 0:
        return False
    return dist.get_world_size(process_group) > 1


def require_backend(process_group: Any, device: torch.device) -> None:
    """Raises where the group cannot send tensors of this device; the same on all ranks, since the group is."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank(process_group) >= 0:
        _backend(process_group if process_group is not None else dist.group.WORLD, device)


def _without_group(process_group: Any) -> Group:
    workers = os.environ.get("WORLD_SIZE", "1")
    if process_group is not None or workers not in ("", "1"):
        raise Error(
            f"torch.distributed is not initialized, but {workers} workers were started; "
            "call torch.distributed.init_process_group() before gradcast.attach()",
            "invalid_use",
        )
    return Group(0, 1)


def _timeout_of(group: Any, device: torch.device) -> datetime.timedelta | None:
    """That of the user's group, which new_group() would not take over. None for a backend that does not tell it."""
    return getattr(getattr(_backend(group, device), "options", None), "_timeout", None)


def _backend(group: Any, device: torch.device) -> Any:
    try:
        return group._get_backend(device)
    except RuntimeError:
        raise Error(
            f"the process group has no backend for tensors on {device.type} (it has {dist.get_backend_config(group)}); "
            f"for instance init_process_group('cpu:gloo,cuda:nccl') has both",
            "invalid_use",
        ) from None
