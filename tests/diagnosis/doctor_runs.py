"""A run of `gradcast doctor` as its report sees it.

Blocks, predictions and the floor are gradcast's own for a bundled profile on a network. What a cluster adds (noise, a
slow rank, clocks that differ) is drawn from a seed.
"""

import dataclasses
import json
import math
import random
import statistics
from types import SimpleNamespace

import gradcast
from gradcast import _core
from gradcast.diagnosis.analyze import timelines
from gradcast.diagnosis.analyze.measurements import RankMeasurements, TrainingSetup
from gradcast.diagnosis.observe.environment import Process
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.diagnosis.trace.clocks import Clock

MS = 1e6
FINDING = (
    "Gloo moves 1.6 Gbit/s where TCP moves 2.9: one core copies everything; "
    "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0 gives it four connections."
)
WORLD = 4
SLOW_RANK = 2
WIRE = 'gradcast.attach(model, optimizer, options=Options(wire="bf16"))'
HOP = {"latency_ns": 60_000, "bandwidth_bytes_per_s": 3e9 / 8}
LINT = [
    {"key": "buckets", "title": "buckets of 1 MB", "cost_ms": 7.5, "remedy": "DDP(model, bucket_cap_mb=25)"},
    {"key": "unused", "title": "find_unused_parameters is on", "cost_ms": None, "remedy": "leave it out"},
]


def setup(**changes):
    """A training with DDP's usual options."""
    usual = TrainingSetup(
        backend="gloo", device="cpu", torch="2.11.0", model="ResNet", parameter_bytes={},
        caps_bytes=(1 << 20, 25 << 20), is_fp32=True, compiled=False, find_unused_parameters=False, rebuilt=True,
        broadcast_buffers=False, buffer_bytes=64, warmup_steps=5, gradients_used=False,
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)


def measured(steps, **changes):
    """What one rank measured, without a trial and a network check. ``steps`` are its RankSteps."""
    process = Process({}, 1, frozenset(range(4)), None, "a")
    usual = RankMeasurements(
        steps, options={}, trial=None, clocks=[], network=None, launch_unknown=None, probe_steps=32, process=process
    )
    return dataclasses.replace(usual, **changes)


def scene(world_size=WORLD, profile="resnet50", scale=0.5):
    """Profile, link, plans of overlap mode and of DDP, and what play predicts for both."""
    model = gradcast.load_profile(profile, scale)
    link = _core.ring_link(_core.Hop(**HOP), world_size)
    plan = gradcast.make_plan(model, link)
    ddp = gradcast.make_plan(model, link, policy="ddp", mode="hook")
    played = {"played": gradcast.play(model, link, plan), "ddp_played": gradcast.play(model, link, ddp)}
    return SimpleNamespace(model=model, link=link, plan=plan, ddp=ddp, world_size=world_size, **played)


