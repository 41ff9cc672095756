"""What would make a step shorter, and by how much: each action predicted by ``play`` on the measured profile.

A prediction is the measured step plus what ``play`` says that the action changes. The interval comes from the network's
costs as low and as high as nine tenths of the measured blocks were, or from the interval of the part that goes.

Pure. Thread safety: pure; any thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, MEET_ONCE, together_ms
from gradcast.diagnosis.runs import WORTH

_MS = 1e6
# What casting takes is not in it, so 16 bits halve the cost per byte at best.
_WIRE = 0.5
_PASSES = ("forward", "backward", "launch")


@dataclass(frozen=True)
class Action:
    """``speedup``: samples per second by those of now; ``predicted_ms``: of a step."""

    key: str
    title: str
    how: str
    speedup: float
    low: float
    high: float
    predicted_ms: float


@dataclass(frozen=True)
class Situation:
    """What is known. ``ranks``: the parts of each, ms. ``profile``: with its link, as ``attach`` measured it in this
    training, so that forward holds the loop's own work; None where it could not. ``caps_bytes``: of DDP's first bucket
    and of the others. ``spread``: see link_costs.spread. ``streams_gain``: how many times the bytes of one TCP stream
    several carry; None: not known. ``gradients_used``: by the loop, between backward and step(), as clipping does: then
    all of them are waited for there, and nothing travels under forward.
    """

    step: Estimate
    parts: Mapping[str, Estimate]
    ranks: Sequence[Mapping[str, float]]
    profile: _core.Profile | None
    caps_bytes: tuple[int, int]
    spread: tuple[float, float] = (1.0, 1.0)
    wire_possible: bool = True
    streams_gain: float | None = None
    meetings: Sequence[Sequence[str]] = MEET_ONCE  # see stalls.py
    gradients_used: bool = False


def actions(found: Situation) -> list[Action]:
    """In the order of predicted gain; all of them, also those that gain nothing."""
    listed = [_loader(found), _launching(found), _straggler(found), _accumulate(found)]
    if found.profile is not None:
        listed += [_hook(found), _bucket(found)]
        if not found.gradients_used:
            listed.append(_overlap(found))
        if found.wire_possible:
            listed.append(_wire(found))
        if found.streams_gain is not None:
            listed.append(_connections(found, found.streams_gain))
    return sorted(listed, key=lambda action: -action.speedup)


def floor_ms(found: Situation) -> float | None:
    """The step below which no schedule of all-reduces gets on this network."""
    if found.profile is None:
        return None
    mode = "hook" if found.gradients_used else "overlap"
    bound_ns = _core.bound(found.profile, found.profile.link, mode=mode).best_ns
    return _with_passes(found, found.step.value + (bound_ns - _ddp_ns(found)) / _MS)


def hopeless(found: Situation, listed: Sequence[Action]) -> str | None:
    """A sentence where no action is worth the trouble."""
    if any(action.speedup >= WORTH for action in listed):
        return None
    own_ms = sum(found.parts[part].value for part in (*COMPUTE, "launch", "loop"))
    return (
        f"Nothing here will help, because {own_ms / found.step.value:.0%} of the step is the rank's own work: only a "
        "faster device, a smaller model or fewer steps would."
    )


def overlap_left_out(found: Situation) -> str | None:
    """A sentence where nothing is said of sending gradients under forward."""
    if found.profile is None or not found.gradients_used:
        return None
    return (
        "Your loop writes into the gradients between backward and step(), as clipping and a GradScaler do: it waits "
        "for all of them there, so overlap mode, which sends them under the next forward pass, is left out."
    )


def _ddp_ns(found: Situation, link: _core.LinkModel | None = None, caps_bytes: tuple[int, int] | None = None) -> float:
    """What a step takes with stock DDP; on the measured link and with the user's buckets, if nothing else is said."""
    return ddp_baseline.plan(found.profile, caps_bytes or found.caps_bytes, link).predicted_ns


def _by_play(
    found: Situation, key: str, title: str, how: str, iteration_ns: Callable[[_core.LinkModel], float]
) -> Action:
    """``iteration_ns``: with the action, on a link."""
    usual_ns = _ddp_ns(found)
    gains, after_ms = [], []
    for factor in (1.0, *found.spread):
        link = found.profile.link.scaled(factor, factor)
        # On a network that costs more, the step of now would be longer, too.
        now_ns = _ddp_ns(found, link)
        after_ms.append(_with_passes(found, found.step.value + (iteration_ns(link) - usual_ns) / _MS))
        gains.append((found.step.value + (now_ns - usual_ns) / _MS) / after_ms[-1])
    return Action(key, title, how, gains[0], min(gains), max(gains), after_ms[0])


