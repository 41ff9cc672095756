"""The usual mistakes of a data-parallel training: which are there, what each costs, and one line that undoes it.

Only what is seen is a finding: a fact that is not known finds nothing, and neither does a cost that was measured and is
not above the spread of the measurement.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradcast.diagnosis.analyze.estimates import Estimate

# Of backward. What is ready after that has a tenth of backward at most to hide behind.
LATE = 0.9
# Of backward, by which a bucket that is ready waits for one that was to go first: less happens in every network whose
# layers do not finish one by one.
BLOCKED = 0.1
# Of the step: a prediction by `play` is not better than that.
PREDICTION_ERROR = 0.01
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
# Of the network check's findings, those that are mistakes in a setting.
_INTERFACE_KEYS = ("slow_interface", "virtual_interface")


@dataclass(frozen=True)
class Finding:
    """``cost_ms``: of a step; None where it was not measured."""

    key: str
    title: str
    cost_ms: float | None
    remedy: str


@dataclass(frozen=True)
class Host:
    """``threads``: that compute there, of all its ranks (``ranks``) together; ``cores``: that they may use.
    ``variables``: of each rank's process."""

    name: str
    threads: int
    cores: int
    ranks: int
    variables: Sequence[Mapping[str, str]] = ()

    @property
    def fitting_threads(self) -> int | None:
        """For each rank, where more threads compute than there are cores and a rank can do with fewer."""
        if self.threads <= max(self.cores, self.ranks):
            return None
        return max(1, self.cores // self.ranks)


@dataclass(frozen=True)
class Facts:
    """What is known, None for what is not. Times in ms.

    * ``ready_ms``: when each gradient was ready, from the start of backward; ``backward_ms``: how long backward took.
      ``step_ms``: a whole step.
    * ``buckets``: DDP's, in the order in which they are sent: indices into ``ready_ms``.
    * ``compiled``: whether torch.compile got the whole module.
    * ``find_unused_parameters``, ``broadcast_buffers``: DDP's settings. ``rebuilt``: whether DDP lays its buckets out
      anew by when gradients come. ``all_used``: every parameter that is trained had a gradient in each step that was
      seen. The costs: a step with the setting less one without it. ``threads_cost``: less one with fitting threads.
    * ``device``: "cpu" or "cuda". ``hosts``: all of the training's.
    * ``network_findings``: sentences of the network check by key.
    * ``predicted_…_ms``: a step as ``play`` predicts it for DDP as it runs, with gradients that come evenly during
      backward, with the best bucket size (``best_cap_mib``), with parameters registered in the order of use, and over
      the better network interface.
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
    hosts: Sequence[Host] = ()
    threads_cost: Estimate | None = None
    network_findings: Mapping[str, str] = field(default_factory=dict)
    predicted_ms: float | None = None
    predicted_even_ms: float | None = None
    predicted_best_buckets_ms: float | None = None
    best_cap_mib: int | None = None
    predicted_used_ms: float | None = None
    predicted_interface_ms: float | None = None


def findings(facts: Facts) -> list[Finding]:
    """The costliest first, those without a cost last."""
    rules = (_late, _parameter_order, _find_unused, _broadcast, _threads, _interface, _connections)
    found = [finding for rule in rules if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda each: -(each.cost_ms or 0.0))


def _late(facts: Facts) -> Finding | None:
    """Gradients, or only the first bucket, that are ready when backward is nearly over."""
    if not facts.ready_ms or not facts.backward_ms or len(facts.ready_ms) < 2:
        return None
    if min(facts.ready_ms) > LATE * facts.backward_ms:
        return _compiled(facts) if facts.compiled else _all_late(facts)
    return _late_bucket(facts, facts.ready_ms, facts.backward_ms)


def _compiled(facts: Facts) -> Finding | None:
    return _predicted(
        facts,
        "whole_graph_compiled",
        "the whole model is compiled, so all gradients come when backward ends and none travels meanwhile",
        "compile the blocks instead: for block in model.blocks: block.compile()",
        facts.predicted_even_ms,
    )


def _all_late(facts: Facts) -> Finding | None:
    return _predicted(
        facts,
        "gradients_at_the_end",
        "all gradients come in the last tenth of backward, so none travels meanwhile",
        "look for what holds them back: one custom autograd function, or one checkpoint, around the whole model",
        facts.predicted_even_ms,
    )


def _late_bucket(facts: Facts, ready_ms: Sequence[float], backward_ms: float) -> Finding | None:
    if not facts.buckets or not facts.buckets[0]:
        return None
    share = max(ready_ms[index] for index in facts.buckets[0]) / backward_ms
    if share <= LATE:
        return None
    count = len(facts.buckets)
    cap = "..." if facts.best_cap_mib is None else facts.best_cap_mib
    return _predicted(
        facts,
        "late_first_bucket",
        f"DDP's first bucket (of {count}) is ready after {share:.0%} of backward, so almost nothing travels meanwhile",
        f"other buckets: DistributedDataParallel(model, bucket_cap_mb={cap}), or gradcast.attach, which plans them",
        facts.predicted_best_buckets_ms,
    )


def _parameter_order(facts: Facts) -> Finding | None:
    """DDP sends in the order of its buckets; laid out by registration, one that is late holds up those that are not.
    Where it lays them out anew, the order of registration does not matter."""
    if facts.rebuilt is not False or not facts.buckets or not facts.ready_ms or not facts.backward_ms:
        return None
    latest, blocked_ms = 0.0, 0.0
    for bucket in facts.buckets:
        ready_ms = max((facts.ready_ms[index] for index in bucket), default=latest)
        blocked_ms = max(blocked_ms, latest - ready_ms)
        latest = max(latest, ready_ms)
    if blocked_ms <= BLOCKED * facts.backward_ms:
        return None
    title = f"parameters are registered in another order than used in: a bucket waits {blocked_ms:.1f} ms for another"
    remedy = "create modules in the order of their calls, or leave find_unused_parameters out: then DDP reorders"
    return _predicted(facts, "parameter_order", title, remedy, facts.predicted_used_ms)


def _find_unused(facts: Facts) -> Finding | None:
    if not facts.find_unused_parameters or not facts.all_used:
        return None
    title = "find_unused_parameters=True, but every parameter was used: DDP searches the graph in each step for nothing"
    return _measured("find_unused_parameters", title, "leave find_unused_parameters out", facts.find_unused_cost)


def _broadcast(facts: Facts) -> Finding | None:
    if not facts.broadcast_buffers or not facts.buffer_bytes:
        return None
    title = f"broadcast_buffers: each step begins with waiting for {facts.buffer_bytes} bytes of rank 0's buffers"
    remedy = "DistributedDataParallel(model, broadcast_buffers=False); broadcast them before evaluation and saving"
    return _measured("broadcast_buffers", title, remedy, facts.broadcast_cost)


def _threads(facts: Facts) -> Finding | None:
    host = max(facts.hosts, key=lambda each: each.threads / each.cores, default=None)
    if host is None or host.threads <= host.cores:
        return None
    title = f"on {host.name}, {host.threads} threads compute on {host.cores} cores, and wait for each other"
    fewer = [] if host.fitting_threads is None else [f"OMP_NUM_THREADS={host.fitting_threads}"]
    fewer += ["fewer ranks per host"] if host.ranks > host.cores else []
    return _measured("threads", title, ", and ".join(fewer), facts.threads_cost)


def _interface(facts: Facts) -> Finding | None:
    for key in _INTERFACE_KEYS:
        if sentence := facts.network_findings.get(key):
            title = "the network interface that is used is not the best one"
            return _predicted(facts, "interface", title, sentence, facts.predicted_interface_ms)
    return None


def _connections(facts: Facts) -> Finding | None:
    hosts = [host.name for host in facts.hosts if any(each.get(CONNECTIONS_VARIABLE) == "1" for each in host.variables)]
    if facts.device != "cuda" or not hosts:
        return None
    return Finding(
        "cuda_connections",
        f"{CONNECTIONS_VARIABLE}=1 on {hosts[0]}: all streams share one queue to the GPU, so communication waits "
        "behind compute",
        None,
        f"unset {CONNECTIONS_VARIABLE} (only tensor parallelism of Megatron's kind needs it)",
    )


def _measured(key: str, title: str, remedy: str, cost: Estimate | None) -> Finding | None:
    if cost is not None and cost.low <= 0:
        return None
    return Finding(key, title, None if cost is None else cost.value, remedy)


def _predicted(facts: Facts, key: str, title: str, remedy: str, better_ms: float | None) -> Finding | None:
    """``better_ms``: the step without the mistake."""
    cost_ms = _difference(facts.predicted_ms, better_ms)
    if cost_ms is not None and cost_ms <= PREDICTION_ERROR * (facts.step_ms or facts.predicted_ms or 0.0):
        return None
    return Finding(key, title, cost_ms, remedy)


def _difference(with_it: float | None, without: float | None) -> float | None:
    return None if with_it is None or without is None else with_it - without
