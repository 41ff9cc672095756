"""Builds the fields of doctor.json from what all ranks measured (docs/guide/doctor.md).

Pure, except that it reads the date. Thread safety: any thread.
"""

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gradcast import __version__, _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze import actions, lint, lint_costs, timelines
from gradcast.diagnosis.analyze.actions import Situation
from gradcast.diagnosis.analyze.bottleneck import bottleneck
from gradcast.diagnosis.analyze.estimates import Estimate, estimate
from gradcast.diagnosis.analyze.step_breakdown import ONE_SYNC, TWO_SYNCS, Breakdown, RankSteps, breakdown
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.runs import KIND, PARTS, VERSION
from gradcast.diagnosis.trace.clocks import Clock
from gradcast.diagnosis.trace.merged import RankTrace
from gradcast.scaling import estimate as scaling
from gradcast.scaling.growth import Nodes

if TYPE_CHECKING:  # needs torch, which this module does not
    from gradcast.diagnosis.probe.trial import Trial


@dataclass(frozen=True)
class RankMeasurements:
    """Everything that one rank measured."""

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
    """What is the same on all ranks."""

    backend: str
    device: str  # "cpu" or "cuda"
    torch: str  # version
    model: str
    parameter_bytes: dict[str, int]  # by name, in the order of registration
    caps_bytes: tuple[int, int]  # of DDP's first bucket and of the others
    is_fp32: bool
    compiled: bool
    find_unused_parameters: bool
    rebuilt: bool  # whether DDP rebuilds its buckets in the order in which gradients became ready
    broadcast_buffers: bool
    buffer_bytes: int
    warmup_steps: int
    gradients_used: bool  # see actions.Situation


def build(ranks: Sequence[RankMeasurements], setup: TrainingSetup) -> dict[str, Any]:
    """Returns the fields of doctor.json. ``ranks`` are in rank order."""
    steps = [each.steps for each in ranks]
    sync_phases = TWO_SYNCS if setup.broadcast_buffers and setup.buffer_bytes else ONE_SYNC
    found = breakdown(steps, sync_phases)
    launch_unknown = ranks[0].launch_unknown
    known_parts = [part for part in PARTS if not (launch_unknown and part == "launch")]
    profile = _profile(ranks)
    situation = _situation(found, sync_phases, ranks, setup, profile)
    listed = [action for action in actions.actions(situation) if not (launch_unknown and action.key == "launch")]
    mistakes = _lint(ranks, setup, found, profile)
    verdict = bottleneck(
        found.step,
        found.parts,
        found.straggler,
        latency_share=_latency_share(profile, setup),
        mistake=_costliest(mistakes),
    )
    return {
        "kind": KIND,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gradcast": __version__,
        "torch": setup.torch,
        "backend": setup.backend,
        "device": setup.device,
        "script": None,
        "world_size": len(ranks),
        "nodes": _nodes(steps),
        "hosts": [each.host for each in steps],
        "model": {
            "name": setup.model,
            "tensors": len(setup.parameter_bytes),
            "bytes": sum(setup.parameter_bytes.values()),
        },
        "steps": {
            "left_out": setup.warmup_steps,
            "normal": len(steps[0].normal["step"]),
            "probe": ranks[0].probe_steps,
        },
        **_breakdown_fields(found, steps, sync_phases, known_parts),
        "launching_untold": launch_unknown,
        "overlap_left_out": actions.overlap_left_out(situation),
        "verdict": asdict(verdict),
        "floor_ms": actions.floor_ms(situation),
        "actions": [asdict(action) for action in listed],
        "hopeless": actions.hopeless(situation, listed),
        "lint": mistakes,
        "network": ranks[0].network,
        **_trial_fields(ranks, profile),
        "scaling": None if profile is None else scaling.as_json(scaling.band(profile, _growth(_nodes(steps)))),
    }


