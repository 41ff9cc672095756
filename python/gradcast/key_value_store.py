"""The store of torch.distributed, for what ranks tell each other outside of collectives.

Thread safety: any thread.
"""

from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist


class KeyValueStore(Protocol):
    """The part of ``torch.distributed.Store`` that gradcast uses; torch's own stubs lack some of it."""

    @property
    def timeout(self) -> timedelta: ...
    def set(self, key: str, value: bytes | str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


def default_store() -> KeyValueStore:
    """Returns the one that all share. REQUIRES: torch.distributed is initialized."""
    return _untyped(dist.distributed_c10d._get_default_store())


def own_store(prefix: str) -> KeyValueStore:
    """Returns a store for the keys with this prefix, over a connection of its own: on the one that all share, a request
    waits for those of other threads. REQUIRES: torch.distributed is initialized."""
    return _untyped(dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())).clone()


def _untyped(store: dist.Store) -> Any:
    return store
