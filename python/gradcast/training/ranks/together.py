"""Agreements of the ranks between steps, where all of them come to the same place.

Each rank sends an outcome there: a value, or its failure. A rank that fails on the way sends its failure in place of
its next value. So no rank waits for one that has left: all of them raise an Error that names the rank and the
exception.

``together`` is around a way that has several such places; ``computed_by_each`` and ``computed_by_first`` have one. What
fails inside an operation of torch itself (new_group(), a broadcast) cannot be reported by another one, so the other
ranks wait there until the timeout.

Thread safety: the training thread.
"""

import contextlib
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradcast.errors import Error, refused
from gradcast.training.compat import extension
from gradcast.training.ranks import group_pool
from gradcast.training.ranks.store_gather import StoreGather

T = TypeVar("T")
_log = logging.getLogger("gradcast")
# NCCL's words in 2.28, and in 2.30.
_SAME_GPU = re.compile("Duplicate GPU|using the same GPU")
AGREEMENT = "the agreement between the ranks"
_LOOK_S = 0.2  # Python handles Ctrl-C in between
# An interrupted rank waits for the others so long, to report it. Other failures wait for the group's timeout.
_INTERRUPTED_S = 5.0
_SILENT_S = 30.0  # a rank that waits for longer to report its failure logs that


class Outcome(NamedTuple):
    """A rank's message: ``value``, or its ``failure`` while it did ``what``."""

    value: Any = None
    what: str = ""
    failure: str | None = None
    code: str = "communication"


_NOTHING = Outcome()


class RanksTogether:
    """The collectives of a Group, which has the fields. ``together``, ``gather`` and what they are made of use ``own``,
    or the store where blocks may be in flight: ``beside_blocks``."""

    rank: int
    world_size: int
    own: Any
    device: torch.device | None
    store: StoreGather | None
    _beside_blocks: bool | None = None  # of the open ``together``, None outside
    has_failed = False  # an operation has: nothing can be reported any more

    @contextlib.contextmanager
    def together(self, what: str, *, beside_blocks: bool = False) -> Iterator[None]:
        """Context for work of all ranks at the same place. An exception or interrupt of one inside is an Error on all,
        also if another one has come to the end. Collective.

        ``what``: for errors, such as "attach". Inside, the group's collectives go the same way. Another operation of
        all ranks (a new group, DDP) has to follow ``meet()``.
        """
        if self.world_size == 1 or self._beside_blocks is not None:  # the outer one reports
            assert self._beside_blocks in (None, beside_blocks), "the ranks are together elsewhere"
            yield
            return
        self._beside_blocks = beside_blocks
        try:
            with self._reporting(what, beside_blocks):
                yield
                self._outcomes(_NOTHING, beside_blocks)
        finally:
            self._beside_blocks = None

    def meet(self) -> None:
        """Raises, on all ranks, an exception of one of them inside ``together``; outside it does nothing."""
        if self._beside_blocks is not None:
            self._outcomes(_NOTHING, self._beside_blocks)

    def gather(self, value: Any, what: str = AGREEMENT, *, beside_blocks: bool = False) -> list[Any]:
        """Returns every rank's value, in rank order, on every rank. Collective; nothing else of ``own`` may be in
        flight. ``what``: for errors of the network. ``beside_blocks``: goes through the store, which is slower; blocks
        and the program's own collectives may be in flight."""
        assert self._beside_blocks in (None, beside_blocks), "the ranks are together elsewhere"
        if self.world_size == 1:
            return [value]
        with self._reporting(what, beside_blocks):
            if beside_blocks or not self._by_device:
                return self._outcomes(Outcome(value), beside_blocks, what)
            text = pickle.dumps(value)
            self._outcomes(_NOTHING, beside_blocks)
        with self.naming(what):
            return list(map(pickle.loads, gather(self.own, text, self.device, extension.load())))

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Collective; nothing else of ``own`` may be in flight."""
        if self.world_size == 1:
            return value
        with self._reporting(AGREEMENT, False):
            text = pickle.dumps(value) if self.rank == 0 else b""
            self._outcomes(_NOTHING, False)
        with self.naming(AGREEMENT):
            return pickle.loads(extension.load().from_first(self.own, text, device_of_messages(self.own, self.device)))

    def computed_by_first(self, compute: Callable[[], T], what: str = AGREEMENT) -> T:
        """Returns rank 0's result of ``compute``, on every rank. If it fails there, every rank raises. Collective, as
        ``from_first``. ``what``: as for ``computed_by_each``."""
        if self.world_size == 1:
            return compute()
        with self._reporting(what, False):
            value: T = self.from_first(compute() if self.rank == 0 else None)
            return value

    def computed_by_each(self, compute: Callable[[], T], what: str) -> list[T]:
        """Returns each rank's result of ``compute``, in rank order, on every rank. If it fails on one, all raise.
        Collective, as ``gather``.

        ``what``: what is computed, for errors, such as "measuring the plan's steps".
        """
        if self.world_size == 1:
            return [compute()]
        with self._reporting(what, False):
            return self.gather(compute(), what)

    @contextlib.contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Context for an operation of ``own``. ``what``: for errors."""
        try:
            with on_device(self.device), naming(what, self.rank, self.world_size):
                yield
        except BaseException as error:
            group_pool.on_failure(self.own)
            self.has_failed = self.has_failed or isinstance(error, Exception)
            raise

    # --- Outcomes ---

    @property
    def _by_device(self) -> bool:
        """True if messages need the device. A failed device sends nothing any more, so failures are reported through
        the store. (A quorum's group has none.)"""
        return self.store is not None and device_of_messages(self.own, self.device).type != "cpu"

    def _outcomes(self, own: Outcome, beside_blocks: bool, what: str = AGREEMENT) -> list[Any]:
        """Every rank's value. Raises the failure of one of them."""
        text = b"" if own is _NOTHING else pickle.dumps(own)  # one operation where nobody has anything to say
        native = extension.load() if own.failure is None else extension.loaded()
        with self.naming(what):
            if beside_blocks or self._by_device:
                assert self.store is not None, "only a quorum has none, and it sends nothing beside blocks"
                texts = self.store.gather(text)
            else:
                texts = gather(self.own, text, self.device, native)
        outcomes: list[Outcome] = [pickle.loads(each) if each else _NOTHING for each in texts]
        for rank, each in enumerate(outcomes):
            if each.failure is not None:
                raise _failed(each, rank, self.world_size)
        return [each.value for each in outcomes]

    @contextlib.contextmanager
    def _reporting(self, what: str, beside_blocks: bool) -> Iterator[None]:
        """Raises a failure inside as an Error on all ranks. REQUIRES: without one, messages follow on all ranks."""
        if self.world_size == 1:
            yield
            return
        try:
            yield
        except BaseException as error:
            is_network = isinstance(error, Error) and error.code == "communication"
            if self.has_failed or is_network or getattr(error, "on_all_ranks", False):
                raise
            own = _outcome_of(error, what)
            self._report(own, beside_blocks, None if isinstance(error, Exception) else _INTERRUPTED_S)
            vars(error)["on_all_ranks"] = True
            if isinstance(error, Error) or not isinstance(error, Exception):
                raise
            raise _failed(own, self.rank, self.world_size) from error

    def _report(self, own: Outcome, beside_blocks: bool, within_s: float | None) -> None:
        """Sends this rank's failure in place of its next message. ``within_s``: how long it waits for the others."""

        def send() -> None:
            with contextlib.suppress(Exception):  # this rank's failure comes back, or the network has failed
                self._outcomes(own, beside_blocks)

        # A thread, since nothing interrupts torch while it waits.
        thread = threading.Thread(target=send, name="gradcast failure", daemon=True)
        thread.start()
        begun_s, is_logged = time.monotonic(), False
        while thread.is_alive():
            thread.join(_LOOK_S)
            waited_s = time.monotonic() - begun_s
            if within_s is not None and waited_s > within_s:
                self.has_failed = True
                return
            if waited_s > _SILENT_S and not is_logged:
                is_logged = True
                _log.error("%s; this rank waits for the others, to report it", _failed(own, self.rank, self.world_size))


