"""Where the time of a step goes: the definitions, and the sums.

Five kinds of steps are compared (Stash: A. Sharma et al., *Stash: a comprehensive stall-centric characterization of
public cloud VMs for distributed deep learning*, arXiv 2208.14344; the two data stalls are those of DS-Analyzer:
J. Mohan et al., *Analyzing and mitigating data stalls in DNN training*, VLDB 2021):

    alone     one device computes on a batch that is at hand, nothing is sent
    node      the devices of a node exchange gradients, on a batch that is at hand
    cluster   all devices do
    cached    and load their data, from memory
    cold      and load it from storage: an ordinary step

    interconnect stall = node - alone          preparation stall = cached - cluster
    network stall = cluster - node             fetch stall = cold - cached

Stash's published code takes the preparation stall from the cold run to get the fetch stall, which counts everything but
preparation as fetching; here it is cold - cached, as its text and DS-Analyzer have it. Stash runs a script five times.
Here all kinds of steps are run inside one training (``probes.py``); only ``cached`` is not run but follows from how
long a batch takes to read and to prepare (``cached_wait``).

Pure. Thread safety: pure; any thread.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradcast.diagnosis.analyze.estimates import Estimate, estimate

# In the order in which they are shown. "launch": what goes by in these three between operations.
COMPUTE = ("forward", "backward", "update")
DATA = ("data_storage", "data_cpu")
OWN = (*COMPUTE, "launch", "loop", *DATA)
TRAFFIC = ("interconnect", "network")
PARTS = (*OWN, *TRAFFIC, "waiting", "rest")
# In which a rank takes longer, for sentences.
STAGE_WORDS = {part: part for part in COMPUTE} | {
    "launch": "launching and the framework",
    "loop": "the loop's own work",
    "data_storage": "reading data",
    "data_cpu": "preparing data",
}


@dataclass(frozen=True)
class Stalls:
    """In the unit of the times that they come from."""

    interconnect: float
    network: float
    preparation: float
    fetch: float


def stash(*, alone: float, node: float, cluster: float, cached: float, cold: float) -> Stalls:
    """The four stalls of Stash from the time of each kind of step."""
    return Stalls(interconnect=node - alone, network=cluster - node, preparation=cached - cluster, fetch=cold - cached)


def cached_wait(wait: float, read: float, prepare: float, workers: int) -> float:
    """How long the loop would wait for a batch if reading took no time.

    ``wait``: for a batch as it is. ``read``, ``prepare``: what one batch takes in one worker. Without workers the loop
    does both itself. With workers a batch comes every (read + prepare) / workers at the latest; the loop waits for what
    that is longer than its step, and less by what reading contributes.
    """
    if workers == 0:
        share = prepare / (read + prepare) if read + prepare > 0 else 1.0
        return wait * share
    return max(0.0, wait - read / workers)


@dataclass(frozen=True)
class RankSteps:
    """One rank's measurements, ms. ``normal``: of ordinary steps, in order: a stage's times by its name ("step",
    "loop", "loader"). ``probes``: of steps without data, by kind ("alone", "node", "cluster"), a stage's times by its
    name ("step", "forward", "backward", "update"). ``computing``: by stage, how long operations run in it in steps
    "alone" (``launching.py``). ``read_ms``, ``prepare_ms``: of one batch in a loader's worker; None where that is not
    known. ``node``: which the rank is on."""

    rank: int
    node: int
    host: str
    normal: Mapping[str, Sequence[float]]
    probes: Mapping[str, Mapping[str, Sequence[float]]]
    computing: Mapping[str, Sequence[float]]
    loader_workers: int = 0
    read_ms: float | None = None
    prepare_ms: float | None = None
    layers_ms: Mapping[str, float] = field(default_factory=dict)  # forward and backward, by layer

    @property
    def own_ms(self) -> float:
        """Everything but communication and waiting for others."""
        return sum(self.own_parts.values())

    @property
    def own_parts(self) -> dict[str, float]:
        return {part: self.own(part) for part in OWN}

    def own(self, part: str) -> float:
        return self._value(part, *self._samples(part))

    def own_estimate(self, part: str) -> Estimate:
        return estimate(lambda *drawn: self._value(part, *drawn), *self._samples(part))

    def _samples(self, part: str) -> list[Sequence[float]]:
        """What a part is taken from: of waiting for data, both of its parts."""
        alone = self.probes["alone"]
        if part in COMPUTE:
            return [alone[part], self.computing[part]]
        if part == "launch":
            return [samples for stage in COMPUTE for samples in (alone[stage], self.computing[stage])]
        return [self.normal["loop" if part == "loop" else "loader"]]

    def _value(self, part: str, *samples: Sequence[float]) -> float:
        """Of what the samples say, the part's."""
        medians = [statistics.median(each) for each in samples]
        if part in COMPUTE:
            return min(medians)
        if part == "launch":
            return sum(
                max(0.0, stage - computing) for stage, computing in zip(medians[::2], medians[1::2], strict=True)
            )
        if part == "loop":
            return medians[0]
        return self._of_waiting(part, medians[0])

    def _of_waiting(self, part: str, wait_ms: float) -> float:
        """For a batch: what of it is reading, or preparing."""
        prepared_ms = wait_ms
        if self.read_ms is not None and self.prepare_ms is not None:
            prepared_ms = cached_wait(wait_ms, self.read_ms, self.prepare_ms, self.loader_workers)
        return prepared_ms if part == "data_cpu" else wait_ms - prepared_ms


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, the stage and layer in which it takes longer, and how much longer its step
    is than the shown rank's."""

    rank: int
    stage: str
    layer: str | None
    ms: float


