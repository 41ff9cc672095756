"""Common misconfigurations of data-parallel training: which are present, what each costs, and how to fix it.

Only what was seen counts as a mistake. Unknown evidence finds nothing, and neither does a measured cost that does not
exceed the spread of its measurement.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.observe.environment import CONNECTIONS_VARIABLE, HostCpu

# Share of backward. What becomes ready later has at most a tenth of backward to overlap with.
LATE = 0.9
# Share of backward for which a ready bucket waits for an earlier one. Less happens in every network whose layers do not
# finish one by one.
BLOCKED = 0.1
# Share of the step; predictions by `play` are not more accurate than this.
PREDICTION_ERROR = 0.01
# Keys of the network check's findings that are misconfigurations.
_INTERFACE_KEYS = ("slow_interface", "virtual_interface")


@dataclass(frozen=True)
class Mistake:
    key: str
    title: str
    cost_ms: float | None  # per step; None if it was not measured
    remedy: str


@dataclass(frozen=True)
class Evidence:
    """What the rules look at. None means unknown. Times are in ms.

    * ``ready_ms``: when each gradient became ready, from the start of backward; ``backward_ms``: how long backward
      took; ``step_ms``: a whole step.
    * ``buckets``: DDP's buckets in the order in which they are sent, as indices into ``ready_ms``.
    * ``compiled``: whether torch.compile was applied to the whole module.
    * ``find_unused_parameters``, ``broadcast_buffers``: DDP's settings. ``rebuilt``: whether DDP rebuilds its buckets
      in the order in which gradients became ready. ``all_used``: whether every trainable parameter had a gradient in
      each observed step.
    * ``find_unused_cost``, ``broadcast_cost``: a step with the setting less one without it. ``threads_cost``: a step
      less one with a fitting number of threads.
    * ``device``: "cpu" or "cuda". ``hosts``: all hosts of the training.
    * ``network_findings``: sentences of the network check by key.
    * ``predicted_..._ms``: a step as ``play`` predicts it for DDP at present, with gradients that become ready evenly
      during backward, with the best bucket size (``best_cap_mib``), with parameters registered in the order of use, and
      over the fastest network interface.
    """

    ready_ms: Sequence[float] | None = None
    backward_ms: float | None = None
    step_ms: float | None = None
    buckets: Sequence[Sequence[int]] | None = None
    compiled: bool | None = None
    find_unused_parameters: bool | None = None
    rebuilt: bool | None = None
    all_used: bool | None = None
    find_unused_cost: Estimate | None = None
    broadcast_buffers: bool | None = None
    buffer_bytes: int | None = None
    broadcast_cost: Estimate | None = None
    device: str | None = None
    hosts: Sequence[HostCpu] = ()
    threads_cost: Estimate | None = None
    network_findings: Mapping[str, str] = field(default_factory=dict)
    predicted_ms: float | None = None
    predicted_even_ms: float | None = None
    predicted_best_buckets_ms: float | None = None
    best_cap_mib: int | None = None
    predicted_used_ms: float | None = None
    predicted_interface_ms: float | None = None


def mistakes(evidence: Evidence) -> list[Mistake]:
    """Lists the mistakes: the costliest first, those without a cost last."""
    rules = (_late_gradients, _parameter_order, _find_unused, _broadcast, _threads, _interface, _connections)
    found = [finding for rule in rules if (finding := rule(evidence)) is not None]
    return sorted(found, key=lambda each: -(each.cost_ms or 0.0))


def _late_gradients(evidence: Evidence) -> Mistake | None:
    """Gradients, or only the first bucket, become ready when backward is nearly over."""
    if not evidence.ready_ms or not evidence.backward_ms or len(evidence.ready_ms) < 2:
        return None
    if min(evidence.ready_ms) > LATE * evidence.backward_ms:
        return _compiled(evidence) if evidence.compiled else _all_late(evidence)
    return _late_bucket(evidence, evidence.ready_ms, evidence.backward_ms)


def _compiled(evidence: Evidence) -> Mistake | None:
    return _predicted(
        evidence,
        "whole_graph_compiled",
        "the whole model is compiled, so all gradients become ready when backward ends and none overlaps with it",
        "compile the layers instead: for block in model.blocks: block.compile()",
        evidence.predicted_even_ms,
    )


def _all_late(evidence: Evidence) -> Mistake | None:
    return _predicted(
        evidence,
        "gradients_at_the_end",
        "all gradients become ready in the last tenth of backward, so none overlaps with it",
        "look for what delays them: one custom autograd function, or one checkpoint, around the whole model",
        evidence.predicted_even_ms,
    )


def _late_bucket(evidence: Evidence, ready_ms: Sequence[float], backward_ms: float) -> Mistake | None:
    if not evidence.buckets or not evidence.buckets[0]:
        return None
    share = max(ready_ms[index] for index in evidence.buckets[0]) / backward_ms
    if share <= LATE:
        return None
    count = len(evidence.buckets)
    cap = "..." if evidence.best_cap_mib is None else evidence.best_cap_mib
    return _predicted(
        evidence,
        "late_first_bucket",
        f"DDP's first bucket (of {count}) is ready after {share:.0%} of backward, so almost nothing overlaps with it",
        f"use DistributedDataParallel(model, bucket_cap_mb={cap}), or gradcast.attach, which plans its own blocks",
        evidence.predicted_best_buckets_ms,
    )


def _parameter_order(evidence: Evidence) -> Mistake | None:
    """DDP sends buckets in order. If they follow registration order, a late bucket holds up buckets that are ready.

    If DDP rebuilds its buckets, the order of registration does not matter.
    """
    if evidence.rebuilt is not False or not evidence.buckets or not evidence.ready_ms or not evidence.backward_ms:
        return None
    latest, blocked_ms = 0.0, 0.0
    for bucket in evidence.buckets:
        ready_ms = max((evidence.ready_ms[index] for index in bucket), default=latest)
        blocked_ms = max(blocked_ms, latest - ready_ms)
        latest = max(latest, ready_ms)
    if blocked_ms <= BLOCKED * evidence.backward_ms:
        return None
    title = f"parameters are not registered in the order of use: a ready bucket waits {blocked_ms:.1f} ms for another"
    remedy = "create modules in the order of their calls, or leave find_unused_parameters out, so that DDP reorders"
    return _predicted(evidence, "parameter_order", title, remedy, evidence.predicted_used_ms)


def _find_unused(evidence: Evidence) -> Mistake | None:
    if not evidence.find_unused_parameters or not evidence.all_used:
        return None
    title = "find_unused_parameters=True, but every parameter was used: DDP searches the graph in each step in vain"
    return _measured("find_unused_parameters", title, "leave find_unused_parameters out", evidence.find_unused_cost)


def _broadcast(evidence: Evidence) -> Mistake | None:
    if not evidence.broadcast_buffers or not evidence.buffer_bytes:
        return None
    title = f"broadcast_buffers: each step begins by waiting for {evidence.buffer_bytes} bytes of rank 0's buffers"
    remedy = "DistributedDataParallel(model, broadcast_buffers=False); broadcast them before evaluation and saving"
    return _measured("broadcast_buffers", title, remedy, evidence.broadcast_cost)


def _threads(evidence: Evidence) -> Mistake | None:
    host = max(evidence.hosts, key=lambda each: each.threads / each.cores, default=None)
    if host is None or host.threads <= host.cores:
        return None
    title = f"on {host.name}, {host.threads} threads compute on {host.cores} cores and compete for them"
    fewer = [] if host.fitting_threads is None else [f"OMP_NUM_THREADS={host.fitting_threads}"]
    fewer += ["fewer ranks per host"] if host.ranks > host.cores else []
    return _measured("threads", title, ", and ".join(fewer), evidence.threads_cost)


def _interface(evidence: Evidence) -> Mistake | None:
    for key in _INTERFACE_KEYS:
        if sentence := evidence.network_findings.get(key):
            title = "the chosen network interface is not the best one"
            return _predicted(evidence, "interface", title, sentence, evidence.predicted_interface_ms)
    return None


def _connections(evidence: Evidence) -> Mistake | None:
    hosts = [
        host.name for host in evidence.hosts if any(each.get(CONNECTIONS_VARIABLE) == "1" for each in host.variables)
    ]
    if evidence.device != "cuda" or not hosts:
        return None
    return Mistake(
        "cuda_connections",
        f"{CONNECTIONS_VARIABLE}=1 on {hosts[0]}: all streams share one queue to the GPU, so communication waits "
        "for compute",
        None,
        f"unset {CONNECTIONS_VARIABLE} (only Megatron's tensor parallelism needs it)",
    )


def _measured(key: str, title: str, remedy: str, cost: Estimate | None) -> Mistake | None:
    if cost is not None and cost.low <= 0:
        return None
    return Mistake(key, title, None if cost is None else cost.value, remedy)


def _predicted(evidence: Evidence, key: str, title: str, remedy: str, better_ms: float | None) -> Mistake | None:
    """A mistake whose cost is predicted. ``better_ms`` is the step without the mistake."""
    cost_ms = _difference(evidence.predicted_ms, better_ms)
    if cost_ms is not None and cost_ms <= PREDICTION_ERROR * (evidence.step_ms or evidence.predicted_ms or 0.0):
        return None
    return Mistake(key, title, cost_ms, remedy)


def _difference(with_it: float | None, without: float | None) -> float | None:
    return None if with_it is None or without is None else with_it - without
