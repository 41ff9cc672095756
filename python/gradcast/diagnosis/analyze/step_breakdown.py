"""Splits the time of a step into parts: the definitions, and the sums.

Five kinds of steps are compared, after Stash (A. Sharma et al., *Stash: a comprehensive stall-centric characterization
of public cloud VMs for distributed deep learning*, arXiv 2208.14344) and DS-Analyzer (J. Mohan et al., *Analyzing and
mitigating data stalls in DNN training*, VLDB 2021):

    alone     one device computes on a batch that is ready; nothing is sent
    node      the devices of a node also exchange gradients
    cluster   all devices exchange gradients
    cached    and load their data, from memory
    cold      and load it from storage: an ordinary step

    interconnect stall = node - alone          preparation stall = cached - cluster
    network stall = cluster - node             fetch stall = cold - cached

Stash's published code derives the fetch stall from cold and the preparation stall, which counts everything but
preparation as fetching. Here it is cold - cached, as its text and DS-Analyzer define it. Stash runs a script five
times. Here all kinds of steps are run inside one training (``probe/prober.py``), except for cached: it follows from how
long a batch takes to read and to prepare (``cached_wait``).
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.diagnosis.analyze.estimates import Estimate, estimate
from gradcast.diagnosis.runs import PARTS

# Groups of runs.PARTS. "launch" is the time in COMPUTE stages in which no operation runs.
COMPUTE = ("forward", "backward", "update")
DATA = ("data_storage", "data_cpu")
OWN = (*COMPUTE, "launch", "loop", *DATA)  # a rank's own work: everything but communication and waiting
TRAFFIC = ("interconnect", "network")


def cached_wait(wait: float, read: float, prepare: float, workers: int) -> float:
    """Returns how long the loop would wait for a batch if reading took no time.

    ``wait`` is the present wait for a batch; ``read`` and ``prepare`` are what one batch takes in one worker. Without
    workers the loop reads and prepares by itself. With workers, a batch is ready every (read + prepare) / workers at
    the latest. The loop waits for the part of this that exceeds its step, and reading contributes read / workers.
    """
    if workers == 0:
        share = prepare / (read + prepare) if read + prepare > 0 else 1.0
        return wait * share
    return max(0.0, wait - read / workers)


@dataclass(frozen=True)
class RankSteps:
    """One rank's step times in ms.

    * ``host``: its name, which no other host has.
    * ``normal``: ordinary steps in order, by stage ("step", "loop", "loader", ...).
    * ``probes``: steps without data loading, by kind ("alone", "node", "cluster") and stage ("step", "forward",
      "backward", "update").
    * ``computing``: by stage, how long operations run in it in steps "alone" (``probe/launch_overhead.py``).
    * ``batch_ms``: what reading and preparing one batch take in a loader's worker; None if unknown.
    * ``layers_ms``: forward and backward by layer.
    """

    rank: int
    host: str
    normal: Mapping[str, Sequence[float]]
    probes: Mapping[str, Mapping[str, Sequence[float]]]
    computing: Mapping[str, Sequence[float]]
    loader_workers: int = 0
    batch_ms: tuple[float, float] | None = None
    layers_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def own_ms(self) -> float:
        """The time of the rank's own work: everything but communication and waiting for others."""
        return sum(self.own_parts.values())

    @property
    def own_parts(self) -> dict[str, float]:
        return {part: self.own(part) for part in OWN}

    def own(self, part: str) -> float:
        function, samples = self._measured(part)
        return function(*map(statistics.median, samples))

    def own_estimate(self, part: str) -> Estimate:
        function, samples = self._measured(part)
        return estimate(lambda *drawn: function(*map(statistics.median, drawn)), *samples)

    def _measured(self, part: str) -> tuple[Callable[..., float], list[Sequence[float]]]:
        """Returns samples, and how the part is computed from their medians."""
        alone, computing = self.probes["alone"], self.computing
        if part in COMPUTE:
            return min, [alone[part], computing[part]]
        if part == "launch":
            samples = [alone[stage] for stage in COMPUTE] + [computing[stage] for stage in COMPUTE]
            return lambda *ms: sum(max(0.0, ms[i] - ms[i + len(COMPUTE)]) for i in range(len(COMPUTE))), samples
        if part == "loop":
            return float, [self.normal["loop"]]

        def prepared(ms: float) -> float:
            return ms if self.batch_ms is None else cached_wait(ms, *self.batch_ms, self.loader_workers)

        # The wait for a batch is split into reading and preparing.
        return prepared if part == "data_cpu" else lambda ms: ms - prepared(ms), [self.normal["loader"]]


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for: where it is slow, and by how much its step is longer."""

    rank: int
    stage: str
    layer: str | None
    ms: float


@dataclass(frozen=True)
class Breakdown:
    """The parts of one rank's step, which add up to ``step``, and of all. ``sync_phases``: ONE_SYNC or TWO_SYNCS."""

    view_rank: int
    step: Estimate
    parts: dict[str, Estimate]
    ranks: list[dict[str, float]]
    straggler: Straggler | None
    sync_phases: Sequence[Sequence[str]]


# A rank is a straggler only if it is slower by at least this and by NOTICEABLE_GAIN of a step.
_STRAGGLER_MS_MIN = 1.0

# A rank's own work between two synchronizations. Ranks synchronize when gradients are averaged, and a second time
# before forward if DDP broadcasts buffers. The update's launch overhead is counted with that of the passes.
ONE_SYNC = (OWN,)
TWO_SYNCS = (("update", "loop", *DATA), ("forward", "backward", "launch"))


