"""The verdict: what limits this training, in one word and one sentence.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, TRAFFIC, Straggler
from gradcast.diagnosis.runs import STAGE_WORDS

# A smaller share of the step is not what limits it.
_LIMITING_SHARE = 0.05
# A misconfiguration that costs a larger share of the step is the first thing to fix.
_COSTLY_SHARE = 0.10


@dataclass(frozen=True)
class Bottleneck:
    """``kind`` is compute-bound, bandwidth-bound, latency-bound, straggler, data-bound, or misconfigured."""

    kind: str
    sentence: str


def bottleneck(
    step: Estimate,
    parts: Mapping[str, Estimate],
    straggler: Straggler | None,
    *,
    latency_share: float | None,
    mistake: tuple[str, float] | None = None,
) -> Bottleneck:
    """Names the bottleneck.

    ``latency_share`` is the share of communication time that goes into starting operations; None if unknown.
    ``mistake`` is the title of the costliest misconfiguration and its ms per step.
    """
    shares = _shares(step, parts)
    if mistake is not None and mistake[1] >= _COSTLY_SHARE * step.value:
        return Bottleneck("misconfigured", f"{mistake[0]}: {mistake[1]:.0f} of {step.value:.0f} ms per step.")
    largest = max(shares, key=lambda name: shares[name])
    if sum(shares.values()) < _LIMITING_SHARE:
        return _compute_bound(step.value, parts)
    ms = shares[largest] * step.value
    return {
        "communication": _network_bound(ms, shares[largest], step.value, parts, latency_share),
        "data": _data_bound(ms, shares[largest], parts),
        "waiting": _straggles(ms, shares[largest], straggler),
    }[largest]


def _compute_bound(step_ms: float, parts: Mapping[str, Estimate]) -> Bottleneck:
    computing = sum(parts[part].value for part in COMPUTE) / step_ms
    launch, loop = (parts[part].value / step_ms for part in ("launch", "loop"))
    text = f"Compute is the limit: it takes {computing:.0%} of the step's {step_ms:.0f} ms"
    if launch > computing:
        text = f"Launch overhead (Python and the framework) is the limit: it takes {launch:.0%} of the step's "
        text += f"{step_ms:.0f} ms, compute {computing:.0%}"
    elif launch > _LIMITING_SHARE:
        text += f", launch overhead (Python and the framework) another {launch:.0%}"
    if loop > _LIMITING_SHARE:
        text += f", the loop's own work (the loss, logging, data not from a DataLoader) another {loop:.0%}"
    return Bottleneck("compute-bound", f"{text}; data loading, network and slow ranks cost almost nothing.")


def _shares(step: Estimate, parts: Mapping[str, Estimate]) -> dict[str, float]:
    groups = {
        "communication": TRAFFIC,
        "data": DATA,
        "waiting": ("waiting",),
    }
    return {name: sum(max(0.0, parts[part].value) for part in members) / step.value for name, members in groups.items()}


def _network_bound(
    ms: float, share: float, step_ms: float, parts: Mapping[str, Estimate], latency_share: float | None
) -> Bottleneck:
    inside = parts["interconnect"].value > parts["network"].value
    where = "between the devices of a node" if inside else "between nodes"
    text = f"{share:.0%} of the step, {ms:.0f} of {step_ms:.0f} ms, is exposed communication {where}"
    if latency_share is not None and latency_share > 0.5:
        return Bottleneck(
            "latency-bound",
            f"{text}, and {latency_share:.0%} of communication time goes into starting operations: fewer, larger "
            "operations can help; more bandwidth does not.",
        )
    return Bottleneck("bandwidth-bound", f"{text}.")


def _data_bound(ms: float, share: float, parts: Mapping[str, Estimate]) -> Bottleneck:
    storage = parts["data_storage"].value > parts["data_cpu"].value
    cause = "reading it from storage" if storage else "preparing it on the CPU"
    return Bottleneck("data-bound", f"{share:.0%} of the step, {ms:.0f} ms, is waiting for data, mostly {cause}.")


def _straggles(ms: float, share: float, straggler: Straggler | None) -> Bottleneck:
    if straggler is None:
        return Bottleneck("straggler", f"{share:.0%} of the step, {ms:.0f} ms, is waiting for a slower rank.")
    where = STAGE_WORDS[straggler.stage]
    layer = f", most of it in {straggler.layer}" if straggler.layer else ""
    return Bottleneck(
        "straggler",
        f"{share:.0%} of the step, {ms:.0f} ms, is waiting for rank {straggler.rank}, which takes longer in "
        f"{where}{layer}.",
    )
