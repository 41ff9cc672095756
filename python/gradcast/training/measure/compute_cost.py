"""Compute time of the ranks per step: measured during the warm-up and beside a plan, and put into a profile."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

from gradcast import _core
from gradcast.errors import refused
from gradcast.files import scaled_profile
from gradcast.training.measure.clocks import Clock
from gradcast.training.measure.step_trace import Stamp, StepRecord

T = TypeVar("T")


class Compute(NamedTuple):
    """Compute time of one step, ns, without waiting.

    As in a profile, forward is everything but backward and the update, which is that of one call of the optimizer.
    """

    backward_ns: float
    forward_ns: float
    update_ns: float

    @property
    def total_ns(self) -> float:
        return self.backward_ns + self.forward_ns + self.update_ns


class ComputeFactors(NamedTuple):
    """A step's compute as multiples of the times in a profile."""

    backward: float
    forward: float
    update: float


def compute_of(record: StepRecord, busy_ns: float, part_ns: float = 0.0, clock: Clock | None = None) -> Compute:
    """Returns the compute time of a recorded step. ``busy_ns``: the step without its waits. ``part_ns``: cost of each
    further part of the update. ``clock``: see StepRecord.total_ns."""
    busy_ns = max(0.0, busy_ns)  # waits of several threads may be longer than their step
    backward_ns, update_ns = min(record.total_ns("backward", clock), busy_ns), record.total_ns("update", clock)
    forward_ns = max(0.0, busy_ns - backward_ns - update_ns)
    return Compute(backward_ns, forward_ns, max(0.0, update_ns - part_ns * max(0, record.update_calls - 1)))


def device_compute_of(record: StepRecord, end: Stamp, clock: Clock, part_ns: float) -> Compute | None:
    """The same on a device, for which the host waits; None if the stamps leave no time for backward. REQUIRES: the
    record begins with a stamp. ``end``: where the next one begins."""
    busy_ns = clock.between(cast(Stamp, record.start_ns).event, end.event) - record.total_ns("wait", clock)
    compute = compute_of(record, busy_ns, part_ns, clock)
    return compute if compute.backward_ns > 0 else None


def compute_factors(profile: _core.Profile, compute: Compute) -> ComputeFactors:
    old = profile.backward_ns, profile.forward_ns, sum(tensor.update_ns for tensor in profile.tensors)
    pairs = zip(compute, old, strict=True)
    return ComputeFactors(*(new_ns / old_ns if old_ns > 0 else 1.0 for new_ns, old_ns in pairs))


def scale_compute(profile: _core.Profile, factors: ComputeFactors) -> _core.Profile:
    """Multiplies the compute times. Events keep their relative position within backward and forward."""
    return scaled_profile(profile, factors.forward, backward_factor=factors.backward, update_factor=factors.update)


def replace_compute(profile: _core.Profile, compute: Compute) -> _core.Profile:
    """The profile with backward, forward and update as long as ``compute`` says."""
    return scale_compute(profile, compute_factors(profile, compute))


def compute_variation(profile: _core.Profile, steps: Sequence[Sequence[Compute]]) -> tuple[ComputeFactors, ...]:
    """Returns the slowest rank's compute in each step, relative to the profile. ``steps``: by step and rank."""
    return tuple(compute_factors(profile, _slowest(ranks)) for ranks in steps)


def typical_compute(steps: Sequence[Sequence[Compute]]) -> Compute:
    """Medians over the steps of the slowest rank's compute. ``steps``: by step and rank.

    A block needs every rank's gradient, so all ranks wait for the slowest one. If compute times vary, that is a
    different rank from step to step, and each rank's own median is shorter than what a step takes.

    Raises Error if there are no steps.
    """
    if not steps:
        raise refused(
            "no step could be measured, because backward failed in each of them; fix the error in backward first"
        )
    return Compute(*map(statistics.median, zip(*map(_slowest, steps), strict=True)))


def _slowest(ranks: Sequence[Compute]) -> Compute:
    return max(ranks, key=lambda each: each.total_ns)


def steps_known_on_all_ranks(ranks: Sequence[Sequence[T | None]]) -> list[tuple[T, ...]]:
    """The steps that every rank has measured, by step and rank. ``ranks``: by rank and step, None if not measured."""
    return [step for step in zip(*ranks, strict=True) if None not in step]
