"""Replays measured steps with ``play``, each with the compute and the network time that were measured in it.

A prediction is made before the steps that it is compared with, and the machine may be faster or slower by then. A
replay has the steps' own compute and network times, so it shows the error of the model alone.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import gradcast
from gradcast import _core
from gradcast.files import scaled_profile
from gradcast.intervals import busy_periods_ns
from gradcast.training.observe import Step
from gradcast.training.observe import last_steps as last


class Replay(NamedTuple):
    """Median step time, replayed and measured, of the same steps."""

    replayed_ms: float
    measured_ms: float


def last_steps(handle: gradcast.Handle, count: int) -> list[Step]:
    """This rank's last ``count`` complete steps, without those that followed another plan than the one in force. They
    are sent to the other ranks without it."""
    return [dataclasses.replace(each, plan=None) for each in last(handle, count) if each.plan is handle.plan]


def replay(profile: _core.Profile, plan: _core.Plan, steps: Sequence[Sequence[Step]]) -> Replay | None:
    """Replays steps, by step and rank, with the network's time of the rank that waited least. None without steps."""
    if not steps:
        return None
    replayed_ns = []
    for ranks in steps:
        computed = _as_slowest(profile, ranks)
        planned = _core.play(computed, profile.link, plan).blocks
        planned_ns = sum(busy_periods_ns((block.launch_ns, block.finish_ns) for block in planned))
        factor = min(rank.link_ns for rank in ranks) / planned_ns
        replayed_ns.append(_core.play(computed, profile.link.scaled(factor, factor), plan).iteration_ns)
    measured_ns = [statistics.mean(rank.step_ns for rank in ranks) for ranks in steps]
    return Replay(statistics.median(replayed_ns) / 1e6, statistics.median(measured_ns) / 1e6)


def _as_slowest(profile: _core.Profile, ranks: Sequence[Step]) -> _core.Profile:
    """The profile with the compute of the rank that computed longest."""
    slowest = max(ranks, key=lambda each: each.step_ns - each.wait_ns)
    planned_ns = profile.forward_ns, profile.backward_ns, sum(tensor.update_ns for tensor in profile.tensors)
    pairs = zip((slowest.forward_ns, slowest.backward_ns, slowest.update_ns), planned_ns, strict=True)
    forward, backward, update = (new_ns / old_ns if old_ns > 0 else 1.0 for new_ns, old_ns in pairs)
    return scaled_profile(profile, forward, backward_factor=backward, update_factor=update)
