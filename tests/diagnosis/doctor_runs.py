"""A run of `gradcast doctor` as its report sees it: what ranks would have measured, through the doctor's own analysis.

Blocks, predictions and the floor are gradcast's own for a bundled profile on a network. What a cluster adds (noise, a
slow rank, clocks that differ) is drawn from a seed.
"""

import dataclasses
import functools
import json
import random
from types import SimpleNamespace

import gradcast
from gradcast import _core
from gradcast.diagnosis.analyze import result
from gradcast.diagnosis.analyze.measurements import RankMeasurements, TrainingSetup
from gradcast.diagnosis.analyze.step_breakdown import RankSteps
from gradcast.diagnosis.observe.environment import Process
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.diagnosis.trace.merged import Clock

MS = 1e6
FINDING = (
    "Gloo moves 1.6 Gbit/s where TCP moves 2.9: one core copies everything; "
    "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0 gives it four connections."
)
WORLD, STEPS = 4, 20
SLOW_RANK, SLOW_MS = 2, 24.0
EXCHANGE_MS = 150.0
HOP = {"latency_ns": 60_000, "bandwidth_bytes_per_s": 3e9 / 8}


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
    process = Process(None, 1, frozenset(range(4)), None, "a")
    usual = RankMeasurements(
        steps, options={}, trial=None, clocks=[], network=None, launch_unknown=None, probe_steps=32, process=process
    )
    return dataclasses.replace(usual, **changes)


def scene(world_size=WORLD, profile="resnet50", plan=None):
    """A profile, a link, and plans of overlap mode (or as ``plan`` says) and of DDP."""
    model = gradcast.load_profile(profile, 0.5)
    link = _core.ring_link(_core.Hop(**HOP), world_size)
    ddp = gradcast.make_plan(model, link, policy="ddp", mode="hook")
    return SimpleNamespace(
        model=model, link=link, plan=gradcast.make_plan(model, link, **plan or {}), ddp=ddp, world_size=world_size
    )


def doctor(*, world_size=WORLD, slow="backward", buffers=False, tried=True, untold=None, used=False, **changes):
    """The fields of doctor.json. Rank 2 is slow in the stage ``slow``. ``buffers``: DDP broadcasts them before forward.
    ``untold``: why launch overhead is not known. ``used``: the loop uses gradients.
    """
    made = json.loads(_doctor(world_size, slow, buffers, tried, untold, used))
    return made | {"created": "2026-03-04T05:06:07Z"} | changes


def bare(**changes):
    """The fields of a run that measured only ordinary steps: every field that may be null is null."""
    nothing = dict.fromkeys(("network", "straggler", "hopeless"))
    return doctor(tried=False, actions=[], lint=[], normal_steps=[], **nothing) | changes


@functools.cache
def _doctor(world_size, slow, buffers, tried, untold, used):
    now, dice = scene(world_size), random.Random(1)
    traces = rank_traces(world_size, 24, now=now)
    plan = json.loads(now.plan.to_json())
    profile = json.loads(with_link(now).to_json())
    versions = [_version(7, 6, now.ddp, 410.0), _version(8, 11, now.plan, 400.0)]
    trial = SimpleNamespace(error=None, profile=profile, plan=plan, versions=versions, spread=(0.95, 1.1))
    network, clocks, ranks = _network(now, dice), [each.clock for each in traces], []
    for rank, trace in enumerate(traces):
        steps = _rank_steps(now, rank, slow, buffers, dice)
        own = dataclasses.replace(trace, clock=Clock())
        more = {
            "options": {"find_unused_parameters": [ms - 7.5 for ms in steps.probes["cluster"]["step"]]},
            "trial": SimpleNamespace(**vars(trial), trace=own) if tried else None,
        }
        ranks.append(measured(steps, clocks=clocks, network=network, launch_unknown=untold, **more))
    parameters = {tensor.name: tensor.bytes for tensor in now.model.tensors}
    options = {"find_unused_parameters": True, "broadcast_buffers": buffers, "gradients_used": used}
    return json.dumps(result.build(ranks, setup(parameter_bytes=parameters, **options)))