def _overlap(found: Situation) -> Action:
    plan = _core.make_plan(found.profile, found.profile.link)
    return _by_play(
        found,
        "overlap",
        "overlap mode",
        "gradcast.attach(model, optimizer)",
        lambda link: _core.play(found.profile, link, plan).iteration_ns,
    )


def _hook(found: Situation) -> Action:
    plan = _core.make_plan(found.profile, found.profile.link, mode="hook")
    return _by_play(
        found,
        "hook",
        "hook mode: DDP's way, with planned blocks",
        "gradcast.attach(model)",
        lambda link: _core.play(found.profile, link, plan).iteration_ns,
    )


def _wire(found: Situation) -> Action:
    mode = "hook" if found.gradients_used else "overlap"
    given = "model" if found.gradients_used else "model, optimizer"
    plan = _core.make_plan(found.profile, found.profile.link.scaled(1, _WIRE), mode=mode)
    return _by_play(
        found,
        "wire",
        f"{mode} mode, bf16 on the wire (lossy)",
        f'gradcast.attach({given}, options=gradcast.Options(wire="bf16"))',
        lambda link: _core.play(found.profile, link.scaled(1, _WIRE), plan).iteration_ns,
    )


def _bucket(found: Situation) -> Action:
    times = {cap: _ddp_ns(found, caps_bytes=ddp_baseline.same_caps(cap)) for cap in ddp_baseline.SWEPT_CAPS_MIB}
    best = min(times, key=lambda cap: times[cap])
    return _by_play(
        found,
        "bucket",
        "another bucket size in DDP",
        f"DistributedDataParallel(model, bucket_cap_mb={best})",
        lambda link: _ddp_ns(found, link, ddp_baseline.same_caps(best)),
    )


def _connections(found: Situation, gain: float) -> Action:
    """An operation uses one of them: DDP, as many as it has under way."""
    gain = min(gain, ddp_baseline.IN_FLIGHT)
    return _by_play(
        found,
        "connections",
        "four connections per peer",
        "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0 with your interface, four times",
        lambda link: _ddp_ns(found, link.scaled(1, 1 / gain)),
    )


def _accumulate(found: Situation) -> Action:
    parts = found.parts
    unsent = ("forward", "backward", "launch", "loop", "data_storage", "data_cpu", "waiting")
    unsent_ms = sum(max(0.0, parts[part].value) for part in unsent)
    return _by_part(
        found,
        "accumulate",
        "accumulate the gradients of 2 batches (a batch twice as large)",
        "with model.no_sync(): for every other backward pass; step() after two",
        [max(0.0, (step - unsent_ms) / 2) for step in _range(found.step)],
    )


def _loader(found: Situation) -> Action:
    return _without(
        found,
        DATA,
        "loader",
        "a loader that never keeps the step waiting",
        "DataLoader(num_workers=…, prefetch_factor=…), or faster storage",
    )


def _launching(found: Situation) -> Action:
    return _without(
        found,
        ("launch",),
        "launch",
        "no time between operations",
        "compile the layers (block.compile()), fused optimizers (fused=True), larger batches",
    )


def _without(found: Situation, parts: Sequence[str], key: str, title: str, how: str) -> Action:
    """What the slowest rank's own work loses: a loader that is slow on one rank keeps everybody waiting, one that is
    slow where another rank computes for longer keeps nobody."""
    gone_ms = together_ms(found.ranks, found.meetings) - together_ms(found.ranks, found.meetings, parts)
    below_ms = sum(found.parts[part].value - found.parts[part].low for part in parts)
    above_ms = sum(found.parts[part].high - found.parts[part].value for part in parts)
    return _by_part(found, key, title, how, [gone_ms, max(0.0, gone_ms - below_ms), gone_ms + above_ms])


def _straggler(found: Situation) -> Action:
    return _by_part(
        found,
        "straggler",
        "no rank slower than the others",
        "look at the rank that is named, or leave its host out",
        [max(0.0, ms) for ms in _range(found.parts["waiting"])],
    )


def _by_part(found: Situation, key: str, title: str, how: str, gone_ms: Sequence[float]) -> Action:
    """``gone_ms``: of a step: the value, and the ends of its range."""
    step_ms = found.step.value
    passes = ("forward", "backward") if key == "launch" else _PASSES
    after_ms = [_with_passes(found, step_ms - gone, passes) for gone in gone_ms]
    gains = [step_ms / after for after in after_ms]
    return Action(key, title, how, gains[0], min(gains), max(gains), after_ms[0])


def _with_passes(found: Situation, after_ms: float, passes: Sequence[str] = _PASSES) -> float:
    """The passes stay, whatever else goes: where the network was slower during the trial than in the training, or an
    interval is as wide as the step, a step of nothing would be promised."""
    return max(after_ms, min(found.step.value, sum(found.parts[part].value for part in passes)))


def _range(each: Estimate) -> tuple[float, float, float]:
    return each.value, each.low, each.high