def synchronized_ms(
    ranks: Sequence[Mapping[str, float]], sync_phases: Sequence[Sequence[str]], without: Sequence[str] = ()
) -> float:
    """Returns how long all ranks need together: in each phase, as long as the slowest rank.

    ``ranks`` has each rank's own parts. ``without`` names parts that are taken to need no time.
    """
    return sum(
        max(sum(each[part] for part in between if part not in without) for each in ranks) for between in sync_phases
    )


def breakdown(ranks: Sequence[RankSteps], sync_phases: Sequence[Sequence[str]] = ONE_SYNC) -> Breakdown:
    """Splits the step. ``ranks`` are in rank order. The shown rank has the lower median of own work."""
    by_own = sorted(ranks, key=lambda each: each.own_ms)
    view, slowest = by_own[(len(ranks) - 1) // 2], by_own[-1]
    all_ranks_ms = synchronized_ms([each.own_parts for each in ranks], sync_phases)
    step = estimate(statistics.median, view.normal["step"])
    parts = {part: view.own_estimate(part) for part in OWN}
    hidden_ms = _hidden_ms(ranks, sync_phases)
    for kind in TRAFFIC:
        cost = _communication(ranks, kind)
        parts[kind] = Estimate(*(max(0.0, ms - hidden_ms[kind]) for ms in (cost.value, cost.low, cost.high)))
    its_own = [slowest.own_estimate(part) for part in OWN]
    parts["waiting"] = _combined(all_ranks_ms - view.own_ms, its_own, [parts[part] for part in OWN])
    left = step.value - sum(part.value for part in parts.values())
    parts["rest"] = _combined(left, [step], list(parts.values()))
    return Breakdown(
        view.rank,
        step,
        parts,
        [_values(each, all_ranks_ms, parts) for each in ranks],
        _straggler(view, slowest, step.value, parts["waiting"]),
        sync_phases,
    )


def _combined(value: float, added: Sequence[Estimate], taken_off: Sequence[Estimate]) -> Estimate:
    """Returns a sum or difference with its interval: independent errors add as squares."""
    below = [each.value - each.low for each in added] + [each.high - each.value for each in taken_off]
    above = [each.high - each.value for each in added] + [each.value - each.low for each in taken_off]
    return Estimate(value, value - math.hypot(*below), value + math.hypot(*above))


def _communication(ranks: Sequence[RankSteps], kind: str) -> Estimate:
    """Returns what one kind of communication adds to the step of the slowest rank.

    Communication inside nodes counts at most as much as all communication. If it is slow by itself but overlaps with
    other nodes' traffic, the two together may cost less than it alone.
    """
    steps = {name: [each.probes[name]["step"] for each in ranks] for name in ("alone", "node", "cluster")}
    # Two kinds may share their steps. These are drawn once, so that the difference is exactly 0.
    distinct = {id(samples): samples for samples in itertools.chain(*steps.values())}

    def added(*drawn: Sequence[float]) -> float:
        medians = dict(zip(distinct, map(statistics.median, drawn), strict=True))
        return _stall(kind, *(max(medians[id(samples)] for samples in each) for each in steps.values()))

    return estimate(added, *distinct.values())


def _stall(kind: str, alone: float, node: float, cluster: float) -> float:
    cluster = max(cluster, alone)
    node = min(max(node, alone), cluster)
    return {"interconnect": node - alone, "network": cluster - node}[kind]


def _hidden_ms(ranks: Sequence[RankSteps], sync_phases: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns the part of each kind of communication that overlaps with waiting for another rank.

    If ranks synchronize twice, rank 0 sends its buffers as soon as it is ready; a later rank finds them there.
    """
    if sync_phases == ONE_SYNC:
        return dict.fromkeys(TRAFFIC, 0.0)
    before_sync_ms = [sum(each.own(part) for part in sync_phases[0]) for each in ranks]
    forward_ms = {
        name: max(statistics.median(each.probes[name]["forward"]) for each in ranks)
        for name in ("alone", "node", "cluster")
    }
    sending_ms = {kind: _stall(kind, **forward_ms) for kind in TRAFFIC}
    total_ms = sum(sending_ms.values())
    share = min(1.0, (max(before_sync_ms) - before_sync_ms[0]) / total_ms) if total_ms > 0 else 0.0
    return {kind: share * ms for kind, ms in sending_ms.items()}


def _values(each: RankSteps, all_ranks_ms: float, parts: Mapping[str, Estimate]) -> dict[str, float]:
    values = each.own_parts
    values |= {kind: parts[kind].value for kind in TRAFFIC}
    values["waiting"] = all_ranks_ms - each.own_ms
    values["rest"] = statistics.median(each.normal["step"]) - sum(values.values())
    return {part: values[part] for part in PARTS}


def _straggler(view: RankSteps, slowest: RankSteps, step_ms: float, waiting: Estimate) -> Straggler | None:
    if waiting.value < max(NOTICEABLE_GAIN * step_ms, _STRAGGLER_MS_MIN) or waiting.low <= 0:
        return None
    excess = {part: slowest.own(part) - view.own(part) for part in OWN}
    stage = max(excess, key=lambda part: excess[part])
    layer = _slow_layer(view, slowest) if stage in ("forward", "backward", "launch") else None
    return Straggler(slowest.rank, stage, layer, waiting.value)


def _slow_layer(view: RankSteps, slowest: RankSteps) -> str | None:
    excess = {layer: its - view.layers_ms.get(layer, its) for layer, its in slowest.layers_ms.items()}
    return max(excess, key=lambda layer: excess[layer]) if excess else None
