"""Predicted gains of actions that make a step shorter, from ``play`` on the measured profile.

A prediction is the measured step plus the change that ``play`` predicts. Its interval comes from the low and high ends
of the network's costs, between which nine tenths of the measured blocks lie, or from the interval of the part of the
step that an action removes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradcast import _core
from gradcast.comparison import ddp_baseline, local_rounds, powersgd
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.measurements import TrainingSetup
from gradcast.diagnosis.analyze.step_breakdown import COMPUTE, DATA, Breakdown, synchronized_ms
from gradcast.diagnosis.runs import WORTHWHILE_SPEEDUP
from gradcast.host_traffic import RING, WIRE_SHARES, WORTHWHILE_COST, Hosts, wire_cost

_MS = 1e6
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
    """The basis of the predictions.

    * ``profile``: as ``attach`` measured it in this training, so that forward includes the loop's own work, but with
      the link of a ring in fp32, which DDP uses; None if there was no trial.
    * ``hosts``: of the ranks, which share their host's link.
    * ``spread``: low and high factor of the network's costs (``link_costs.spread``).
    * ``streams_gain``: how many times the bytes of one TCP stream several streams carry; None if unknown.
    """

    breakdown: Breakdown
    setup: TrainingSetup
    profile: _core.Profile | None
    hosts: Hosts
    spread: tuple[float, float] = (1.0, 1.0)
    streams_gain: float | None = None

    @property
    def step_ms(self) -> float:
        return self.breakdown.step.value

    def byte_cost(self, wire: str) -> float:
        """Returns the cost of gradcast's bytes in this format, as a multiple of that of DDP's ring."""
        return wire_cost(self.hosts, wire, fp32_form=RING, on_device=self.setup.device != "cpu")

    @property
    def own_link(self) -> _core.LinkModel:
        """The link as gradcast uses it in fp32. REQUIRES: there is a profile."""
        return self.profile.link.scaled(1, self.byte_cost("fp32"))

    @property
    def mode(self) -> str:
        return "hook" if self.setup.gradients_used else "overlap"


def actions(situation: Situation) -> list[Action]:
    """Lists all actions in the order of predicted gain, including those that gain nothing."""
    listed = [*_by_parts(situation), *(() if situation.profile is None else _by_profile(situation))]
    return sorted(listed, key=lambda action: -action.speedup)


def floor_ms(situation: Situation) -> float | None:
    """Returns a lower bound of the step for all schedules of all-reduces on this network; None without a profile."""
    if situation.profile is None:
        return None
    bound_ns = _core.bound(situation.profile, situation.own_link, mode=situation.mode).best_ns
    return _with_passes(situation, situation.step_ms + (bound_ns - _ddp_ns(situation)) / _MS)


def hopeless(situation: Situation, listed: Sequence[Action]) -> str | None:
    if any(action.speedup >= WORTHWHILE_SPEEDUP for action in listed):
        return None
    own_ms = sum(situation.breakdown.parts[part].value for part in (*COMPUTE, "launch", "loop"))
    return (
        f"None of these actions will help, because {own_ms / situation.step_ms:.0%} of the step is the rank's own "
        "work. Only a faster device, a smaller model or fewer steps will."
    )


def overlap_left_out(situation: Situation) -> str | None:
    if situation.profile is None or not situation.setup.gradients_used:
        return None
    return (
        "Overlap mode, which sends gradients during the next forward pass, was omitted: your loop writes into the "
        "gradients between backward and step(), as clipping and a GradScaler do, and waits for all of them there."
    )


def early_waits(situation: Situation) -> list[dict[str, Any]]:
    """Returns the lines of the loop that make overlap mode wait, the worst first; ms is None without a profile."""
    profile, found = situation.profile, []
    for use in situation.setup.early_uses:
        ms = None
        if profile is not None:
            names, link = use["parameters"], situation.own_link
            early = profile.replace(
                tensors=[each.replace(need_ns=0) if each.name in names else each for each in profile.tensors]
            )
            ends_ns = [_core.make_plan(each, link, mode="overlap").predicted_ns for each in (early, profile)]
            ms = max(0.0, (ends_ns[0] - ends_ns[1]) / _MS)
        found.append({key: use[key] for key in ("where", "what", "advice")} | {"ms": ms})
    return sorted(found, key=lambda each: -(each["ms"] or 0.0))


# --- Actions that change what is sent, and how ---


def _by_profile(situation: Situation) -> Iterator[Action]:
    profile, mode = situation.profile, situation.mode

    def by_play(key: str, title: str, how: str, iteration_ns: Callable[[_core.LinkModel], float]) -> Action:
        """``iteration_ns`` returns the time of an iteration with the action, on a given link."""
        usual_ns = _ddp_ns(situation)
        times_ms = []
        for factor in (1.0, *situation.spread):
            link = profile.link.scaled(factor, factor)
            # On a more expensive network the present step would be longer, too.
            changes_ns = (_ddp_ns(situation, link) - usual_ns, iteration_ns(link) - usual_ns)
            times_ms.append([situation.step_ms + change_ns / _MS for change_ns in changes_ns])
        return _action(situation, key, title, how, times_ms)

    def planned(key: str, title: str, how: str, mode: str, byte_cost: float = 1.0) -> Action:
        """A plan of gradcast for a link on which bytes cost ``byte_cost`` times as much."""
        plan = _core.make_plan(profile, profile.link.scaled(1, byte_cost), mode=mode)
        return by_play(key, title, how, lambda link: _core.play(profile, link.scaled(1, byte_cost), plan).iteration_ns)

    costs = {wire: situation.byte_cost(wire) for wire in WIRE_SHARES}
    hook = "hook mode (planned blocks that overlap with backward only)"
    yield planned("hook", hook, "gradcast.attach(model)", "hook", costs["fp32"])
    caps = {cap: _ddp_ns(situation, caps_bytes=ddp_baseline.same_caps(cap)) for cap in ddp_baseline.SWEPT_CAPS_MIB}
    best = min(caps, key=lambda cap: caps[cap])
    how = f"DistributedDataParallel(model, bucket_cap_mb={best})"
    best_bytes = ddp_baseline.same_caps(best)
    yield by_play("bucket", "a different bucket size in DDP", how, lambda link: _ddp_ns(situation, link, best_bytes))
    if mode == "overlap":
        yield planned("overlap", "overlap mode", "gradcast.attach(model, optimizer)", mode, costs["fp32"])
    for key, wire in (("wire", "bf16"), ("int8", "int8")):
        is_possible = situation.setup.is_fp32 and not (wire == "int8" and situation.setup.device != "cpu")
        if is_possible and costs[wire] < WORTHWHILE_COST * costs["fp32"]:
            given = "model" if mode == "hook" else "model, optimizer"
            how = f'gradcast.attach({given}, options=gradcast.Options(wire="{wire}"))'
            # Casting is not included, so this is the cost at best.
            title = f"{mode} mode with {wire} on the wire (lossy: changes the numbers)"
            yield planned(key, title, how, mode, costs[wire])
    if powersgd.has_shapes(profile):
        rank = powersgd.USUAL_RANK
        how = f"torch's powerSGD_hook with PowerSGDState(None, {rank}), in one bucket over Gloo"
        title = f"DDP with PowerSGD of rank {rank} (lossy: changes the numbers)"
        yield by_play("powersgd", title, how, lambda link: powersgd.step_ns(profile, link, rank))
    if local_rounds.ratio(profile, situation.own_link) > local_rounds.WORTHWHILE_RATIO:
        every = local_rounds.suggested_every(profile, situation.own_link)
        given = f"options=Options(local=LocalSteps({every}))"
        how = f"without DistributedDataParallel: gradcast.attach(model, optimizer, {given})"
        title = f"local steps, averaged every {every} (changes the algorithm; {local_rounds.KNOWN})"
        share = situation.byte_cost("fp32")
        yield by_play("local", title, how, lambda link: local_rounds.step_ns(profile, link.scaled(1, share), every))
    if situation.streams_gain is not None:
        # Each operation uses one connection, so DDP gains from as many as it has operations in flight.
        gain = min(situation.streams_gain, ddp_baseline.in_flight(profile))
        how = "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0, with the name of your interface four times"
        title = "four connections per peer"
        yield by_play("connections", title, how, lambda link: _ddp_ns(situation, link.scaled(1, 1 / gain)))


def _ddp_ns(
    situation: Situation, link: _core.LinkModel | None = None, caps_bytes: tuple[int, int] | None = None
) -> float:
    """Predicts DDP's step. The default is the measured link and the user's buckets."""
    return ddp_baseline.plan(situation.profile, caps_bytes or situation.setup.caps_bytes, link).predicted_ns


# --- Actions that remove part of a step ---


def _by_parts(situation: Situation) -> Iterator[Action]:
    def removing(key: str, title: str, how: str, gone: Estimate) -> Action:
        """``gone`` is the removed ms per step. What is below 0 counts as 0."""
        times_ms = [(situation.step_ms, situation.step_ms - max(0.0, ms)) for ms in (gone.value, gone.low, gone.high)]
        passes = ("forward", "backward") if key == "launch" else _PASSES
        return _action(situation, key, title, how, times_ms, passes)

    found = situation.breakdown
    how = "DataLoader(num_workers=…, prefetch_factor=…), or faster storage"
    yield removing("loader", "a data loader that is never waited for", how, _own_work(found, DATA))
    how = "compile the layers (block.compile()), use a fused optimizer (fused=True) or larger batches"
    yield removing("launch", "no launch overhead", how, _own_work(found, ("launch",)))
    how = "examine the slowest rank, or train without its host"
    yield removing("straggler", "no rank slower than the others", how, found.parts["waiting"])
    if situation.setup.device == "cpu":  # on a GPU shares stay even
        how = "DataLoader(dataset, batch_sampler=gradcast.BalancedBatchSampler(dataset, handle, batch=…))"
        yield removing("balance", "a share of the batch for each rank that follows its speed", how, _balanced(found))
    how = "with model.no_sync(): around every other backward pass; step() after two"
    title = "gradient accumulation over 2 batches (doubles the batch size)"
    yield removing("accumulate", title, how, _half_of_sending(found))


def _own_work(found: Breakdown, parts: Sequence[str]) -> Estimate:
    """The ms by which a step gets shorter without these parts of every rank's own work; the slowest rank counts."""
    now_ms, without_ms = (synchronized_ms(found.ranks, found.sync_phases, left_out) for left_out in ((), parts))
    gone_ms = now_ms - without_ms
    below_ms = sum(found.parts[part].value - found.parts[part].low for part in parts)
    above_ms = sum(found.parts[part].high - found.parts[part].value for part in parts)
    return Estimate(gone_ms, gone_ms - below_ms, gone_ms + above_ms)