@dataclass(frozen=True)
class Breakdown:
    """Of one rank's step: the parts add up to ``step``. ``ranks``: the same for each, values alone."""

    view_rank: int
    step: Estimate
    parts: dict[str, Estimate]
    ranks: list[dict[str, float]]
    straggler: Straggler | None


# A rank that is not slower than this, or not certainly slower, is none that others wait for.
_STRAGGLES_SHARE, _STRAGGLES_MS = 0.02, 1.0


# What ranks do from where they are together to where they are again: once a step, where gradients are averaged; with
# buffers that come from rank 0 before each forward pass, there as well. The update's share of launching is counted with
# that of the passes.
MEET_ONCE = (OWN,)
MEET_TWICE = (("update", "loop", *DATA), ("forward", "backward", "launch"))


def together_ms(
    ranks: Sequence[Mapping[str, float]], meetings: Sequence[Sequence[str]], without: Sequence[str] = ()
) -> float:
    """How long all ranks need: between two meetings, as long as the slowest one. ``ranks``: each one's own parts;
    ``without``: parts that are taken to need no time."""
    return sum(
        max(sum(each[part] for part in between if part not in without) for each in ranks) for between in meetings
    )


def breakdown(ranks: Sequence[RankSteps], meetings: Sequence[Sequence[str]] = MEET_ONCE) -> Breakdown:
    """``ranks`` in rank order. Shown is the rank whose own work is the lower median: of two, the faster."""
    by_own = sorted(ranks, key=lambda each: each.own_ms)
    view, slowest = by_own[(len(ranks) - 1) // 2], by_own[-1]
    all_ms = together_ms([each.own_parts for each in ranks], meetings)
    step = estimate(statistics.median, view.normal["step"])
    parts = {part: view.own_estimate(part) for part in OWN}
    hidden_ms = _hidden_ms(ranks, meetings)
    for kind in TRAFFIC:
        cost = _communication(ranks, kind)
        parts[kind] = Estimate(*(max(0.0, ms - hidden_ms[kind]) for ms in (cost.value, cost.low, cost.high)))
    parts["waiting"] = _waiting(view, slowest, all_ms)
    left = step.value - sum(part.value for part in parts.values())
    parts["rest"] = _combined(left, [step], list(parts.values()))
    return Breakdown(
        view.rank,
        step,
        parts,
        [_values(each, all_ms, parts) for each in ranks],
        _straggler(view, slowest, step.value, parts["waiting"]),
    )


def _waiting(view: RankSteps, slowest: RankSteps, all_ms: float) -> Estimate:
    mine, its = ([each.own_estimate(part) for part in OWN] for each in (view, slowest))
    return _combined(all_ms - view.own_ms, its, mine)


def _combined(value: float, added: Sequence[Estimate], taken_off: Sequence[Estimate]) -> Estimate:
    """A sum and its interval: errors that are independent add as squares."""
    below = [each.value - each.low for each in added] + [each.high - each.value for each in taken_off]
    above = [each.high - each.value for each in added] + [each.value - each.low for each in taken_off]
    return Estimate(value, value - math.hypot(*below), value + math.hypot(*above))


def _communication(ranks: Sequence[RankSteps], kind: str) -> Estimate:
    """What a kind of exchange adds to the step of the slowest rank.

    Of what all exchange costs, the one inside of nodes is at most all: where it is slow by itself, but goes on while
    other nodes' links are busy, the two together may cost less than it alone.
    """
    steps = {name: [each.probes[name]["step"] for each in ranks] for name in ("alone", "node", "cluster")}
    # Two kinds may be the same steps, which are drawn once: they do not differ by chance.
    run = list({id(samples): samples for samples in itertools.chain(*steps.values())}.values())
    places = {name: [_place(run, samples) for samples in each] for name, each in steps.items()}

    def added(*drawn: Sequence[float]) -> float:
        medians = [statistics.median(samples) for samples in drawn]
        return _stall(kind, *(max(medians[place] for place in each) for each in places.values()))

    return estimate(added, *run)


def _stall(kind: str, alone: float, node: float, cluster: float) -> float:
    cluster = max(cluster, alone)
    node = min(max(node, alone), cluster)
    return getattr(stash(alone=alone, node=node, cluster=cluster, cached=cluster, cold=cluster), kind)


def _hidden_ms(ranks: Sequence[RankSteps], meetings: Sequence[Sequence[str]]) -> dict[str, float]:
    """By kind of exchange, what of it goes on while the ranks wait for one of them anyway.

    Where they meet twice, rank 0 sends its buffers as soon as it is there: who comes later than that finds them.
    """
    if meetings == MEET_ONCE:
        return dict.fromkeys(TRAFFIC, 0.0)
    there_ms = [sum(each.own(part) for part in meetings[0]) for each in ranks]
    forward_ms = {
        name: max(statistics.median(each.probes[name]["forward"]) for each in ranks)
        for name in ("alone", "node", "cluster")
    }
    sending_ms = {kind: _stall(kind, **forward_ms) for kind in TRAFFIC}
    total_ms = sum(sending_ms.values())
    share = min(1.0, (max(there_ms) - there_ms[0]) / total_ms) if total_ms > 0 else 0.0
    return {kind: share * ms for kind, ms in sending_ms.items()}


def _place(lists: Sequence[Sequence[float]], samples: Sequence[float]) -> int:
    """By identity: two kinds may have measured equal numbers."""
    return next(place for place, each in enumerate(lists) if each is samples)


def _values(each: RankSteps, all_ms: float, parts: Mapping[str, Estimate]) -> dict[str, float]:
    values = each.own_parts
    values |= {kind: parts[kind].value for kind in TRAFFIC}
    values["waiting"] = all_ms - each.own_ms
    values["rest"] = statistics.median(each.normal["step"]) - sum(values.values())
    return {part: values[part] for part in PARTS}


def _straggler(view: RankSteps, slowest: RankSteps, step_ms: float, waiting: Estimate) -> Straggler | None:
    if waiting.value < max(_STRAGGLES_SHARE * step_ms, _STRAGGLES_MS) or waiting.low <= 0:
        return None
    excess = {part: slowest.own(part) - view.own(part) for part in OWN}
    stage = max(excess, key=lambda part: excess[part])
    layer = _slow_layer(view, slowest) if stage in ("forward", "backward", "launch") else None
    return Straggler(slowest.rank, stage, layer, waiting.value)


def _slow_layer(view: RankSteps, slowest: RankSteps) -> str | None:
    excess = {layer: its - view.layers_ms.get(layer, its) for layer, its in slowest.layers_ms.items()}
    return max(excess, key=lambda layer: excess[layer]) if excess else None
