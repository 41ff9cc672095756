"""What limits this training, in one word and one sentence.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, STAGE_WORDS, TRAFFIC, Straggler

# Stalls of less than this share of a step are not what limits it.
_COMPUTE_BOUND = 0.05
# A mistake that costs more is the first thing to mend.
_COSTLY = 0.10


@dataclass(frozen=True)
class Verdict:
    """``kind``: compute-bound, bandwidth-bound, latency-bound, straggler, data-bound, misconfigured."""

    kind: str
    sentence: str


def verdict(
    step: Estimate,
    parts: Mapping[str, Estimate],
    straggler: Straggler | None,
    *,
    latency_share: float | None,
    mistake: tuple[str, float] | None = None,
) -> Verdict:
    """``latency_share``: of starting operations in the time that all of them take; None: not known. ``mistake``: the
    costliest that was found, and its ms per step."""
    shares = _shares(step, parts)
    if mistake is not None and mistake[1] >= _COSTLY * step.value:
        return Verdict("misconfigured", f"{mistake[0]}: {mistake[1]:.0f} of {step.value:.0f} ms per step.")
    largest = max(shares, key=lambda name: shares[name])
    if sum(shares.values()) < _COMPUTE_BOUND:
        return _compute_bound(step.value, parts)
    ms = shares[largest] * step.value
    return {
        "communication": _network_bound(ms, shares[largest], step.value, parts, latency_share),
        "data": _data_bound(ms, shares[largest], parts),
        "waiting": _straggles(ms, shares[largest], straggler),
    }[largest]


def _compute_bound(step_ms: float, parts: Mapping[str, Estimate]) -> Verdict:
    computing = sum(parts[part].value for part in COMPUTE) / step_ms
    launching, loop = (parts[part].value / step_ms for part in ("launch", "loop"))
    text = f"Compute is the limit: {computing:.0%} of the step's {step_ms:.0f} ms"
    if launching > computing:
        text = f"Launching is the limit: Python and the framework take {launching:.0%} of the step's {step_ms:.0f} ms, "
        text += f"computing {computing:.0%}"
    elif launching > _COMPUTE_BOUND:
        text += f", and launching operations, Python and the framework another {launching:.0%}"
    if loop > _COMPUTE_BOUND:
        text += f", and the loop's own work (the loss, logging, data that no DataLoader loads) another {loop:.0%}"
    return Verdict("compute-bound", f"{text}; data, network and slow ranks cost almost nothing.")


def _shares(step: Estimate, parts: Mapping[str, Estimate]) -> dict[str, float]:
    groups = {
        "communication": TRAFFIC,
        "data": DATA,
        "waiting": ("waiting",),
    }
    return {name: sum(max(0.0, parts[part].value) for part in members) / step.value for name, members in groups.items()}


def _network_bound(
    ms: float, share: float, step_ms: float, parts: Mapping[str, Estimate], latency_share: float | None
) -> Verdict:
    inside = parts["interconnect"].value > parts["network"].value
    where = "between the devices of a node" if inside else "between nodes"
    text = f"{share:.0%} of the step, {ms:.0f} of {step_ms:.0f} ms, is gradients on the network {where}"
    if latency_share is not None and latency_share > 0.5:
        return Verdict(
            "latency-bound",
            f"{text}, and {latency_share:.0%} of their time goes into starting operations: fewer and larger ones can "
            "help, a wider network does not.",
        )
    return Verdict("bandwidth-bound", f"{text} that nothing hides.")


def _data_bound(ms: float, share: float, parts: Mapping[str, Estimate]) -> Verdict:
    storage = parts["data_storage"].value > parts["data_cpu"].value
    cause = "reading it from storage" if storage else "preparing it on the CPU"
    return Verdict("data-bound", f"{share:.0%} of the step, {ms:.0f} ms, is waiting for data, mostly for {cause}.")


def _straggles(ms: float, share: float, straggler: Straggler | None) -> Verdict:
    if straggler is None:
        return Verdict("straggler", f"{share:.0%} of the step, {ms:.0f} ms, is waiting for a slower rank.")
    where = STAGE_WORDS[straggler.stage]
    layer = f", most of it in {straggler.layer}" if straggler.layer else ""
    return Verdict(
        "straggler",
        f"{share:.0%} of the step, {ms:.0f} ms, is waiting for rank {straggler.rank}, which takes longer in "
        f"{where}{layer}.",
    )
