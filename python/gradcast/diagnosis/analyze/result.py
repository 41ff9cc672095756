"""Builds the fields of doctor.json from what all ranks measured (docs/guide/doctor.md). Pure, but for the date."""

import datetime
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze import actions, lint, lint_costs, timelines
from gradcast.diagnosis.analyze.actions import Situation
from gradcast.diagnosis.analyze.bottleneck import bottleneck
from gradcast.diagnosis.analyze.measurements import RankMeasurements, TrainingSetup, aligned_traces, option_costs
from gradcast.diagnosis.analyze.step_breakdown import ONE_SYNC, TWO_SYNCS, Breakdown, RankSteps, breakdown
from gradcast.diagnosis.observe import environment
from gradcast.diagnosis.runs import KIND, PARTS, VERSION
from gradcast.host_traffic import Hosts
from gradcast.scaling import estimate as scaling
from gradcast.scaling.growth import Nodes


def build(ranks: Sequence[RankMeasurements], setup: TrainingSetup) -> dict[str, Any]:
    """Returns the fields of doctor.json. ``ranks`` are in rank order."""
    steps = [each.steps for each in ranks]
    found = breakdown(steps, TWO_SYNCS if setup.broadcast_buffers and setup.buffer_bytes else ONE_SYNC)
    launch_unknown, trial, network = ranks[0].launch_unknown, ranks[0].trial, ranks[0].network
    known_parts = [part for part in PARTS if not (launch_unknown and part == "launch")]
    own = None if trial is None or trial.profile is None else _core.Profile.from_json(json.dumps(trial.profile))
    profile = None if own is None else ddp_baseline.as_ddp_sends(own, setup.parameter_bytes)
    hosts = Hosts.of([each.host for each in steps])
    situation = Situation(
        found,
        setup,
        profile,
        hosts,
        spread=(1.0, 1.0) if trial is None else trial.spread,
        streams_gain=gain_of_streams(network) if setup.backend == "gloo" else None,
    )
    listed = [action for action in actions.actions(situation) if not (launch_unknown and action.key == "launch")]
    mistakes = lint_of(ranks, setup, found.step.value, profile)
    kind, sentence = bottleneck(
        found, latency_share=_latency_share(profile, setup), mistake=mistakes[0] if mistakes else None
    )
    return {
        "kind": KIND,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gradcast": _core.__version__,
        "torch": setup.torch,
        "backend": setup.backend,
        "device": setup.device,
        "script": None,
        "world_size": len(ranks),
        "nodes": hosts.ranks,
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
        **_breakdown_fields(found, steps, hosts, known_parts),
        "launching_untold": launch_unknown,
        "overlap_left_out": actions.overlap_left_out(situation),
        "early_waits": actions.early_waits(situation),
        "verdict": {"kind": kind, "sentence": sentence},
        "floor_ms": actions.floor_ms(situation),
        "actions": [asdict(action) for action in listed],
        "hopeless": actions.hopeless(situation, listed),
        "lint": [asdict(mistake) for mistake in mistakes],
        "network": network,
        **_trial_fields(ranks, own),
        "scaling": None if profile is None else scaling.as_json(scaling.band(profile, _growth(hosts))),
    }


def _breakdown_fields(
    found: Breakdown, steps: Sequence[RankSteps], hosts: Hosts, known_parts: Sequence[str]
) -> dict[str, Any]:
    return {
        "step": found.step.fields(),
        "view_rank": found.view_rank,
        "parts": [{"key": part, **found.parts[part].fields()} for part in known_parts],
        "ranks": [
            {
                "rank": each.rank,
                "host": each.host,
                "node": hosts.host_of[each.rank],
                "step_ms": statistics.median(each.normal["step"]),
                "own_ms": each.own_ms,
                "parts": {part: parts[part] for part in known_parts},
            }
            for each, parts in zip(steps, found.ranks, strict=True)
        ],
        "straggler": None if found.straggler is None else asdict(found.straggler),
        "normal_steps": [
            {"rank": each.rank, "step_ms": list(each.normal["step"]), "wait_ms": _waits_ms(each, found.sync_phases)}
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


def _growth(hosts: Hosts) -> scaling.Options:
    """Separates costs inside hosts from those between hosts, which say nothing about each other."""
    per_node = max(hosts.sizes)
    return scaling.Options(nodes=Nodes(per_node) if per_node > 1 else None)


def gain_of_streams(network: dict[str, Any] | None) -> float | None:
    """Returns the gain of several TCP streams over one in the median pair; None if unknown, or if Gloo has several."""
    pairs = [] if network is None else network["pairs"]
    if any(network["connections"] >= pair["streams"] for pair in pairs):
        return None
    rates = [(pair["tcp_streams_gbit_per_s"], pair["tcp_gbit_per_s"]) for pair in pairs]
    gains = [several / one for several, one in rates if several and one]
    return statistics.median(gains) if gains else None


def _latency_share(profile: _core.Profile | None, setup: TrainingSetup) -> float | None:
    """Returns the share of the time of DDP's operations that does not depend on their size."""
    if profile is None:
        return None
    plan = ddp_baseline.plan(profile, setup.caps_bytes)
    cost = profile.link.all_reduce.cost_ns
    whole = sum(cost(block.size_bytes) for block in plan.blocks)
    return len(plan.blocks) * cost(1) / whole if whole > 0 else None


def lint_of(
    ranks: Sequence[RankMeasurements], setup: TrainingSetup, step_ms: float, profile: _core.Profile | None
) -> list[lint.Mistake]:
    network = ranks[0].network or {"findings": [], "alternatives": []}
    # How many times the bytes of the chosen interface the fastest other one carries between the same hosts.
    gains = [each["gbit_per_s"] / each["chosen_gbit_per_s"] for each in network["alternatives"]]
    layout, costs = None, option_costs(ranks)
    if profile is not None:
        layout, predicted = lint_costs.predicted(profile, setup, step_ms, max(gains, default=None))
        costs |= predicted
    hosts = environment.hosts([each.steps.host for each in ranks], [each.process for each in ranks])
    findings = {each["key"]: each["sentence"] for each in network["findings"]}
    return lint.mistakes(lint.Evidence(setup, hosts, costs, findings, layout))


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
