"""What would make a step shorter, and by how much: each action as ``play`` predicts it on the measured profile.

A prediction is the measured step plus the change that ``play`` predicts. Its interval comes from the low and high ends
of the network's costs, between which nine tenths of the measured blocks lie, or from the interval of the part of the
step that an action removes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.measurements import TrainingSetup
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, Breakdown, synchronized_ms
from gradcast.diagnosis.runs import WORTHWHILE_SPEEDUP

_MS = 1e6
# Casting is not included, so 16 bits halve the cost per byte at best.
_WIRE_COST = 0.5
_PASSES = ("forward", "backward", "launch")
# Of an action: its key, its title, and how to do it.
_Texts = tuple[str, str, str]


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

    * ``profile``: with its link, as ``attach`` measured it in this training, so that forward includes the loop's own
      work; None if there was no trial.
    * ``spread``: low and high factor of the network's costs (``link_costs.spread``).
    * ``streams_gain``: how many times the bytes of one TCP stream several streams carry; None if unknown.
    """

    breakdown: Breakdown
    setup: TrainingSetup
    profile: _core.Profile | None
    spread: tuple[float, float] = (1.0, 1.0)
    streams_gain: float | None = None

    @property
    def step_ms(self) -> float:
        return self.breakdown.step.value

    @property
    def mode(self) -> str:
        """The mode of gradcast that this loop allows."""
        return "hook" if self.setup.gradients_used else "overlap"


def actions(situation: Situation) -> list[Action]:
    """Lists all actions in the order of predicted gain, including those that gain nothing."""
    listed = [*_by_parts(situation), *(() if situation.profile is None else _by_profile(situation))]
    return sorted(listed, key=lambda action: -action.speedup)


def floor_ms(situation: Situation) -> float | None:
    """Returns a lower bound of the step for all schedules of all-reduces on this network; None without a profile."""
    if situation.profile is None:
        return None
    bound_ns = _core.bound(situation.profile, situation.profile.link, mode=situation.mode).best_ns
    return _with_passes(situation, situation.step_ms + (bound_ns - _ddp_ns(situation)) / _MS)


def hopeless(situation: Situation, listed: Sequence[Action]) -> str | None:
    """Returns a sentence if no action is worth it, else None."""
    if any(action.speedup >= WORTHWHILE_SPEEDUP for action in listed):
        return None
    own_ms = sum(situation.breakdown.parts[part].value for part in (*COMPUTE, "launch", "loop"))
    return (
        f"None of these actions will help, because {own_ms / situation.step_ms:.0%} of the step is the rank's own "
        "work. Only a faster device, a smaller model or fewer steps will."
    )


def overlap_left_out(situation: Situation) -> str | None:
    """Returns a sentence if overlap mode was left out, else None."""
    if situation.profile is None or not situation.setup.gradients_used:
        return None
    return (
        "Overlap mode, which sends gradients during the next forward pass, was left out: your loop writes into the "
        "gradients between backward and step(), as clipping and a GradScaler do, and waits for all of them there."
    )


# --- Actions that change what is sent, and how ---


def _by_profile(situation: Situation) -> Iterator[Action]:
    mode, given = situation.mode, "model" if situation.mode == "hook" else "model, optimizer"
    title = "hook mode (planned blocks that overlap with backward only)"
    yield _planned(situation, ("hook", title, "gradcast.attach(model)"), "hook")
    caps = {cap: _ddp_ns(situation, caps_bytes=ddp_baseline.same_caps(cap)) for cap in ddp_baseline.SWEPT_CAPS_MIB}
    best = min(caps, key=lambda cap: caps[cap])
    how = f"DistributedDataParallel(model, bucket_cap_mb={best})"
    yield _by_play(
        situation,
        ("bucket", "a different bucket size in DDP", how),
        lambda link: _ddp_ns(situation, link, ddp_baseline.same_caps(best)),
    )
    if mode == "overlap":
        yield _planned(situation, ("overlap", "overlap mode", "gradcast.attach(model, optimizer)"), mode)
    if situation.setup.is_fp32:
        how = f'gradcast.attach({given}, options=gradcast.Options(wire="bf16"))'
        yield _planned(situation, ("wire", f"{mode} mode with bf16 on the wire (lossy)", how), mode, _WIRE_COST)
    if situation.streams_gain is not None:
        # Each operation uses one connection, so DDP gains from as many as it has operations in flight.
        gain = min(situation.streams_gain, ddp_baseline.IN_FLIGHT)
        how = "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0, with the name of your interface four times"
        yield _by_play(
            situation,
            ("connections", "four connections per peer", how),
            lambda link: _ddp_ns(situation, link.scaled(1, 1 / gain)),
        )