def _breakdown_fields(
    found: Breakdown, steps: Sequence[RankSteps], sync_phases: Sequence[Sequence[str]], known_parts: Sequence[str]
) -> dict[str, Any]:
    return {
        "step": found.step.fields(),
        "view_rank": found.view_rank,
        "parts": [{"key": part, **found.parts[part].fields()} for part in known_parts],
        "ranks": [
            {
                "rank": each.rank,
                "host": each.host,
                "node": each.node,
                "step_ms": statistics.median(each.normal["step"]),
                "own_ms": each.own_ms,
                "parts": {part: parts[part] for part in known_parts},
            }
            for each, parts in zip(steps, found.ranks, strict=True)
        ],
        "straggler": None if found.straggler is None else asdict(found.straggler),
        "normal_steps": [
            {"rank": each.rank, "step_ms": list(each.normal["step"]), "wait_ms": _waits_ms(each, sync_phases)}
            for each in steps
        ],
    }


def _waits_ms(each: RankSteps, sync_phases: Sequence[Sequence[str]]) -> list[float]:
    """Returns the wait for other ranks in each ordinary step.

    That is the exposed communication at the end of backward. If ranks also synchronize before forward, the time by
    which forward exceeds its own compute is added: there a rank waits for the buffers of a slower one.
    """
    if sync_phases == ONE_SYNC:
        return list(each.normal["exposed"])
    own_ms = statistics.median(each.probes["alone"]["forward"])
    waits_ms = zip(each.normal["exposed"], each.normal["forward"], strict=True)
    return [exposed + max(0.0, forward - own_ms) for exposed, forward in waits_ms]


def _nodes(steps: Sequence[RankSteps]) -> list[list[int]]:
    return [[each.rank for each in steps if each.node == node] for node in sorted({each.node for each in steps})]


def _growth(nodes: Sequence[Sequence[int]]) -> scaling.Options:
    """Costs that were measured inside hosts, or between hosts with several ranks each, say nothing about the other
    kind.
    """
    per_node = max(len(members) for members in nodes)
    return scaling.Options(nodes=Nodes(per_node) if per_node > 1 else None)


def _profile(ranks: Sequence[RankMeasurements]) -> _core.Profile | None:
    trial = ranks[0].trial
    return None if trial is None or trial.profile is None else _core.Profile.from_json(json.dumps(trial.profile))


def _situation(
    found: Breakdown,
    sync_phases: Sequence[Sequence[str]],
    ranks: Sequence[RankMeasurements],
    setup: TrainingSetup,
    profile: _core.Profile | None,
) -> Situation:
    trial = ranks[0].trial
    return Situation(
        step=found.step,
        parts=found.parts,
        ranks=found.ranks,
        sync_phases=sync_phases,
        profile=profile,
        caps_bytes=setup.caps_bytes,
        spread=(1.0, 1.0) if trial is None else trial.spread,
        wire_possible=setup.is_fp32,
        streams_gain=_streams_gain(ranks[0].network) if setup.backend == "gloo" else None,
        gradients_used=setup.gradients_used,
    )


def _streams_gain(network: dict[str, Any] | None) -> float | None:
    """Returns how many times the bytes of one TCP stream several streams carry, in the median pair.

    Returns None if that is unknown, or if Gloo uses as many connections already.
    """
    pairs = [] if network is None else network["pairs"]
    if any(network["connections"] >= pair["streams"] for pair in pairs):
        return None
    gains = [
        pair["tcp_streams_gbit_per_s"] / pair["tcp_gbit_per_s"]
        for pair in pairs
        if pair["tcp_gbit_per_s"] and pair["tcp_streams_gbit_per_s"]
    ]
    return statistics.median(gains) if gains else None


def _latency_share(profile: _core.Profile | None, setup: TrainingSetup) -> float | None:
    """Returns the share of the time of DDP's operations that does not depend on their size."""
    if profile is None:
        return None
    plan = ddp_baseline.plan(profile, setup.caps_bytes)
    cost = profile.link.all_reduce.cost_ns
    whole = sum(cost(block.size_bytes) for block in plan.blocks)
    return len(plan.blocks) * cost(1) / whole if whole > 0 else None


