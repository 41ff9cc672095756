"""The verdict: what limits this training, in one word and one sentence."""

from gradcast.diagnosis.analyze.lint import Mistake
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, TRAFFIC, Breakdown
from gradcast.diagnosis.runs import STAGE_WORDS

# A smaller share of the step is not what limits it.
_LIMITING_SHARE = 0.05
# A misconfiguration that costs a larger share of the step is the first thing to fix.
_COSTLY_SHARE = 0.10


def bottleneck(
    found: Breakdown, *, latency_share: float | None = None, mistake: Mistake | None = None
) -> tuple[str, str]:
    """Returns the bottleneck and a sentence about it.

    ``latency_share`` is the share of communication time that goes into starting operations; None if unknown.
    ``mistake`` is the costliest misconfiguration.
    """
    step_ms = found.step.value
    if mistake is not None and (mistake.cost_ms or 0.0) >= _COSTLY_SHARE * step_ms:
        return "misconfigured", f"{mistake.title}: {mistake.cost_ms:.0f} of {step_ms:.0f} ms per step."
    groups = {"communication": TRAFFIC, "data": DATA, "waiting": ("waiting",)}
    lost_ms = {name: sum(max(0.0, found.parts[part].value) for part in parts) for name, parts in groups.items()}
    if sum(lost_ms.values()) < _LIMITING_SHARE * step_ms:
        return "compute-bound", _compute_bound(found)
    largest = max(lost_ms, key=lambda name: lost_ms[name])
    share, ms = f"{lost_ms[largest] / step_ms:.0%} of the step", f"{lost_ms[largest]:.0f}"
    if largest == "data":
        is_storage = found.parts["data_storage"].value > found.parts["data_cpu"].value
        cause = "reading it from storage" if is_storage else "preparing it on the CPU"
        return "data-bound", f"{share}, {ms} ms, is waiting for data, mostly {cause}."
    if largest == "waiting":
        return "straggler", f"{share}, {ms} ms, is waiting for {_waited_for(found)}."
    where = "nodes"
    if found.parts["interconnect"].value > found.parts["network"].value:
        where = "the devices of a node"
    text = f"{share}, {ms} of {step_ms:.0f} ms, is exposed communication between {where}"
    if latency_share is None or latency_share <= 0.5:
        return "bandwidth-bound", f"{text}."
    text += f", and {latency_share:.0%} of communication time goes into starting operations: fewer, larger "
    return "latency-bound", text + "operations can help; more bandwidth does not."


def _compute_bound(found: Breakdown) -> str:
    step_ms = found.step.value
    computing = sum(found.parts[part].value for part in COMPUTE) / step_ms
    launch, loop = (found.parts[part].value / step_ms for part in ("launch", "loop"))
    text = f"Compute is the limit: it takes {computing:.0%} of the step's {step_ms:.0f} ms"
    if launch > computing:
        text = f"Launch overhead (Python and the framework) is the limit: it takes {launch:.0%} of the step's "
        text += f"{step_ms:.0f} ms, compute {computing:.0%}"
    elif launch > _LIMITING_SHARE:
        text += f", launch overhead (Python and the framework) another {launch:.0%}"
    if loop > _LIMITING_SHARE:
        text += f", the loop's own work (the loss, logging, data not from a DataLoader) another {loop:.0%}"
    return f"{text}; data loading, network and slow ranks cost almost nothing."


def _waited_for(found: Breakdown) -> str:
    slow = found.straggler
    if slow is None:
        return "a slower rank"
    layer = f", most of it in {slow.layer}" if slow.layer else ""
    return f"rank {slow.rank}, which takes longer in {STAGE_WORDS[slow.stage]}{layer}"
