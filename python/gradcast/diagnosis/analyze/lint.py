"""Common misconfigurations of data-parallel training: which are present, what each costs, and how to fix it.

Only what was seen counts as a mistake. Unknown evidence finds nothing, and neither does a measured cost that does not
exceed the spread of its measurement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.lint_costs import Predictions
from gradcast.diagnosis.analyze.measurements import TrainingSetup
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
    """What the rules look at. ``hosts`` are all hosts of the training; every parameter of it has a gradient."""

    setup: TrainingSetup
    step_ms: float
    hosts: Sequence[HostCpu]
    costs: Mapping[str, Estimate]  # of DDP's options that are on, and of too many threads ("threads"), if measured
    network_findings: Mapping[str, str]  # sentences of the network check by key
    predictions: Predictions | None  # None without a trial


def mistakes(evidence: Evidence) -> list[Mistake]:
    """Lists the mistakes: the costliest first, those without a cost last."""
    rules = (_late_gradients, _parameter_order, _find_unused, _broadcast, _threads, _interface, _connections)
    found = [finding for rule in rules if (finding := rule(evidence)) is not None]
    return sorted(found, key=lambda each: -(each.cost_ms or 0.0))


def _late_gradients(evidence: Evidence) -> Mistake | None:
    """Gradients, or only the first bucket, become ready when backward is nearly over."""
    seen = evidence.predictions
    if seen is None or len(seen.ready_ms) < 2:
        return None
    if min(seen.ready_ms) <= LATE * seen.backward_ms:
        return _late_bucket(evidence, seen)
    if evidence.setup.compiled:
        key = "whole_graph_compiled"
        title = (
            "the whole model is compiled, so all gradients become ready when backward ends and none overlaps with it"
        )
        remedy = "compile the layers instead: for block in model.blocks: block.compile()"
    else:
        key = "gradients_at_the_end"
        title = "all gradients become ready in the last tenth of backward, so none overlaps with it"
        remedy = "look for what delays them: one custom autograd function, or one checkpoint, around the whole model"
    return _predicted(evidence, key, title, remedy, seen.even_ms)


def _late_bucket(evidence: Evidence, seen: Predictions) -> Mistake | None:
    ready_ms = max(seen.ready_ms[index] for index in seen.buckets[0])
    if ready_ms <= LATE * seen.backward_ms:
        return None
    title = (
        f"DDP's first bucket (of {len(seen.buckets)}) is ready after {ready_ms / seen.backward_ms:.0%} of backward, so "
        "almost nothing overlaps with it"
    )
    remedy = f"use DistributedDataParallel(model, bucket_cap_mb={seen.best_cap_mib}), or gradcast.attach, which plans "
    return _predicted(evidence, "late_first_bucket", title, remedy + "its own blocks", seen.best_buckets_ms)


def _parameter_order(evidence: Evidence) -> Mistake | None:
    """DDP sends buckets in order. If they follow registration order, a late bucket holds up buckets that are ready.

    If DDP rebuilds its buckets, the order of registration does not matter.
    """
    seen = evidence.predictions
    if seen is None or evidence.setup.rebuilt:
        return None
    latest, blocked_ms = 0.0, 0.0
    for bucket in seen.buckets:
        ready_ms = max(seen.ready_ms[index] for index in bucket)
        blocked_ms = max(blocked_ms, latest - ready_ms)
        latest = max(latest, ready_ms)
    if blocked_ms <= BLOCKED * seen.backward_ms:
        return None
    title = f"parameters are not registered in the order of use: a ready bucket waits {blocked_ms:.1f} ms for another"
    remedy = "create modules in the order of their calls, or leave find_unused_parameters out, so that DDP reorders"
    return _predicted(evidence, "parameter_order", title, remedy, seen.used_ms)


def _find_unused(evidence: Evidence) -> Mistake | None:
    if not evidence.setup.find_unused_parameters:
        return None
    title = "find_unused_parameters=True, but every parameter was used: DDP searches the graph in each step in vain"
    return _measured(evidence, "find_unused_parameters", title, "leave find_unused_parameters out")


def _broadcast(evidence: Evidence) -> Mistake | None:
    setup = evidence.setup
    if not setup.broadcast_buffers or not setup.buffer_bytes:
        return None
    title = f"broadcast_buffers: each step begins by waiting for {setup.buffer_bytes} bytes of rank 0's buffers"
    remedy = "DistributedDataParallel(model, broadcast_buffers=False); broadcast them before evaluation and saving"
    return _measured(evidence, "broadcast_buffers", title, remedy)


def _threads(evidence: Evidence) -> Mistake | None:
    host = max(evidence.hosts, key=lambda each: each.threads / each.cores)
    if host.threads <= host.cores:
        return None
    title = f"on {host.name}, {host.threads} threads compute on {host.cores} cores and compete for them"
    fewer = [] if host.fitting_threads is None else [f"OMP_NUM_THREADS={host.fitting_threads}"]
    fewer += ["fewer ranks per host"] if host.ranks > host.cores else []
    return _measured(evidence, "threads", title, ", and ".join(fewer))


def _interface(evidence: Evidence) -> Mistake | None:
    sentence = next((each for key, each in evidence.network_findings.items() if key in _INTERFACE_KEYS), None)
    if sentence is None:
        return None
    better_ms = None if evidence.predictions is None else evidence.predictions.interface_ms
    return _predicted(evidence, "interface", "the chosen network interface is not the best one", sentence, better_ms)


def _connections(evidence: Evidence) -> Mistake | None:
    limited = (host for host in evidence.hosts if any(each.get(CONNECTIONS_VARIABLE) == "1" for each in host.variables))
    host = next(limited, None)
    if evidence.setup.device != "cuda" or host is None:
        return None
    return Mistake(
        "cuda_connections",
        f"{CONNECTIONS_VARIABLE}=1 on {host.name}: all streams share one queue to the GPU, so communication waits for "
        "compute",
        None,
        f"unset {CONNECTIONS_VARIABLE} (only Megatron's tensor parallelism needs it)",
    )


def _measured(evidence: Evidence, key: str, title: str, remedy: str) -> Mistake | None:
    cost = evidence.costs.get(key)
    if cost is not None and cost.low <= 0:
        return None
    return Mistake(key, title, None if cost is None else cost.value, remedy)


def _predicted(evidence: Evidence, key: str, title: str, remedy: str, better_ms: float | None) -> Mistake | None:
    """A mistake whose cost is predicted. ``better_ms`` is the step without the mistake."""
    if evidence.predictions is None or better_ms is None:
        return Mistake(key, title, None, remedy)
    cost_ms = evidence.predictions.now_ms - better_ms
    return Mistake(key, title, cost_ms, remedy) if cost_ms > PREDICTION_ERROR * evidence.step_ms else None
