"""A place in the data that survives a restart with any number W of ranks: each sample of an epoch is handed out once.

All ranks walk through one order of the whole epoch. After some samples of each rank the W ranks together have taken a
prefix of that order, which one number describes. It counts what the loop was handed: workers of a DataLoader that have
prefetched more change nothing.

Thread safety: the training thread.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from gradcast.errors import refused


class PlaceInData(ABC):
    """The order of an epoch, which depends on ``seed`` and the epoch alone, and the place in it.

    ``epoch``: the current one. ``position``: the number of its samples that all ranks together were handed.
    ``is_counted``: a ResumableLoader moves the place on.
    """

    def __init__(self, dataset: Sized, shuffle: bool, seed: int) -> None:
        self._size = len(dataset)
        self._shuffle, self._seed = shuffle, seed
        self.epoch, self.position = 0, 0
        self.is_counted = False

    def order(self) -> range | torch.Tensor:
        """The epoch's samples, as indices."""
        if not self._shuffle:
            return range(self._size)
        # Of a seed, torch's generator on the CPU uses 32 bits: a hash of both numbers.
        digest = hashlib.blake2b(f"{self._seed} {self.epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randperm(self._size, generator=generator)

    @abstractmethod
    def behind_batch(self, position: int, batch_size: int) -> int:
        """The position behind a batch that begins at ``position``. ``batch_size``: the DataLoader's, of each rank."""

    def end_epoch(self) -> None:
        """Notes that the loop was handed all samples that this epoch has for it."""
        self.epoch, self.position = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Goes to an epoch, as DistributedSampler does. Another one than the current one begins at its first sample."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        own = {"epoch": self.epoch, "position": self.position, "size": self._size}
        return own | {"shuffle": self._shuffle, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of ``state``. Raises Error(invalid_use) if it is of other data, or of another order."""
        own = self.state_dict()
        for key, what in (("size", "samples"), ("shuffle", "shuffle"), ("seed", "seed")):
            if state[key] != own[key]:
                raise refused(
                    f"the saved place in the data is of a {type(self).__name__} with {what} {state[key]}, and this one "
                    f"has {what} {own[key]}, so the place means other samples; give it the same data and arguments"
                )
        self.epoch, self.position = state["epoch"], state["position"]


class ResumableSampler(PlaceInData, Sampler[int]):
    """Shares out an epoch's samples over the ranks, in an order that depends on ``seed`` and the epoch alone.

    In place of DistributedSampler, together with ResumableLoader. ``epoch``: the current one. ``position``: the number
    of its samples that all ranks together were handed. The ranks get equally many samples: of what is left of an epoch,
    up to W - 1 samples at its end are dropped, and none is handed out twice. The next epoch begins by itself where one
    ends: ``for epoch in range(sampler.epoch, epochs)`` goes on after a restart.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """``dataset``: anything with a length. ``rank``, ``world_size``: None for those of torch.distributed, or of a
        single worker. ``seed``: the same on all ranks. Raises Error(invalid_use) for a rank out of range."""
        super().__init__(dataset, shuffle, seed)
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if is_distributed else 0
        self._world_size = world_size if world_size is not None else dist.get_world_size() if is_distributed else 1
        if not 0 <= self._rank < self._world_size:
            raise refused(f"ResumableSampler got rank {self._rank} of {self._world_size}; ranks count from 0")

    def __iter__(self) -> Iterator[int]:
        """This rank's samples from the position on: every W-th one."""
        start, stop = self.position + self._rank, self.position + self.left * self._world_size
        own = self.order()[start : stop : self._world_size]
        yield from own if isinstance(own, range) else own.tolist()

    def __len__(self) -> int:
        """The samples of this rank in a whole epoch, so that a schedule computed from it is the same after a restart.

        ``left`` is the number still to come.
        """
        return self._size // self._world_size

    @property
    def left(self) -> int:
        """The samples that each rank still gets in this epoch."""
        return self._left_behind(self.position)

    def advance(self, count: int) -> None:
        """Notes that each rank's loop was handed ``count`` more samples."""
        self.position += count * self._world_size

    def behind_batch(self, position: int, batch_size: int) -> int:
        return position + min(batch_size, self._left_behind(position)) * self._world_size

    def _left_behind(self, position: int) -> int:
        return (self._size - position) // self._world_size


class ResumableLoader:
    """A DataLoader with a ResumableSampler or a BalancedBatchSampler, counted: a batch counts when the loop is handed
    it.

    ``for batch in ResumableLoader(DataLoader(dataset, sampler=ResumableSampler(dataset), ...))`` hands out what is left
    of the epoch. Give this object as ``loader`` to whatever saves and restores; its state is one for all ranks.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Raises Error(invalid_use) for a loader whose batches cannot be counted."""
        samplers: tuple[object, ...] = (loader.batch_sampler, loader.sampler)
        places = [each for each in samplers if isinstance(each, PlaceInData)]
        if not places:
            raise refused(
                f"ResumableLoader got a DataLoader with a {type(loader.sampler).__name__}, whose place cannot be "
                "saved; pass sampler=gradcast.ResumableSampler(dataset) and batch_size to the DataLoader, and neither "
                "shuffle nor batch_sampler, or a gradcast.BalancedBatchSampler as batch_sampler"
            )
        if not getattr(loader, "in_order", True):
            raise refused("ResumableLoader counts batches in order; leave in_order=False out")
        self.loader, self.sampler = loader, places[0]
        self.sampler.is_counted = True
        self._batch_size = loader.batch_size or 1  # without automatic batching, a batch is a sample

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self.sampler.epoch, self.sampler.position
        for batch in self.loader:
            behind = self.sampler.behind_batch(position, self._batch_size)
            self.sampler.position += behind - position
            position = behind
            yield batch
        if self.sampler.epoch == epoch:  # the loop may have gone to another one itself
            self.sampler.end_epoch()

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        if not isinstance(self.sampler, ResumableSampler):
            return len(self.loader)
        samples = len(self.sampler)
        return samples // self._batch_size if self.loader.drop_last else math.ceil(samples / self._batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)
