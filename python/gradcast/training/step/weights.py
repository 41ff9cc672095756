"""Weighted means: a step's gradient is Σ n_r g_r / Σ n_r over the ranks r, where n_r is given to ``handle.weight``.

The sum of all weights comes too late to scale by. So each rank sends g_r · n_r / (n_ref · W), where n_ref is the mean
weight of the last step, which all ranks know; the sum is multiplied by n_ref / mean of this step. A rank whose weight
is n_ref scales by 1 / W, and where the mean is n_ref nothing is multiplied: the bits are DDP's.

The weights are sent beside the blocks, as float64, in a message that begins before them. The first step waits for it,
and then n_ref is its own mean. So does each step whose gradients are fp16 or int8 on the wire: numbers far from 1 leave
fp16's range, and int8 keeps rounding errors for the next step, which must be of the same scale.

Thread safety: under the session's lock; ``scale`` may be read by autograd's threads.
"""

import contextlib
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradcast.errors import Error, refused
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.together import device_of_messages
from gradcast.training.step import pending
from gradcast.training.step.gradient_exchange import GradientExchange

# Sent in place of a weight: of a backward pass outside of handle.weight(), and of something that is no number.
_OMITTED, _NO_NUMBER = -math.inf, math.inf
_MAX = 2.0**53  # a float64 holds whole numbers up to here


class GivenWeights:
    """The weights of one rank, as the program gives them; it outlives sessions.

    ``active``: steps are weighted, on all ranks. ``used``: the open block's weight has been sent. ``share``: the factor
    of this rank's gradients of the step that begins, in place of 1 / world size; 0: they do not count.
    """

    share: Callable[[], float] | None = None

    def __init__(self, setting: str | None) -> None:
        """``setting``: as in Options."""
        self.active = setting is not None
        self.used = False
        self._open: list[float] = []  # of open handle.weight() blocks
        # By id of a module: of its forward passes since the last backward pass. None: not known.
        self._samples: dict[int, int | None] = {}
        self._last = _OMITTED

    def enter(self, weight: Any) -> None:
        self._open.append(_number(weight))
        self.used = False

    def leave(self) -> None:
        self._open.pop()

    @property
    def contributes(self) -> bool:
        """True if the open block's weight demands a backward pass."""
        return self._open[-1] > 0 and self._open[-1] != _NO_NUMBER

    def count_samples(self, module: nn.Module, inputs: Any) -> None:
        """Counts the samples of a training forward pass. A batch is as long as the first tensor of the inputs."""
        first = next((each for each in pending.tensors_in(inputs) if each.dim() > 0), None)
        before = self._samples.get(id(module), 0)
        self._samples[id(module)] = None if first is None or before is None else before + first.shape[0]

    def take(self) -> float:
        """The weight of the backward pass that begins."""
        if self._samples:  # with several modules, each is given the batch
            counts = self._samples.values()
            self._last = _NO_NUMBER if None in counts else float(max(counts))
            self._samples.clear()
        self.used = True
        return self._open[-1] if self._open else self._last


class StepWeights:
    """The weights of a step. ``scale``: the factor of this rank's gradients; if 0, they are not to be looked at."""

    def __init__(self, given: GivenWeights, exchange: GradientExchange, group: Group) -> None:
        self.given = given
        self._buffers, self._exchange, self._group = exchange.buffers, exchange, group
        self._waits = exchange.buffers.wire in ("fp16", "int8") or torch.float16 in exchange.buffers.dtypes
        self._reference: float | None = None
        self._numbers: Any = None  # carries the weights
        self._is_sent = False  # those of the open step, and not received
        self._own = _OMITTED
        self._factor = 1.0  # of the open step
        self._due: set[int] = set()  # parameters whose sums are not multiplied by it yet
        self.last: Sequence[float] | None = None  # of each rank, in the step that was received last; None without any
        self._error: Error | None = None
        self.scale = 1.0 / group.world_size

    def begin_step(self, parameter_count: int) -> None:
        """Sends this rank's weight. REQUIRES: nothing is in flight."""
        self.receive()
        self.scale, self._factor = 1.0 / self._group.world_size, 1.0
        if self.given.share is not None:
            self.scale = self.given.share()
        self._due.clear()
        if not self.given.active:
            return
        self._own = self.given.take()
        group = self._group
        with self._waiting():
            if self._numbers is None:
                device = device_of_messages(group.own, group.device)
                self._numbers = extension.load().Numbers(group.world_size, device)
            self._numbers.begin(group.own, self._own)
        self._is_sent = True
        if self._waits or self._reference is None:
            self._reference = None
            self.receive()
        else:
            self._due.update(range(parameter_count))
        if self._reference is not None and self._own not in (self._reference, _OMITTED):
            self.scale = self._own / (self._reference * group.world_size) if 0 < self._own <= _MAX else 0.0

    def receive(self) -> None:
        """Waits for the weights of the open step. Raises Error, on every rank, if they make no mean."""
        if self._is_sent:
            with self._waiting():
                weights = self._numbers.wait()
            self._is_sent = False
            self._error = self._refusal(weights)
            self.last = None
            if self._error is None and weights[0] != _OMITTED:
                self.last = weights
                mean = exact_mean(weights)
                if self._reference is not None:
                    self._factor = self._reference / mean
                self._reference = mean
        if self._error is not None:
            raise self._error

    @property
    def reference(self) -> float | None:
        """n_ref of the next step; None if that will wait for its own."""
        self.receive()
        return None if self._waits else self._reference

    def go_on_from(self, reference: float | None) -> None:
        """Continues from the ``reference`` of a checkpoint, the same on all ranks."""
        self._reference = reference

    def factor(self) -> float:
        """The factor of the sums of the open step."""
        self.receive()
        return self._factor

    def finish(self, indices: Iterable[int]) -> None:
        """Makes the sums of these parameters the mean. REQUIRES: they have arrived."""
        if self._error is None and not self._due:
            return
        factor, due = self.factor(), self._due.intersection(indices)
        self._due -= due
        if factor != 1.0 and due:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                torch._foreach_mul_([self._buffers.views[index] for index in sorted(due)], factor)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        what = "the ranks' weights"
        with self._exchange.watch.waiting(what), self._group.naming(what):
            yield

    def _refusal(self, weights: Sequence[float]) -> Error | None:
        for rank, weight in enumerate(weights):
            if weight != _OMITTED and not 0 <= weight <= _MAX:
                given = f"{weight:g}" if weight != _NO_NUMBER else "something else (of a tensor give its .item())"
                return refused(f"the weight of rank {rank} must be a number from 0 to 2^53, and it is {given}")
        without = [rank for rank, weight in enumerate(weights) if weight == _OMITTED]
        if without and len(without) < len(weights):
            return refused(
                f"rank {without[0]} has run backward outside of handle.weight(), and other ranks inside; put it around "
                "backward on every rank, with the number of that rank's samples"
            )
        if not any(weights):
            return refused("the weights of all ranks are 0, so there is no mean; let all ranks skip such a step")
        return None


def check_single(weight: Any) -> None:
    """Raises Error(invalid_use) for a weight that a single worker cannot have."""
    if not 0 < _number(weight) <= _MAX:
        raise refused(f"the weight of the only worker must be a number above 0 and up to 2^53, and it is {weight!r}")


def _number(weight: Any) -> float:
    is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
    return float(weight) if is_number and not abs(weight) > _MAX else _NO_NUMBER


def exact_mean(weights: Sequence[float]) -> float:
    """The mean; exactly the weight of all ranks, if they have the same."""
    return weights[0] if len(set(weights)) == 1 else math.fsum(weights) / len(weights)
