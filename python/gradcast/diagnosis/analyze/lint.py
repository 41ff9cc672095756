"""Common misconfigurations of data-parallel training: which are present, what each costs, and how to fix it.

Only what was seen counts as a mistake. Unknown evidence finds nothing, and neither does a cost that does not exceed the
error of its measurement or prediction.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.lint_costs import Layout
from gradcast.diagnosis.analyze.measurements import TrainingSetup
from gradcast.diagnosis.observe.environment import CONNECTIONS_VARIABLE, HostCpu

# Share of backward. What becomes ready later has at most a tenth of backward to overlap with.
LATE = 0.9
# Share of backward for which a ready bucket waits for an earlier one. Less happens in every network whose layers do not
# finish one by one.
BLOCKED = 0.1
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
    """The input of the rules. ``hosts`` are all hosts of the training; every parameter of it has a gradient."""

    setup: TrainingSetup
    hosts: Sequence[HostCpu]
    costs: Mapping[str, Estimate]  # by mistake, of those whose cost was measured or predicted
    network_findings: Mapping[str, str]  # sentences of the network check by key
    layout: Layout | None  # None without a trial


_Found = Iterator[tuple[str, str, str]]  # key, title and remedy of what was seen


def mistakes(evidence: Evidence) -> list[Mistake]:
    """Lists the mistakes: the costliest first, those without a cost last."""
    rules: tuple[Callable[[Evidence], _Found], ...] = (
        _late_gradients, _parameter_order, _find_unused, _broadcast, _threads, _interface, _connections,
    )  # fmt: skip
    found = []
    for key, title, remedy in (each for rule in rules for each in rule(evidence)):
        cost = evidence.costs.get(key)
        if cost is None or cost.low > 0:
            found.append(Mistake(key, title, None if cost is None else cost.value, remedy))
    return sorted(found, key=lambda each: -(each.cost_ms or 0.0))


def _late_gradients(evidence: Evidence) -> _Found:
    """Gradients, or only the first bucket, become ready when backward is nearly over."""
    seen = evidence.layout
    if seen is None or len(seen.ready_ms) < 2:
        return
    ready_ms = max(seen.ready_ms[index] for index in seen.buckets[0])
    if min(seen.ready_ms) > LATE * seen.backward_ms:
        if evidence.setup.compiled:
            title = "the whole model is compiled, so all gradients become ready when backward ends and none overlaps "
            remedy = "compile the layers instead: for block in model.blocks: block.compile()"
            yield "whole_graph_compiled", title + "with it", remedy
        else:
            title = "all gradients become ready in the last tenth of backward, so none overlaps with it"
            remedy = (
                "look for what delays them: one custom autograd function, or one checkpoint, around the whole model"
            )
            yield "gradients_at_the_end", title, remedy
    elif ready_ms > LATE * seen.backward_ms:
        title = f"DDP's first bucket (of {len(seen.buckets)}) is ready after {ready_ms / seen.backward_ms:.0%} of "
        remedy = f"use DistributedDataParallel(model, bucket_cap_mb={seen.best_cap_mib}), or gradcast.attach, which "
        yield (
            "late_first_bucket",
            title + "backward, so almost nothing overlaps with it",
            remedy + "plans its own blocks",
        )


def _parameter_order(evidence: Evidence) -> _Found:
    """DDP sends buckets in order. In that of registration, which a rebuild ends, a late one delays those behind it."""
    seen = evidence.layout
    if seen is None or evidence.setup.rebuilt:
        return
    ready_ms = [max(seen.ready_ms[index] for index in bucket) for bucket in seen.buckets]
    blocked_ms = max(latest - ready for latest, ready in zip(accumulate(ready_ms, max), ready_ms, strict=True))
    if blocked_ms > BLOCKED * seen.backward_ms:
        title = "parameters are not registered in the order of use: a ready bucket waits "
        remedy = "create modules in the order of their calls, or omit find_unused_parameters, so that DDP reorders"
        yield "parameter_order", title + f"{blocked_ms:.1f} ms for another", remedy


def _find_unused(evidence: Evidence) -> _Found:
    if evidence.setup.find_unused_parameters:
        title = "find_unused_parameters=True, but every parameter was used: DDP searches the graph in each step in vain"
        yield "find_unused_parameters", title, "omit find_unused_parameters"


def _broadcast(evidence: Evidence) -> _Found:
    setup = evidence.setup
    if setup.broadcast_buffers and setup.buffer_bytes:
        title = f"broadcast_buffers: each step begins by waiting for {setup.buffer_bytes} bytes of rank 0's buffers"
        remedy = "DistributedDataParallel(model, broadcast_buffers=False); broadcast them before evaluation and saving"
        yield "broadcast_buffers", title, remedy


def _threads(evidence: Evidence) -> _Found:
    host = max(evidence.hosts, key=lambda each: each.threads / each.cores)
    if host.threads > host.cores:
        title = f"on {host.name}, {host.threads} threads compute on {host.cores} cores and compete for them"
        fewer = [] if host.fitting_threads is None else [f"OMP_NUM_THREADS={host.fitting_threads}"]
        fewer += ["fewer ranks per host"] if host.ranks > host.cores else []
        yield "threads", title, ", and ".join(fewer)


def _interface(evidence: Evidence) -> _Found:
    for sentence in [each for key, each in evidence.network_findings.items() if key in _INTERFACE_KEYS][:1]:
        yield "interface", "the chosen network interface is not the best one", sentence


def _connections(evidence: Evidence) -> _Found:
    limited = [host for host in evidence.hosts if "1" in host.cuda_connections]
    if evidence.setup.device == "cuda" and limited:
        title = f"{CONNECTIONS_VARIABLE}=1 on {limited[0].name}: all streams share one queue to the GPU, so "
        remedy = f"unset {CONNECTIONS_VARIABLE} (only Megatron's tensor parallelism needs it)"
        yield "cuda_connections", title + "communication waits for compute", remedy
