"""Errors after which the ranks' parameters differ: damaged sums, and backward passes that fail on some ranks only.

The error is raised by the operation that finds it and by every later step: training must not go on with such ranks.

Thread safety: under the session's lock.
"""

import torch

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.training.measure.step_trace import tensor_names
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_exchange import GradientExchange

_NAMES_SHOWN = 3


class RankConsistency:
    """Finds such errors, and remembers the first one."""

    def __init__(self, exchange: GradientExchange, group: Group, compare_every: int) -> None:
        """``compare_every``: as in Options."""
        self._exchange, self._group = exchange, group
        self._compare_every = compare_every
        self._error: Error | None = None
        self._failed_here: set[int] = set()  # iterations in which this rank's own backward pass has failed

    def on_backward_failure(self, iteration: int) -> None:
        self._failed_here.add(iteration)

    def check(self, failed_iteration: int | None) -> None:
        """At the beginning of an iteration. ``failed_iteration``: the last one in which some rank's backward failed.

        A failure on all ranks may be caught by all, and nothing has happened. A failure on some of them leaves the
        others with partial sums.
        """
        if failed_iteration is not None and failed_iteration not in self._failed_here and self._error is None:
            self._error = refused(
                f"in iteration {failed_iteration} the backward pass of another rank failed, so its gradients are "
                "missing in the sums, and the ranks' parameters differ now; let an error inside backward (out of "
                "memory, for example) end the training, or let all ranks skip that step, and continue from the last "
                "checkpoint"
            )
        if self._error is not None:
            raise self._error

    def is_comparison_due(self, iteration: int) -> bool:
        """Counts iterations, of which all ranks have the same number."""
        return self._compare_every > 0 and iteration % self._compare_every == self._compare_every - 1

    def compare_ranks(self, iteration: int) -> None:
        """Raises, on every rank, if the ranks have received different sums. Collective.

        REQUIRES: everything has arrived, and nobody has written to the gradients since.
        """
        try:
            self._compare_sums(iteration)
        except Error as error:
            self._error = error
            raise

    def _compare_sums(self, iteration: int) -> None:
        plan, profile = self._exchange.plan, self._exchange.profile
        what = "comparing what the ranks have received"
        with self._exchange.watch.waiting(what):
            everyone = self._group.computed_by_each(lambda: [self._checksum(block) for block in plan.blocks], what)
        for rank, theirs in enumerate(everyone):
            for number, (one, other) in enumerate(zip(everyone[0], theirs, strict=True)):
                if one != other:
                    names = tensor_names(profile, plan.blocks[number])
                    raise Error(
                        f"in iteration {iteration} rank 0 and rank {rank} have received different sums in block "
                        f"{number} ({', '.join(names[:_NAMES_SHOWN])}{', ...' if len(names) > _NAMES_SHOWN else ''}): "
                        "the network or a library has damaged them; the parameters of these ranks are about to differ",
                        "communication",
                    )

    def _checksum(self, block: _core.Block) -> int:
        """Checksum of a block's bytes modulo 2^64. It depends on the order of 8-byte words."""
        flat = self._exchange.buffers.flats[block.buffer].view(torch.uint8)
        total = 0
        for lo, hi in block.ranges:
            whole = lo + (hi - lo) // 8 * 8
            # The plain sum of the words would not notice two that have changed places, and one with even weights would
            # not notice a word's highest bit.
            words = flat[lo:whole].clone().view(torch.int64)
            weights = 2 * torch.arange(words.numel(), device=words.device) + 1
            total += int((words * weights).sum()) + int(flat[whole:hi].sum())
        return total % (1 << 64)