def _balanced(found: Breakdown) -> Estimate:
    """The ms by which a step gets shorter if what grows with a rank's samples takes equally long on all ranks."""
    growing = ("forward", "backward", *DATA)
    speeds = [1 / ms if (ms := sum(each[part] for part in growing)) > 0 else 0.0 for each in found.ranks]
    if not all(speeds):
        return Estimate(0.0, 0.0, 0.0)
    usual = sum(speeds) / len(speeds)
    balanced = [
        each | {part: each[part] * speed / usual for part in growing}
        for each, speed in zip(found.ranks, speeds, strict=True)
    ]
    gone_ms = synchronized_ms(found.ranks, found.sync_phases) - synchronized_ms(balanced, found.sync_phases)
    waiting = found.parts["waiting"]
    return Estimate(gone_ms, gone_ms - (waiting.value - waiting.low), gone_ms + (waiting.high - waiting.value))


def _half_of_sending(found: Breakdown) -> Estimate:
    unsent_ms = sum(max(0.0, found.parts[part].value) for part in (*_PASSES, "loop", *DATA, "waiting"))
    return Estimate(*((step_ms - unsent_ms) / 2 for step_ms in (found.step.value, found.step.low, found.step.high)))


# --- Both ---


def _action(
    situation: Situation,
    key: str,
    title: str,
    how: str,
    times_ms: Sequence[Sequence[float]],
    passes: Sequence[str] = _PASSES,
) -> Action:
    """``times_ms`` are the step now and with the action: as predicted, and at both ends of the range."""
    after_ms = [_with_passes(situation, after, passes) for _, after in times_ms]
    gains = [now / after for (now, _), after in zip(times_ms, after_ms, strict=True)]
    return Action(key, title, how, gains[0], min(gains), max(gains), after_ms[0])


def _with_passes(situation: Situation, after_ms: float, passes: Sequence[str] = _PASSES) -> float:
    """Keeps the passes in the step. Passes too short to be measured promise nothing.

    Otherwise an interval as wide as the step, or a network that was slower during the trial, would promise a step of
    nearly 0.
    """
    passes_ms = sum(situation.breakdown.parts[part].value for part in passes)
    return max(after_ms, min(situation.step_ms, passes_ms)) if passes_ms > 0 else situation.step_ms