def _ddp_ns(
    situation: Situation, link: _core.LinkModel | None = None, caps_bytes: tuple[int, int] | None = None
) -> float:
    """Predicts DDP's step. The default is the measured link and the user's buckets."""
    return ddp_baseline.plan(situation.profile, caps_bytes or situation.setup.caps_bytes, link).predicted_ns


def _by_play(situation: Situation, texts: _Texts, iteration_ns: Callable[[_core.LinkModel], float]) -> Action:
    """Predicts an action. ``iteration_ns`` returns the time of an iteration with the action, on a given link."""
    usual_ns = _ddp_ns(situation)
    gains, after_ms = [], []
    for factor in (1.0, *situation.spread):
        link = situation.profile.link.scaled(factor, factor)
        # On a more expensive network the present step would be longer, too.
        now_ms = situation.step_ms + (_ddp_ns(situation, link) - usual_ns) / _MS
        after_ms.append(_with_passes(situation, situation.step_ms + (iteration_ns(link) - usual_ns) / _MS))
        gains.append(now_ms / after_ms[-1])
    return Action(*texts, gains[0], min(gains), max(gains), after_ms[0])


def _planned(situation: Situation, texts: _Texts, mode: str, byte_cost: float = 1.0) -> Action:
    """Predicts a plan of gradcast for a link on which bytes cost ``byte_cost`` times as much."""
    profile = situation.profile
    plan = _core.make_plan(profile, profile.link.scaled(1, byte_cost), mode=mode)
    return _by_play(situation, texts, lambda link: _core.play(profile, link.scaled(1, byte_cost), plan).iteration_ns)


# --- Actions that remove part of a step ---


def _by_parts(situation: Situation) -> Iterator[Action]:
    how = "DataLoader(num_workers=…, prefetch_factor=…), or faster storage"
    texts = ("loader", "a data loader that is never waited for", how)
    yield _by_part(situation, texts, _own_work_ms(situation, DATA))
    how = "compile the layers (block.compile()), use a fused optimizer (fused=True) or larger batches"
    yield _by_part(situation, ("launch", "no launch overhead", how), _own_work_ms(situation, ("launch",)))
    texts = ("straggler", "no rank slower than the others", "examine the slowest rank, or train without its host")
    yield _by_part(situation, texts, _range(situation.breakdown.parts["waiting"]))
    how = "with model.no_sync(): around every other backward pass; step() after two"
    texts = ("accumulate", "gradient accumulation over 2 batches (doubles the batch size)", how)
    yield _by_part(situation, texts, _half_of_sending_ms(situation))


def _own_work_ms(situation: Situation, parts: Sequence[str]) -> list[float]:
    """Returns the ms, and their range, by which a step gets shorter without these parts of every rank's own work.

    A slow loader on one rank delays all ranks; but if another rank computes for longer, it delays none.
    """
    found = situation.breakdown
    now_ms, without_ms = (synchronized_ms(found.ranks, found.sync_phases, left_out) for left_out in ((), parts))
    below_ms = sum(found.parts[part].value - found.parts[part].low for part in parts)
    above_ms = sum(found.parts[part].high - found.parts[part].value for part in parts)
    gone_ms = now_ms - without_ms
    return [gone_ms, gone_ms - below_ms, gone_ms + above_ms]


def _half_of_sending_ms(situation: Situation) -> list[float]:
    unsent = ("forward", "backward", "launch", "loop", "data_storage", "data_cpu", "waiting")
    unsent_ms = sum(max(0.0, situation.breakdown.parts[part].value) for part in unsent)
    return [(step_ms - unsent_ms) / 2 for step_ms in _range(situation.breakdown.step)]


def _by_part(situation: Situation, texts: _Texts, gone_ms: Sequence[float]) -> Action:
    """Predicts an action that removes time. ``gone_ms`` is the removed time per step: its value and the ends of its
    range. What is below 0 counts as 0.
    """
    passes = ("forward", "backward") if texts[0] == "launch" else _PASSES
    after_ms = [_with_passes(situation, situation.step_ms - max(0.0, gone), passes) for gone in gone_ms]
    gains = [situation.step_ms / after for after in after_ms]
    return Action(*texts, gains[0], min(gains), max(gains), after_ms[0])


def _with_passes(situation: Situation, after_ms: float, passes: Sequence[str] = _PASSES) -> float:
    """Keeps the passes in the step, whatever else an action removes.

    Otherwise a step of nearly 0 would be promised if an interval is as wide as the step, or if the network was slower
    during the trial than in the training.
    """
    passes_ms = sum(situation.breakdown.parts[part].value for part in passes)
    return max(after_ms, min(situation.step_ms, passes_ms))


def _range(each: Estimate) -> tuple[float, float, float]:
    return each.value, each.low, each.high
