"""Batches whose samples are shared out by the ranks' speed: the whole batch stays as it is, a slow rank gets less.

A step's batch is the next part of the epoch's order, and each rank takes its share of it, one behind the other. So the
place in the data is one number, whatever the shares are and were.

Thread safety: the training thread; another one may draw batches.
"""

import logging
import weakref
from collections.abc import Iterator, Sized
from typing import Any

from torch import nn
from torch.utils.data import Sampler

from gradcast.errors import refused
from gradcast.snapshots.sampler import PlaceInData
from gradcast.training.state import SamplerCall, ShareSchedule, TrainingState

_log = logging.getLogger("gradcast")


class BalancedBatchSampler(PlaceInData, Sampler[list[int]]):
    """A batch sampler: ``DataLoader(dataset, batch_sampler=BalancedBatchSampler(dataset, handle, batch=256))``.

    All ranks together take ``batch`` samples in each step, as many on each rank as it computes in the time of the
    others. Shares begin even. They change when the steps show that it gains 3 % or more (back to even ones: 1 %), from
    a batch on that no rank's loader has drawn yet; rank 0 says so before. The mean over the ranks is weighted with
    their samples, as with ``Options(weight="samples")``, from this call on, unless the program calls
    ``handle.weight(n)``.

    An epoch's order depends on ``seed`` and the epoch alone, and each of its samples is used once. Its last batch is
    smaller; if it has fewer samples than there are ranks, it is dropped. The next epoch begins by itself where one
    ends; ``set_epoch`` goes to another one, for instance where a loop leaves an epoch early. With ResumableLoader the
    place survives a restart, also with another number of ranks. Shares do not: they are measured anew.

    ``epoch``, ``position``: see ResumableSampler.
    """

    def __init__(
        self, dataset: Sized, handle: Any, batch: int, *, shuffle: bool = True, seed: int = 0, every: int = 8
    ) -> None:
        """``handle``: returned by ``attach``. ``batch``: samples of all ranks. ``every``: the number of steps measured
        with the same shares before these change. Collective. Raises Error(invalid_use), on every rank, if ranks give
        different arguments or data sets of different lengths, if there are fewer samples than ranks, or if
        GRADCAST_DISABLE is set. On a device shares stay even, with a warning: how long a rank computes there is not
        measured."""
        training = TrainingState.of(handle, "BalancedBatchSampler")
        training.require_whole("BalancedBatchSampler")
        self._attached, self._module = weakref.ref(training.attached), training.module
        self._rank, self._world_size = training.group.rank, training.group.world_size
        self._is_over = False  # the current epoch, for a loader that does not count
        begin = super().__init__

        def call() -> SamplerCall:
            begin(dataset, shuffle, seed)
            self._check(batch, every)
            self._schedule = ShareSchedule(batch, self._world_size, every, self._warn_of_batch_norm)
            settings = {"samples": self._size, "batch": batch, "shuffle": shuffle, "seed": seed, "every": every}
            return SamplerCall(self._schedule, settings)

        training.balance(call)

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank in a whole batch, by rank; the last ones that were agreed on."""
        return self._schedule.latest

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's samples of each batch from the position on."""
        if self._is_over:
            self.end_epoch()
        epoch, position, order = self.epoch, self.position, self.order()
        while (end := self.behind_batch(position, 0)) > position:
            attached = self._attached()
            if self._world_size > 1 and (attached is None or attached.released):
                raise refused(
                    "gradcast was detached, and a mean over uneven shares needs its weights; end the loader before "
                    "handle.detach(), or go on with another sampler"
                )
            shares = self._schedule.take((epoch, position), end - position)
            start = position + sum(shares[: self._rank])
            own = order[start : start + shares[self._rank]]
            position = end
            yield list(own) if isinstance(own, range) else own.tolist()
        self._is_over = not self.is_counted and self.epoch == epoch

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        whole, rest = divmod(self._size, self._schedule.batch)
        return whole + (rest >= self._world_size)

    def behind_batch(self, position: int, batch_size: int) -> int:
        count = min(self._schedule.batch, self._size - position)
        return position + (count if count >= self._world_size else 0)

    def end_epoch(self) -> None:
        super().end_epoch()
        self._is_over = False

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._is_over = False
        super().set_epoch(epoch)

    def _check(self, batch: object, every: object) -> None:
        """Raises Error(invalid_use) for arguments that cannot be used."""
        for name, value, least in (("batch", batch, self._world_size), ("every", every, 2)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                needed = "one sample for each rank" if name == "batch" else "the steps that are measured"
                raise refused(f"BalancedBatchSampler got {name}={value!r}; at least {least} are needed, {needed}")
        if self._size < self._world_size:
            raise refused(
                f"BalancedBatchSampler got a data set of {self._size} samples for {self._world_size} ranks; each rank "
                "needs one in every step, so start fewer ranks"
            )

    def _warn_of_batch_norm(self) -> None:
        module = self._module()
        for name, each in [] if module is None or self._rank != 0 else module.named_modules():
            if isinstance(each, nn.modules.batchnorm._BatchNorm) and not isinstance(each, nn.SyncBatchNorm):
                _log.warning(
                    "%s sees each rank's own samples, and shares are now uneven: a rank with few has rougher "
                    "statistics; torch.nn.SyncBatchNorm, group norm or layer norm do not depend on shares",
                    name,
                )
                return
