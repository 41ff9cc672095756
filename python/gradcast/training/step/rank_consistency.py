"""Errors after which the ranks' parameters differ: damaged sums, backward passes that fail on some ranks only, and
passes that only some ranks run.

The error is raised by the operation that finds it and by every later step: training must not go on with such ranks.
Passes are checked when the step message arrives (step_message.py), before an update uses the sums; on a device the host
does not wait for that, and finds it one step later.

A rank that runs a pass more than the others (for saliency maps, say) averages its gradients with those of the others'
next pass, and nobody waits in vain. So each pass has a **signature**: the module's mode (training or evaluation), and
how many passes were reduced since the parameters last changed, modulo 4. The step message has it as three bits, each
as two elements: the bit and its opposite. If the sums of both are above 0, ranks differ.

Thread safety: under the session's lock.
"""

from collections.abc import Sequence

import torch

from gradcast import _core
from gradcast.errors import Error, refused
from gradcast.training.measure.step_trace import tensor_names
from gradcast.training.ranks.group import Group
from gradcast.training.step.backward_passes import ForwardPass
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.step_message import Received, StepMessage

_NAMES_SHOWN = 3
_ONE_PASS = (
    "Run what only some ranks compute (saliency maps, Fisher information) under no_sync(), forward included, or past a "
    "DistributedDataParallel (ddp.module); end this training, and continue from the last checkpoint"
)


class RankConsistency:
    """The checks for such errors, and the first error found."""

    def __init__(self, exchange: GradientExchange, message: StepMessage, group: Group, compare_every: int) -> None:
        """``compare_every``: as in Options."""
        self._exchange, self._message, self._group = exchange, message, group
        self._compare_every = compare_every
        self._error: Error | None = None
        self._failed_here: set[int] = set()  # iterations in which this rank's own backward pass has failed
        self._fingerprint: int | None = None  # of the parameters when the last pass began
        self._passes = 0  # that were reduced with these parameters, before the one that is open
        # The iteration of the open pass, and which pass it is since the parameters changed, until its message arrives.
        self._unchecked: tuple[int, int] | None = None

    def on_backward_failure(self, iteration: int) -> None:
        self._failed_here.add(iteration)

    def begin_pass(self, iteration: int, fingerprint: int, forward: ForwardPass | None) -> Sequence[float]:
        """The signature of a pass that begins. ``fingerprint``: another one when parameters have changed. ``forward``:
        whose output the pass goes through; the mode of one that was not seen is not compared."""
        self._passes = self._passes + 1 if fingerprint == self._fingerprint else 0
        self._fingerprint, self._unchecked = fingerprint, (iteration, self._passes + 1)
        mode = (0.0, 0.0) if forward is None else (float(forward.training), float(not forward.training))
        bits = self._passes & 1, self._passes >> 1 & 1
        return *mode, *(float(each) for bit in bits for each in (bit, 1 - bit))

    def on_arrival(self) -> None:
        """Checks the step message, which has arrived. Raises, on every rank, if the ranks are in different passes, and
        on the others if a pass has failed on some ranks. One that has failed on all of them may be caught by all."""
        if self._unchecked is not None:
            received = self._message.receive(self._unchecked)
            self._unchecked = None
            if received is not None and self._error is None:
                self._error = self._error_of(received)
        self.check()

    def check(self) -> None:
        """Raises the error that was found."""
        if self._error is not None:
            raise self._error

    def _error_of(self, received: Received) -> Error | None:
        iteration, number = received.note
        if received.differs:
            return refused(
                f"iteration {iteration} was backward pass number {number} of this rank since its parameters last "
                "changed, and another rank was in another one, or in another mode (train() or eval()): their gradients "
                f"do not belong together. {_ONE_PASS}"
            )
        if received.has_failed and iteration not in self._failed_here:
            return refused(
                f"in iteration {iteration} the backward pass of another rank failed, so its gradients are missing in "
                "the sums; let an error inside backward (out of memory, for example) end the training, or let all "
                "ranks skip that step, and continue from the last checkpoint"
            )
        return None

    def is_comparison_due(self, iteration: int) -> bool:
        """Returns whether the ranks are compared in this iteration, which has the same number on all ranks."""
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
        what = "comparing the sums that the ranks have received"
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
