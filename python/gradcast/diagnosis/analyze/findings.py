"""From what all ranks have measured to the result: doctor.json's fields (docs/doctor.md).

Pure but for the date. Thread safety: any thread.
"""

import datetime
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradcast import __version__, _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze import actions, lint, lint_costs, timelines
from gradcast.diagnosis.analyze.actions import Situation
from gradcast.diagnosis.analyze.estimates import Estimate, estimate
from gradcast.diagnosis.analyze.step_breakdown import MEET_ONCE, MEET_TWICE, PARTS, Breakdown, RankSteps, breakdown
from gradcast.diagnosis.analyze.verdict import verdict
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.probe.trial import Trial
from gradcast.diagnosis.runs import KIND, VERSION
from gradcast.diagnosis.trace.merged import Clock, RankTrace
from gradcast.scaling import estimate as scaling
from gradcast.scaling.growth import Nodes

_PARTS_BUT_LAUNCHING = tuple(part for part in PARTS if part != "launch")


@dataclass(frozen=True)
class Measured:
    """One rank's. ``options``: the steps' ms with one of DDP's options left out, by its name. ``launching_untold``: why
    it is not told apart from computing, None where it is; the same on all ranks. ``process``: what ``lint`` needs to
    know of it."""

    steps: RankSteps
    options: Mapping[str, Sequence[float]]
    trial: Trial | None
    clocks: list[Clock]  # of all ranks, on rank 0, where something was tried
    network: dict[str, Any] | None
    launching_untold: str | None
    probe_steps: int
    process: environment.Process


@dataclass(frozen=True)
class Facts:
    """What is the same on all ranks. ``parameter_bytes``: by name, in the order of registration. ``rebuilt``: whether
    DDP lays its buckets out anew. ``gradients_used``: see actions.Situation."""

    backend: str
    device: str
    torch: str
    model: str
    parameter_bytes: dict[str, int]
    caps_bytes: tuple[int, int]
    is_fp32: bool
    compiled: bool
    find_unused_parameters: bool
    rebuilt: bool
    broadcast_buffers: bool
    buffer_bytes: int
    left_out_steps: int
    gradients_used: bool


def result(ranks: Sequence[Measured], facts: Facts) -> dict[str, Any]:
    """``ranks`` in rank order."""
    steps = [each.steps for each in ranks]
    meetings = MEET_TWICE if facts.broadcast_buffers and facts.buffer_bytes else MEET_ONCE
    found = breakdown(steps, meetings)
    untold = ranks[0].launching_untold
    profile = _profile(ranks)
    situation = _situation(found, meetings, ranks, facts, profile)
    listed = [action for action in actions.actions(situation) if not (untold and action.key == "launch")]
    mistakes = _lint(ranks, facts, found, profile)
    told = verdict(
        found.step,
        found.parts,
        found.straggler,
        latency_share=_latency_share(profile, facts),
        mistake=_costliest(mistakes),
    )
    return {
        "kind": KIND,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gradcast": __version__,
        "torch": facts.torch,
        "backend": facts.backend,
        "device": facts.device,
        "script": None,
        "world_size": len(ranks),
        "nodes": _nodes(steps),
        "hosts": [each.host for each in steps],
        "model": {
            "name": facts.model,
            "tensors": len(facts.parameter_bytes),
            "bytes": sum(facts.parameter_bytes.values()),
        },
        "steps": {
            "left_out": facts.left_out_steps,
            "normal": len(steps[0].normal["step"]),
            "probe": ranks[0].probe_steps,
        },
        **_breakdown_fields(found, steps, meetings, PARTS if untold is None else _PARTS_BUT_LAUNCHING),
        "launching_untold": untold,
        "overlap_left_out": actions.overlap_left_out(situation),
        "verdict": asdict(told),
        "floor_ms": actions.floor_ms(situation),
        "actions": [asdict(action) for action in listed],
        "hopeless": actions.hopeless(situation, listed),
        "lint": mistakes,
        "network": ranks[0].network,
        **_trial_fields(ranks, profile),
        "scaling": None if profile is None else scaling.as_json(scaling.band(profile, _growth(_nodes(steps)))),
    }


def _breakdown_fields(
    found: Breakdown, steps: Sequence[RankSteps], meetings: Sequence[Sequence[str]], told: Sequence[str]
) -> dict[str, Any]:
    return {
        "step": found.step.fields(),
        "view_rank": found.view_rank,
        "parts": [{"key": part, **found.parts[part].fields()} for part in told],
        "ranks": [
            {
                "rank": each.rank,
                "host": each.host,
                "node": each.node,
                "step_ms": statistics.median(each.normal["step"]),
                "own_ms": each.own_ms,
                "parts": {part: parts[part] for part in told},
            }
            for each, parts in zip(steps, found.ranks, strict=True)
        ],
        "straggler": None if found.straggler is None else asdict(found.straggler),
        "normal_steps": [
            {"rank": each.rank, "step_ms": list(each.normal["step"]), "wait_ms": _waits_ms(each, meetings)}
            for each in steps
        ],
    }


def _waits_ms(each: RankSteps, meetings: Sequence[Sequence[str]]) -> list[float]:
    """By step: at the end of backward, and where the ranks meet before forward, too, what forward takes beyond its own
    work: there a rank waits for the buffers of one that is slower."""
    if meetings == MEET_ONCE:
        return list(each.normal["exposed"])
    own_ms = statistics.median(each.probes["alone"]["forward"])
    waits_ms = zip(each.normal["exposed"], each.normal["forward"], strict=True)
    return [exposed + max(0.0, forward - own_ms) for exposed, forward in waits_ms]


