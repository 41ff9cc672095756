"""What would make a step shorter, and by how much: each action as ``play`` predicts it on the measured profile.

A prediction is the measured step plus the change that ``play`` predicts. Its interval comes from the low and high ends
of the network's costs, between which nine tenths of the measured blocks lie, or from the interval of the part of the
step that an action removes.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, ONE_SYNC, synchronized_ms
from gradcast.diagnosis.runs import WORTHWHILE_SPEEDUP

_MS = 1e6
# Casting is not included, so 16 bits halve the cost per byte at best.
_WIRE_COST = 0.5
_PASSES = ("forward", "backward", "launch")


@dataclass(frozen=True)
class Action:
    key: str
    title: str
    how: str
    speedup: float  # samples per second over the present ones
    low: float
    high: float
    predicted_ms: float  # of a step


@dataclass(frozen=True)
class Situation:
    """What the predictions start from.

    * ``ranks``: the parts of each rank's step, ms.
    * ``profile``: with its link, as ``attach`` measured it in this training, so that forward includes the loop's own
      work; None if there was no trial.
    * ``caps_bytes``: of DDP's first bucket and of the others.
    * ``spread``: low and high factor of the network's costs (``link_costs.spread``).
    * ``streams_gain``: how many times the bytes of one TCP stream several streams carry; None if unknown.
    * ``sync_phases``: see step_breakdown.py.
    * ``gradients_used``: whether the loop reads or writes gradients between backward and step(), as clipping does. Then
      it waits there for all of them, and nothing overlaps with forward.
    """

    step: Estimate
    parts: Mapping[str, Estimate]
    ranks: Sequence[Mapping[str, float]]
    profile: _core.Profile | None
    caps_bytes: tuple[int, int]
    spread: tuple[float, float] = (1.0, 1.0)
    wire_possible: bool = True
    streams_gain: float | None = None
    sync_phases: Sequence[Sequence[str]] = ONE_SYNC
    gradients_used: bool = False


def actions(situation: Situation) -> list[Action]:
    """Lists all actions in the order of predicted gain, including those that gain nothing."""
    listed = [_loader(situation), _launch_overhead(situation), _straggler(situation), _accumulate(situation)]
    if situation.profile is not None:
        listed += [_hook(situation), _bucket(situation)]
        if not situation.gradients_used:
            listed.append(_overlap(situation))
        if situation.wire_possible:
            listed.append(_wire(situation))
        if situation.streams_gain is not None:
            listed.append(_connections(situation, situation.streams_gain))
    return sorted(listed, key=lambda action: -action.speedup)


def floor_ms(situation: Situation) -> float | None:
    """Returns a lower bound of the step for all schedules of all-reduces on this network; None without a profile."""
    if situation.profile is None:
        return None
    mode = "hook" if situation.gradients_used else "overlap"
    bound_ns = _core.bound(situation.profile, situation.profile.link, mode=mode).best_ns
    return _with_passes(situation, situation.step.value + (bound_ns - _ddp_ns(situation)) / _MS)


def hopeless(situation: Situation, listed: Sequence[Action]) -> str | None:
    """Returns a sentence if no action is worth it, else None."""
    if any(action.speedup >= WORTHWHILE_SPEEDUP for action in listed):
        return None
    own_ms = sum(situation.parts[part].value for part in (*COMPUTE, "launch", "loop"))
    return (
        f"None of these actions will help, because {own_ms / situation.step.value:.0%} of the step is the rank's own "
        "work. Only a faster device, a smaller model or fewer steps will."
    )


def overlap_left_out(situation: Situation) -> str | None:
    """Returns a sentence if overlap mode was left out, else None."""
    if situation.profile is None or not situation.gradients_used:
        return None
    return (
        "Overlap mode, which sends gradients during the next forward pass, was left out: your loop writes into the "
        "gradients between backward and step(), as clipping and a GradScaler do, and waits for all of them there."
    )


def _ddp_ns(
    situation: Situation, link: _core.LinkModel | None = None, caps_bytes: tuple[int, int] | None = None
) -> float:
    """Predicts DDP's step. The default is the measured link and the user's buckets."""
    return ddp_baseline.plan(situation.profile, caps_bytes or situation.caps_bytes, link).predicted_ns


def _by_play(
    situation: Situation, key: str, title: str, how: str, iteration_ns: Callable[[_core.LinkModel], float]
) -> Action:
    """Predicts an action. ``iteration_ns`` returns the time of an iteration with the action, on a given link."""
    usual_ns = _ddp_ns(situation)
    gains, after_ms = [], []
    for factor in (1.0, *situation.spread):
        link = situation.profile.link.scaled(factor, factor)
        # On a more expensive network the present step would be longer, too.
        now_ns = _ddp_ns(situation, link)
        after_ms.append(_with_passes(situation, situation.step.value + (iteration_ns(link) - usual_ns) / _MS))
        gains.append((situation.step.value + (now_ns - usual_ns) / _MS) / after_ms[-1])
    return Action(key, title, how, gains[0], min(gains), max(gains), after_ms[0])


def _planned(situation: Situation, key: str, title: str, how: str, *, mode: str, byte_cost: float = 1.0) -> Action:
    """Predicts a plan of gradcast for a link on which bytes cost ``byte_cost`` times as much."""
    plan = _core.make_plan(situation.profile, situation.profile.link.scaled(1, byte_cost), mode=mode)
    return _by_play(
        situation,
        key,
        title,
        how,
        lambda link: _core.play(situation.profile, link.scaled(1, byte_cost), plan).iteration_ns,
    )


def _overlap(situation: Situation) -> Action:
    return _planned(situation, "overlap", "overlap mode", "gradcast.attach(model, optimizer)", mode="overlap")


def _hook(situation: Situation) -> Action:
    title = "hook mode (planned blocks that overlap with backward only)"
    return _planned(situation, "hook", title, "gradcast.attach(model)", mode="hook")


def _wire(situation: Situation) -> Action:
    mode = "hook" if situation.gradients_used else "overlap"
    given = "model" if situation.gradients_used else "model, optimizer"
    title = f"{mode} mode with bf16 on the wire (lossy)"
    how = f'gradcast.attach({given}, options=gradcast.Options(wire="bf16"))'
    return _planned(situation, "wire", title, how, mode=mode, byte_cost=_WIRE_COST)


def _bucket(situation: Situation) -> Action:
    times = {cap: _ddp_ns(situation, caps_bytes=ddp_baseline.same_caps(cap)) for cap in ddp_baseline.SWEPT_CAPS_MIB}
    best = min(times, key=lambda cap: times[cap])
    return _by_play(
        situation,
        "bucket",
        "a different bucket size in DDP",
        f"DistributedDataParallel(model, bucket_cap_mb={best})",
        lambda link: _ddp_ns(situation, link, ddp_baseline.same_caps(best)),
    )


def _connections(situation: Situation, gain: float) -> Action:
    """Each operation uses one connection, so DDP gains from as many as it has operations in flight."""
    gain = min(gain, ddp_baseline.IN_FLIGHT)
    return _by_play(
        situation,
        "connections",
        "four connections per peer",
        "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0, with the name of your interface four times",
        lambda link: _ddp_ns(situation, link.scaled(1, 1 / gain)),
    )


def _accumulate(situation: Situation) -> Action:
    parts = situation.parts
    unsent = ("forward", "backward", "launch", "loop", "data_storage", "data_cpu", "waiting")
    unsent_ms = sum(max(0.0, parts[part].value) for part in unsent)
    return _by_part(
        situation,
        "accumulate",
        "gradient accumulation over 2 batches (doubles the batch size)",
        "with model.no_sync(): around every other backward pass; step() after two",
        [max(0.0, (step - unsent_ms) / 2) for step in _range(situation.step)],
    )


def _loader(situation: Situation) -> Action:
    return _without(
        situation,
        DATA,
        "loader",
        "a data loader that is never waited for",
        "DataLoader(num_workers=…, prefetch_factor=…), or faster storage",
    )


def _launch_overhead(situation: Situation) -> Action:
    return _without(
        situation,
        ("launch",),
        "launch",
        "no launch overhead",
        "compile the layers (block.compile()), use a fused optimizer (fused=True) or larger batches",
    )


def _without(situation: Situation, parts: Sequence[str], key: str, title: str, how: str) -> Action:
    """Removes parts from every rank's own work.

    A slow loader on one rank delays all ranks; but if another rank computes for longer, it delays none.
    """
    gone_ms = synchronized_ms(situation.ranks, situation.sync_phases) - synchronized_ms(
        situation.ranks, situation.sync_phases, parts
    )
    below_ms = sum(situation.parts[part].value - situation.parts[part].low for part in parts)
    above_ms = sum(situation.parts[part].high - situation.parts[part].value for part in parts)
    return _by_part(situation, key, title, how, [gone_ms, max(0.0, gone_ms - below_ms), gone_ms + above_ms])


def _straggler(situation: Situation) -> Action:
    return _by_part(
        situation,
        "straggler",
        "no rank slower than the others",
        "examine the slowest rank, or train without its host",
        [max(0.0, ms) for ms in _range(situation.parts["waiting"])],
    )


def _by_part(situation: Situation, key: str, title: str, how: str, gone_ms: Sequence[float]) -> Action:
    """Predicts an action that removes time. ``gone_ms`` is the removed time per step: its value and the ends of its
    range.
    """
    step_ms = situation.step.value
    passes = ("forward", "backward") if key == "launch" else _PASSES
    after_ms = [_with_passes(situation, step_ms - gone, passes) for gone in gone_ms]
    gains = [step_ms / after for after in after_ms]
    return Action(key, title, how, gains[0], min(gains), max(gains), after_ms[0])


def _with_passes(situation: Situation, after_ms: float, passes: Sequence[str] = _PASSES) -> float:
    """Keeps the passes in the step, whatever else an action removes.

    Otherwise a step of nearly 0 would be promised if an interval is as wide as the step, or if the network was slower
    during the trial than in the training.
    """
    return max(after_ms, min(situation.step.value, sum(situation.parts[part].value for part in passes)))


def _range(each: Estimate) -> tuple[float, float, float]:
    return each.value, each.low, each.high