def doctor(world_size=WORLD, seed=1, slow_ms=24.0, **changes):
    """The fields of doctor.json."""
    now, dice = scene(world_size), random.Random(seed)
    nodes = [list(range(first, min(first + 2, world_size))) for first in range(0, world_size, 2)]
    own = [_own_parts(now, dice, slow_ms if rank == SLOW_RANK else 0) for rank in range(world_size)]
    own_ms = [sum(parts.values()) for parts in own]
    step_ms = now.ddp_played.iteration_ns / MS + max(own_ms) - min(own_ms) + 12
    normal = [_normal_steps(rank, step_ms, own_ms[rank], dice) for rank in range(world_size)]
    step_ms = statistics.median(normal[0]["step_ms"])
    view = sorted(range(world_size), key=lambda rank: own_ms[rank])[(world_size - 1) // 2]
    ranks = [_rank(rank, nodes, step_ms, own[rank], max(own_ms)) for rank in range(world_size)]
    predicted_ms = now.played.iteration_ns / MS + slow_ms
    timeline = [_rank_timeline(now, rank, dice) for rank in range(world_size)]
    whole = {
        "kind": "gradcast-doctor", "version": 1, "created": "2026-03-04T05:06:07Z", "gradcast": gradcast.__version__,
        "torch": "2.11.0", "backend": "gloo", "device": "cpu", "script": "train.py", "world_size": world_size,
        "nodes": nodes, "hosts": [f"host{rank // 2}" for rank in range(world_size)],
        "model": {"name": "ResNet", "tensors": len(now.model.tensors), "bytes": _bytes(now)},
        "steps": {"left_out": 5, "normal": 20, "probe": 32},
        "step": {"ms": step_ms, "low_ms": step_ms - 2.5, "high_ms": step_ms + 3.1},
        "view_rank": view,
        "parts": [
            {"key": key, "ms": ms, "low_ms": ms * 0.98, "high_ms": ms * 1.03}
            for key, ms in ranks[view]["parts"].items()
        ],
        "ranks": ranks,
        "straggler": {"rank": SLOW_RANK, "stage": "backward", "layer": "layer3.0.conv1", "ms": slow_ms},
        "normal_steps": normal,
        "verdict": {
            "kind": "bandwidth-bound",
            "sentence": f"The network is the limit: {ranks[view]['parts']['network']:.0f} of {step_ms:.0f} ms per step "
            "go into traffic between hosts that nothing hides.",
        },
        "launching_untold": None,
        "floor_ms": _core.bound(now.model, now.link).best_ns / MS + slow_ms,
        "actions": _actions(step_ms, predicted_ms),
        "hopeless": None,
        "lint": LINT,
        "network": _network(now, dice),
        "profile": json.loads(with_link(now).to_json()),
        "plan": json.loads(now.plan.to_json()),
        "prediction": {"mode": "overlap", "predicted_ms": predicted_ms, "measured_ms": predicted_ms * 1.013},
        "timeline": timeline,
        "predicted_timeline": timelines.predicted(with_link(now), now.plan),
        "bandwidth": [_bandwidth_of(step, dice) for step in range(32)],
        "plan_versions": [
            _version(7, 6, now.ddp, predicted_ms * 1.02, predicted_ms * 1.05),
            _version(8, 11, now.plan, predicted_ms, predicted_ms * 1.013),
        ],
        "scaling": _scaling(),
        "not_tried": None, "overlap_left_out": None,
    }  # fmt: skip
    return whole | changes


def _version(version, from_step, plan, predicted_ms, measured_ms):
    fields = {"version": version, "from_step": from_step, "policy": plan.policy, "blocks": len(plan.blocks)}
    return fields | {"predicted_ms": predicted_ms, "measured_ms": measured_ms}


def bare(**changes):
    """The fields of a run that measured only ordinary steps: every field that may be null is null."""
    nothing = dict.fromkeys(
        ("straggler", "hopeless", "overlap_left_out", "network", "profile", "plan", "prediction", "scaling", "script")
    )
    nothing |= {key: [] for key in ("lint", "actions", "timeline", "bandwidth", "plan_versions", "normal_steps")}
    return doctor(**nothing, predicted_timeline=None, floor_ms=None) | changes


def rank_traces(world_size=WORLD, step_count=10, profile="resnet50", policy="ddp", cap_bytes=4e6, seed=1):
    """What each rank would have recorded on its own clock: consecutive, jittered steps that follow a plan."""
    model, link = gradcast.load_profile(profile, 0.5), _core.ring_link(_core.Hop(**HOP), world_size)
    plan = gradcast.make_plan(model, link, policy=policy, mode="hook", parameters={"cap_bytes": cap_bytes})
    played = gradcast.play(model, link, plan)
    now = SimpleNamespace(model=model, link=link, plan=plan)
    return [_rank_trace(now, played, rank, step_count, random.Random(seed + rank)) for rank in range(world_size)]


def _rank_trace(now, played, rank, step_count, dice):
    clock = Clock(offset_ns=rank * 7_000_000_000 + 12_345)
    table = [
        {"block": index, "bytes": block.size_bytes, "tensors": names, "reason": block.reason}
        for index, (block, names) in enumerate(zip(now.plan.blocks, _names(now), strict=True))
    ]
    trace = merged_trace.RankTrace(rank, f"host{rank // 2}", clock, table=table)
    start = 1_700_000_000_000_000 + clock.offset_ns
    for number in range(step_count):
        factor = dice.uniform(0.99, 1.03)

        def at(ns, start=start, factor=factor):
            return round(start + ns * factor + dice.uniform(0, 2e5))

        backward_ns, last_ns = now.model.backward_ns, played.iteration_ns
        wait_ns = max(times.finish_ns for times in played.blocks)
        ends = [at(backward_ns), at(max(wait_ns, backward_ns + 3e5)), at(last_ns + 1e6)]
        trace.spans += [
            merged_trace.Span("backward", at(0), ends[0]),
            merged_trace.Span("wait", ends[0], ends[1]),
            merged_trace.Span("forward", ends[1], ends[2]),
        ]
        # Inside of forward, as in overlap mode: a wait, and the update of what has arrived.
        inside = [ends[1] + round(share * (ends[2] - ends[1])) for share in (0.3, 0.4, 0.45)]
        trace.spans += [merged_trace.Span("wait", *inside[:2]), merged_trace.Span("update", *inside[1:])]
        trace.steps.append(merged_trace.Step(number, start, ends[2] + 500_000))
        for index, times in enumerate(played.blocks):
            ready, launch, finish = at(times.ready_ns), at(times.launch_ns) + 200_000, at(times.finish_ns)
            trace.blocks.append(merged_trace.BlockSpan(number, index, index, ready, launch, max(finish, launch + 1000)))
        start = ends[2] + 500_000
    return trace


def with_link(now):
    fields = {"world_size": now.world_size, "link": json.loads(now.link.to_json())}
    return _core.Profile.from_json(json.dumps(json.loads(now.model.to_json()) | fields))


def _bytes(now):
    return sum(tensor.bytes for tensor in now.model.tensors)


def _names(now):
    ends, offset = [], 0
    for tensor in now.model.tensors:
        ends.append((offset, offset + tensor.bytes, tensor.name))
        offset += tensor.bytes
    return [
        [name for start, end, name in ends if any(low < end and start < high for low, high in block.ranges)]
        for block in now.plan.blocks
    ]


def _own_parts(now, dice, slow_ms):
    noise = lambda: dice.uniform(0.98, 1.02)  # noqa: E731
    return {
        "forward": now.model.forward_ns / MS * noise(),
        "backward": now.model.backward_ns / MS * noise() + slow_ms,
        "update": 6.2 * noise(),
        "launch": 5.1,
        "loop": 3.4 * noise(),
        "data_storage": 0.0,
        "data_cpu": 2.1 * noise(),
    }


def _rank(rank, nodes, step_ms, own, slowest_ms):
    own_ms = sum(own.values())
    waiting = slowest_ms - own_ms
    network = (step_ms - own_ms - waiting) * 0.97
    parts = own | {"interconnect": 0.0, "network": network, "waiting": waiting}
    parts["rest"] = step_ms - sum(parts.values())
    node = next(index for index, members in enumerate(nodes) if rank in members)
    return {"rank": rank, "host": f"host{node}", "node": node, "step_ms": step_ms, "own_ms": own_ms, "parts": parts}


def _normal_steps(rank, step_ms, own_ms, dice):
    steps = [step_ms * dice.gauss(1, 0.006) for _ in range(20)]
    waits = [step - own_ms * abs(dice.gauss(1, 0.02)) for step in steps]
    if rank == 1:
        waits[11] -= 30  # a hiccup
    return {"rank": rank, "step_ms": steps, "wait_ms": waits}


def _actions(step_ms, predicted_ms):
    def action(key, title, how, ms):
        gain = step_ms / ms
        interval = {"speedup": gain, "low": gain * 0.96, "high": gain * 1.03}
        return {"key": key, "title": title, "how": how, **interval, "predicted_ms": ms}

    return [
        action("wire", "16-bit gradients, overlap mode", WIRE, predicted_ms * 0.82),
        action("overlap", "overlap mode", "gradcast.attach(model, optimizer)", predicted_ms),
        action("hook", "hook mode", "gradcast.attach(model)", step_ms * 0.97),
    ]


def _network(now, dice):
    cost = now.link.all_reduce.pieces[0]
    sizes = [2**power for power in range(10, 26)]
    samples = [
        {"bytes": size, "ms": now.link.all_reduce.cost_ns(size) / MS * dice.uniform(0.97, 1.05)} for size in sizes
    ]
    pairs = [
        {"a": a, "b": b, "latency_us": dice.uniform(55, 80), "tcp_gbit_per_s": dice.uniform(2.7, 2.95),
         "tcp_streams_gbit_per_s": dice.uniform(2.8, 2.99), "streams": 4, "gloo_gbit_per_s": dice.uniform(1.5, 1.8),
         "alpha_us": dice.uniform(110, 140), "beta_ns_per_byte": dice.uniform(4.4, 5.3)}
        for a in range(now.world_size) for b in range(a + 1, now.world_size)
    ]  # fmt: skip
    return {
        "interfaces": ["eth0"] * now.world_size,
        "collective": {"op": "all_reduce", "samples": samples, "alpha_us": cost.alpha_ns / 1e3,
                       "beta_ns_per_byte": cost.beta_ns_per_byte, "bus_gbit_per_s": 2.8, "fit_error": 0.02},
        "pairs": pairs,
        "alternatives": [],
        "connections": 1,
        "findings": [{"key": "one_core", "sentence": FINDING}],
    }  # fmt: skip


def _rank_timeline(now, rank, dice):
    """What play predicts, with one factor for all times of a rank: blocks end one after the other, measured or not."""
    late_ms, factor = dice.uniform(0, 1.5), dice.uniform(1.0, 1.02) * (1.06 if rank == SLOW_RANK else 1.0)
    shown = timelines.predicted(with_link(now), now.plan)
    for each in (*shown["spans"], *shown["blocks"]):
        each |= {key: late_ms + value * factor for key, value in each.items() if key.endswith("_ms")}
    for block, names in zip(shown["blocks"], _names(now), strict=True):
        block |= {"first": names[0], "last": names[-1]}
    return {"rank": rank} | shown


def _bandwidth_of(step, dice):
    rate = 1.3 if 18 <= step < 23 else 1.86
    return {"step": step, "at_ms": 410.0 * step, "gbit_per_s": rate * dice.uniform(0.95, 1.04)}


def _scaling():
    points = []
    for network, factor in (("measured", 1.0), ("10 Gbit/s", 0.4)):
        for workers in (1, 2, 4, 8, 16, 32, 64):
            ms = 270 + factor * (90 * (2 - 2 / workers) + 3 * math.log2(workers) ** 2) if workers > 1 else 270
            basis = "measured" if workers == 4 and factor == 1 else "fitted" if workers < 4 else "extrapolated"
            wide = 0.02 + 0.03 * math.log2(workers)
            point = {"workers": workers, "network": network, "algorithm": "ring", "basis": basis, "step_ms": ms}
            interval = {"low_ms": ms * (1 - wide / 2), "high_ms": ms * (1 + wide)}
            points.append(point | interval | {"efficiency": 270 / ms})
    left_out = ["the costs of the network inside a node are not known"]
    return {"points": points, "knee_workers": 16, "worth_trying": [2, 4, 8, 16], "left_out": left_out}