def _nodes(steps: Sequence[RankSteps]) -> list[list[int]]:
    return [[each.rank for each in steps if each.node == node] for node in sorted({each.node for each in steps})]


def _growth(nodes: Sequence[Sequence[int]]) -> scaling.Options:
    """What was measured inside of hosts, or between some of several ranks each, tells nothing of the other kind."""
    per_node = max(len(members) for members in nodes)
    return scaling.Options(nodes=Nodes(per_node) if per_node > 1 else None)


def _profile(ranks: Sequence[Measured]) -> _core.Profile | None:
    trial = ranks[0].trial
    return None if trial is None or trial.profile is None else _core.Profile.from_json(json.dumps(trial.profile))


def _situation(
    found: Breakdown,
    meetings: Sequence[Sequence[str]],
    ranks: Sequence[Measured],
    facts: Facts,
    profile: _core.Profile | None,
) -> Situation:
    trial = ranks[0].trial
    return Situation(
        step=found.step,
        parts=found.parts,
        ranks=found.ranks,
        meetings=meetings,
        profile=profile,
        caps_bytes=facts.caps_bytes,
        spread=(1.0, 1.0) if trial is None else trial.spread,
        wire_possible=facts.is_fp32,
        streams_gain=_streams_gain(ranks[0].network) if facts.backend == "gloo" else None,
        gradients_used=facts.gradients_used,
    )


def _streams_gain(network: dict[str, Any] | None) -> float | None:
    """What several TCP streams carry by what one does, in the median pair; None where Gloo has as many."""
    pairs = [] if network is None else network["pairs"]
    if any(network["connections"] >= pair["streams"] for pair in pairs):
        return None
    gains = [
        pair["tcp_streams_gbit_per_s"] / pair["tcp_gbit_per_s"]
        for pair in pairs
        if pair["tcp_gbit_per_s"] and pair["tcp_streams_gbit_per_s"]
    ]
    return statistics.median(gains) if gains else None


def _latency_share(profile: _core.Profile | None, facts: Facts) -> float | None:
    """Of what DDP's operations take, the part that does not depend on their size."""
    if profile is None:
        return None
    plan = ddp_baseline.plan(profile, facts.caps_bytes)
    cost = profile.link.all_reduce.cost_ns
    whole = sum(cost(block.size_bytes) for block in plan.blocks)
    return len(plan.blocks) * cost(1) / whole if whole > 0 else None


def _lint(
    ranks: Sequence[Measured], facts: Facts, found: Breakdown, profile: _core.Profile | None
) -> list[dict[str, Any]]:
    network = ranks[0].network
    known = lint.Facts(
        hosts=environment.hosts([each.steps.host for each in ranks], [each.process for each in ranks]),
        threads_cost=option_cost(ranks, "threads"),
        step_ms=found.step.value,
        compiled=facts.compiled,
        find_unused_parameters=facts.find_unused_parameters,
        rebuilt=facts.rebuilt,
        all_used=True,  # or there would be no diagnosis
        find_unused_cost=option_cost(ranks, "find_unused_parameters"),
        broadcast_buffers=facts.broadcast_buffers,
        buffer_bytes=facts.buffer_bytes,
        broadcast_cost=option_cost(ranks, "broadcast_buffers"),
        device=facts.device,
        network_findings={} if network is None else {each["key"]: each["sentence"] for each in network["findings"]},
    )
    if profile is not None:
        known = _with_profile(known, facts, profile, _interface_gain(network))
    return [asdict(finding) for finding in lint.findings(known)]


def _interface_gain(network: dict[str, Any] | None) -> float | None:
    """What the fastest of the other interfaces carries by what the chosen one does, between the same hosts."""
    gains = [each["gbit_per_s"] / each["chosen_gbit_per_s"] for each in (network or {}).get("alternatives", [])]
    return max(gains, default=None)


def _with_profile(known: lint.Facts, facts: Facts, profile: _core.Profile, interface_gain: float | None) -> lint.Facts:
    """When gradients come, how DDP lays out its buckets, and what that costs."""
    registered, caps, rebuilt = list(facts.parameter_bytes), facts.caps_bytes, facts.rebuilt
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


def _trial_fields(ranks: Sequence[Measured], profile: _core.Profile | None) -> dict[str, Any]:
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
    traces = aligned(ranks)
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


def aligned(ranks: Sequence[Measured]) -> list[RankTrace]:
    """The trials' traces on rank 0's clock; none where nothing was tried."""
    if any(each.trial is None or each.trial.trace is None for each in ranks):
        return []
    return [
        replace(each.trial.trace, clock=clock, host=each.steps.host).aligned()
        for each, clock in zip(ranks, ranks[0].clocks, strict=True)
    ]


def option_cost(ranks: Sequence[Measured], name: str) -> Estimate | None:
    """What one of DDP's options costs a step, or more threads than fit: with it less without it, of the slowest rank.
    None where not measured."""
    if name not in ranks[0].options:
        return None
    with_it = [each.steps.probes["cluster"]["step"] for each in ranks]
    without = [each.options[name] for each in ranks]

    def cost(*drawn: Sequence[float]) -> float:
        medians = [statistics.median(samples) for samples in drawn]
        return max(medians[: len(with_it)]) - max(medians[len(with_it) :])

    return estimate(cost, *with_it, *without)