def _lint(
    ranks: Sequence[RankMeasurements], setup: TrainingSetup, found: Breakdown, profile: _core.Profile | None
) -> list[dict[str, Any]]:
    network = ranks[0].network
    known = lint.Evidence(
        hosts=environment.hosts([each.steps.host for each in ranks], [each.process for each in ranks]),
        threads_cost=option_cost(ranks, "threads"),
        step_ms=found.step.value,
        compiled=setup.compiled,
        find_unused_parameters=setup.find_unused_parameters,
        rebuilt=setup.rebuilt,
        all_used=True,  # otherwise there is no diagnosis
        find_unused_cost=option_cost(ranks, "find_unused_parameters"),
        broadcast_buffers=setup.broadcast_buffers,
        buffer_bytes=setup.buffer_bytes,
        broadcast_cost=option_cost(ranks, "broadcast_buffers"),
        device=setup.device,
        network_findings={} if network is None else {each["key"]: each["sentence"] for each in network["findings"]},
    )
    if profile is not None:
        known = _with_profile(known, setup, profile, _interface_gain(network))
    return [asdict(mistake) for mistake in lint.mistakes(known)]


def _interface_gain(network: dict[str, Any] | None) -> float | None:
    """Returns how many times the bytes of the chosen interface the fastest other one carries between the same hosts."""
    gains = [each["gbit_per_s"] / each["chosen_gbit_per_s"] for each in (network or {}).get("alternatives", [])]
    return max(gains, default=None)


def _with_profile(
    known: lint.Evidence, setup: TrainingSetup, profile: _core.Profile, interface_gain: float | None
) -> lint.Evidence:
    """Adds when gradients become ready, how DDP lays out its buckets, and what both cost."""
    registered, caps, rebuilt = list(setup.parameter_bytes), setup.caps_bytes, setup.rebuilt
    costs = lint_costs.predictions(profile, registered, caps, rebuilt=rebuilt, interface_gain=interface_gain)
    return replace(
        known,
        ready_ms=[tensor.ready_ns / 1e6 for tensor in profile.tensors],
        backward_ms=profile.backward_ns / 1e6,
        buckets=lint_costs.buckets(profile, registered, caps, rebuilt=rebuilt),
        **asdict(costs),
    )


def _costliest(mistakes: Sequence[dict[str, Any]]) -> tuple[str, float] | None:
    known = [(each["title"], each["cost_ms"]) for each in mistakes if each["cost_ms"] is not None]
    return max(known, key=lambda each: each[1], default=None)


def _trial_fields(ranks: Sequence[RankMeasurements], profile: _core.Profile | None) -> dict[str, Any]:
    trial = ranks[0].trial
    if trial is None or profile is None:
        why = None if trial is None else trial.error
        return dict.fromkeys(("profile", "plan", "prediction", "predicted_timeline")) | {
            "timeline": [],
            "bandwidth": [],
            "plan_versions": [],
            "not_tried": why,
        }
    plan = _core.Plan.from_json(json.dumps(trial.plan))
    traces = aligned_traces(ranks)
    last = trial.versions[-1]
    return {
        "profile": trial.profile,
        "plan": trial.plan,
        "prediction": {"mode": "overlap", **{key: last[key] for key in ("predicted_ms", "measured_ms")}},
        "timeline": timelines.measured(traces),
        "predicted_timeline": timelines.predicted(profile, plan),
        "bandwidth": timelines.bandwidth(traces[0]),
        "plan_versions": trial.versions,
        "not_tried": None,
    }


def aligned_traces(ranks: Sequence[RankMeasurements]) -> list[RankTrace]:
    """Returns the trials' traces on rank 0's clock, or an empty list if there was no trial."""
    if any(each.trial is None or each.trial.trace is None for each in ranks):
        return []
    return [
        replace(each.trial.trace, clock=clock, host=each.steps.host).aligned()
        for each, clock in zip(ranks, ranks[0].clocks, strict=True)
    ]


def option_cost(ranks: Sequence[RankMeasurements], name: str) -> Estimate | None:
    """Returns what a DDP option, or too many threads, costs the slowest rank per step; None if unmeasured."""
    if name not in ranks[0].options:
        return None
    with_it = [each.steps.probes["cluster"]["step"] for each in ranks]
    without = [each.options[name] for each in ranks]

    def cost(*drawn: Sequence[float]) -> float:
        medians = [statistics.median(samples) for samples in drawn]
        return max(medians[: len(with_it)]) - max(medians[len(with_it) :])

    return estimate(cost, *with_it, *without)
