"""What the ranks compute in a step: measured in the warm-up and beside a plan, and put into a profile."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from gradcast import _core
from gradcast.errors import Error
from gradcast.files import scaled_profile
from gradcast.training.measure.step_trace import StepRecord

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Compute:
    """Of a step, ns, with nothing waited for. Forward is everything but backward and the update, as in a profile."""

    backward_ns: float
    forward_ns: float
    update_ns: float

    @property
    def total_ns(self) -> float:
        return self.backward_ns + self.forward_ns + self.update_ns


class Shares(NamedTuple):
    """Of a step's parts: how many times what they are in a profile."""

    backward: float
    forward: float
    update: float


def compute_of(record: StepRecord, busy_ns: float) -> Compute:
    """``busy_ns``: of the step, what it did not wait."""
    backward_ns, update_ns = record.total_ns("backward"), record.total_ns("update")
    return Compute(backward_ns, max(0.0, busy_ns - backward_ns - update_ns), update_ns)


def shares(profile: _core.Profile, compute: Compute) -> Shares:
    old = profile.backward_ns, profile.forward_ns, sum(tensor.update_ns for tensor in profile.tensors)
    found = zip(dataclasses.astuple(compute), old, strict=True)
    return Shares(*(new_ns / old_ns if old_ns > 0 else 1.0 for new_ns, old_ns in found))


def scaled(profile: _core.Profile, by: Shares) -> _core.Profile:
    """What happens within a part of a step stays at the same share of it."""
    return scaled_profile(profile, by.forward, backward_factor=by.backward, update_factor=by.update)


def with_compute(profile: _core.Profile, compute: Compute) -> _core.Profile:
    """Each part of a step as long as ``compute`` says."""
    return scaled(profile, shares(profile, compute))


def scatter(profile: _core.Profile, steps: Sequence[Sequence[Compute]]) -> tuple[Shares, ...]:
    """How far each step, as its slowest rank has computed it, is from the profile's usual one. ``steps``: by step and
    rank."""
    return tuple(shares(profile, _slowest(ranks)) for ranks in steps)


def of_slowest(steps: Sequence[Sequence[Compute]]) -> Compute:
    """Of the usual step. ``steps``: by step and rank. Raises where there is none.

    In each step it is the slowest rank's, since all wait for it: a block needs every rank's gradient. Where compute
    scatters that is now one rank and now another, and the usual time of each of them is less than what a step takes.
    """
    if not steps:
        raise Error("no step could be measured: backward has failed in each of them", "invalid_use")
    slowest = [_slowest(ranks) for ranks in steps]
    return Compute(
        statistics.median(each.backward_ns for each in slowest),
        statistics.median(each.forward_ns for each in slowest),
        statistics.median(each.update_ns for each in slowest),
    )


def _slowest(ranks: Sequence[Compute]) -> Compute:
    return max(ranks, key=lambda each: each.total_ns)


def measured_by_all(ranks: Sequence[Sequence[T | None]]) -> list[tuple[T, ...]]:
    """By step and rank, of the steps in which no rank lacks it. ``ranks``: by rank and step."""
    return [step for step in zip(*ranks, strict=True) if None not in step]
