"""The measurements of each rank, and the setup that all ranks share."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradcast.diagnosis.analyze.estimates import Estimate, estimate
from gradcast.diagnosis.analyze.step_breakdown import RankSteps
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.trace.merged import Clock, RankTrace

if TYPE_CHECKING:  # needs torch, which this module does not
    from gradcast.diagnosis.probe.trial import Trial


@dataclass(frozen=True)
class RankMeasurements:
    steps: RankSteps
    options: Mapping[str, Sequence[float]]  # step ms without one of DDP's options, by its name
    trial: "Trial | None"
    clocks: list[Clock]  # of all ranks; only on rank 0, and only if there was a trial
    network: dict[str, Any] | None
    launch_unknown: str | None  # why launch overhead could not be measured; the same on all ranks
    probe_steps: int
    process: environment.Process


@dataclass(frozen=True)
class TrainingSetup:
    """Facts that are the same on all ranks."""

    backend: str
    device: str  # "cpu" or "cuda"
    torch: str  # version
    model: str
    parameter_bytes: dict[str, int]  # by name, in the order of registration
    caps_bytes: tuple[int, int]  # of DDP's first bucket and of the others
    is_fp32: bool
    compiled: bool  # torch.compile was applied to the whole module
    find_unused_parameters: bool
    rebuilt: bool  # whether DDP rebuilds its buckets in the order in which gradients became ready
    broadcast_buffers: bool
    buffer_bytes: int
    warmup_steps: int
    # Whether the loop reads or writes gradients between backward and step(), as clipping does. Then it waits there for
    # all of them, and nothing overlaps with forward.
    gradients_used: bool
    # Lines of the loop that use gradients or parameters between backward and forward: where, what, advice, and the
    # names of the parameters.
    early_uses: Sequence[Mapping[str, Any]] = ()


def aligned_traces(ranks: Sequence[RankMeasurements]) -> list[RankTrace]:
    """Returns the trials' traces on rank 0's clock, or an empty list if there was no trial."""
    if any(each.trial is None or each.trial.trace is None for each in ranks):
        return []
    return [
        replace(each.trial.trace, clock=clock, host=each.steps.host).aligned()
        for each, clock in zip(ranks, ranks[0].clocks, strict=True)
    ]


def option_costs(ranks: Sequence[RankMeasurements]) -> dict[str, Estimate]:
    """Returns the cost of each measured DDP option, and of too many threads, per step of the slowest rank."""
    with_it = [each.steps.probes["cluster"]["step"] for each in ranks]

    def cost(*drawn: Sequence[float]) -> float:
        medians = [statistics.median(samples) for samples in drawn]
        return max(medians[: len(with_it)]) - max(medians[len(with_it) :])

    return {name: estimate(cost, *with_it, *(each.options[name] for each in ranks)) for name in ranks[0].options}