def _outcome_of(error: BaseException, what: str) -> Outcome:
    if isinstance(error, Error):
        return Outcome(what=what, failure=str(error), code=error.code)
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return Outcome(what=what, failure=f"{name}: {lines[0]}" if lines else name)


def _failed(outcome: Outcome, rank: int, world_size: int) -> Error:
    error = Error(f"{outcome.what} failed on rank {rank} of {world_size}: {outcome.failure}", outcome.code)
    error.on_all_ranks = True
    return error


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Context for collectives of objects. Over NCCL torch puts them on the thread's current device, which need not be
    the module's (DDP does not require it)."""
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


def gather(process_group: Any, own: bytes, device: torch.device | None, native: ModuleType | None) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank. Collective.

    ``native``: the part for torch; None on a rank that could not load it, which sends the same without.
    """
    where = device_of_messages(process_group, device)
    if native is not None:
        found: list[bytes] = native.gather(process_group, own, where)
        return found
    # As in csrc/transport/torch/control.cc.
    size = torch.tensor([len(own)], device=where)
    sizes = [torch.empty_like(size) for _ in range(process_group.size())]
    dist.all_gather(sizes, size, group=process_group)
    if not any(map(int, sizes)):
        return [b""] * len(sizes)
    text = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=where)
    text[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    texts = [torch.empty_like(text) for _ in sizes]
    dist.all_gather(texts, text, group=process_group)
    return [bytes(each.tolist())[: int(length)] for each, length in zip(texts, sizes, strict=True)]


def device_of_messages(process_group: Any, device: torch.device | None) -> torch.device:
    """The device for messages: the host, unless the group has no backend for it. ``device``: the module's, if known."""
    kinds = [each.type for each in process_group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    if device is not None and device.type in kinds:
        return device
    return torch.device(kinds[0], torch.accelerator.current_device_index())