def _rank_steps(now, rank, slow, buffers, dice):
    """If buffers are broadcast before forward, ranks wait inside it for one that is slow in forward; else at the end of
    backward.
    """

    def constant(**times):
        return {name: [ms] * STEPS for name, ms in times.items()}

    usual = {"forward": now.model.forward_ns / MS, "backward": now.model.backward_ns / MS, "update": 6.2}
    slowest = usual | {slow: usual[slow] + SLOW_MS}
    own = slowest if rank == SLOW_RANK else usual
    own_ms, step_ms = sum(own.values()) + 5.5, sum(slowest.values()) + 5.5 + EXCHANGE_MS
    in_forward_ms = slowest["forward"] - own["forward"] if buffers else 0.0
    normal = constant(**slowest, step=step_ms, loop=3.4, loader=2.1)
    normal["forward"] = [own["forward"] + in_forward_ms] * STEPS
    normal["exposed"] = [step_ms - own_ms * dice.uniform(0.995, 1.005) - in_forward_ms for _ in range(STEPS)]
    if rank == 1:
        normal["exposed"][11] -= 30  # a hiccup
    alone = constant(**own, step=sum(own.values()))
    cluster = constant(**own, step=sum(own.values()) + EXCHANGE_MS)
    computing = constant(**own | {"forward": own["forward"] - 5.1})
    layers_ms = {"fc": 3.0, "layer3.0.conv1": own[slow]}
    probes = {"alone": alone, "node": alone, "cluster": cluster}
    host = f"host{rank // 2}"
    return RankSteps(rank, host, normal, probes, computing, layers_ms=layers_ms)


def _version(version, from_step, plan, predicted_ms):
    fields = {"version": version, "from_step": from_step, "policy": plan.policy, "blocks": len(plan.blocks)}
    return fields | {"predicted_ms": predicted_ms, "measured_ms": 1.013 * predicted_ms}


def rank_traces(world_size=WORLD, step_count=10, *, now=None, profile="resnet50", cap_bytes=4e6):
    """What each rank would have recorded on its own clock: consecutive, jittered steps that follow the plan of the
    scene ``now``, or DDP's buckets.
    """
    now = now or scene(
        world_size, profile, plan={"policy": "ddp", "mode": "hook", "parameters": {"cap_bytes": cap_bytes}}
    )
    played = gradcast.play(now.model, now.link, now.plan)
    return [_rank_trace(now, played, rank, step_count, random.Random(1 + rank)) for rank in range(world_size)]


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

        backward, forward = at(now.model.backward_ns), at(played.forward_start_ns + 3e5)
        end = at(played.iteration_ns + 1e6)
        # Inside of forward, as in overlap mode: a wait, and the update of what has arrived.
        wait, update, rest = (forward + round(share * (end - forward)) for share in (0.3, 0.4, 0.45))
        spans = [("backward", start, backward), ("wait", backward, forward), ("forward", forward, end)]
        spans += [("wait", wait, update), ("update", update, rest)]
        trace.spans += [merged_trace.Span(*span) for span in spans]
        trace.steps.append(merged_trace.Step(number, start, end + 500_000))
        for index, times in enumerate(played.blocks):
            ready, launch, finish = at(times.ready_ns), at(times.launch_ns) + 200_000, at(times.finish_ns)
            trace.blocks.append(merged_trace.BlockSpan(number, index, index, ready, launch, max(finish, launch + 1000)))
        start = end + 500_000
    return trace


def with_link(now):
    return now.model.replace(world_size=now.world_size, link=now.link)


def _names(now):
    ends, offset = [], 0
    for tensor in now.model.tensors:
        ends.append((offset, offset + tensor.bytes, tensor.name))
        offset += tensor.bytes
    return [
        [name for start, end, name in ends if any(low < end and start < high for low, high in block.ranges)]
        for block in now.plan.blocks
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
