"""What the Python tests need of C++ and the package does not ship: tests/bindings."""

from collections.abc import Sequence
from typing import Literal, final

@final
class InprocTransport:
    """One rank's transport in an InprocWorld."""

    @property
    def capsule(self) -> object: ...

@final
class InprocWorld:
    """Ranks as threads of one process: an emulated wire, with scripted delays and failures."""

    def __init__(self, world_size: int) -> None: ...
    @property
    def world_size(self) -> int: ...
    def transport(self, rank: int, buffers: Sequence[object]) -> InprocTransport:
        """The transport of one rank over writable, contiguous arrays of float32 or float64."""

    def delay(self, rank: int, operation_index: int, delay_ns: int) -> None:
        """This rank's n-th operation reaches the wire this much later than it is started."""

    def fail(self, rank: int, operation_index: int, message: str) -> None:
        """This rank's n-th operation fails with this message; the other ranks wait for it."""

@final
class TransportDriver:
    """Drives any transport by hand, one operation at a time. ``transport``: as for ``Engine``."""

    def __init__(self, transport: object) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def start(
        self,
        ticket: int,
        ranges: Sequence[tuple[int, int]],
        *,
        op: Literal["all_reduce", "reduce_scatter", "all_gather"] = "all_reduce",
        buffer: int = 0,
    ) -> None: ...
    def wait(self, ticket: int, timeout_ns: int) -> str | None:
        """The error of its completion ("" for success), or None after the timeout; a negative timeout never ends."""

    def completions(self) -> list[tuple[int, str]]:
        """All completions so far, in order."""

    def abort(self, reason: str) -> None: ...
    def close(self) -> None:
        """Aborts what is in flight, then ends the transport's threads."""
