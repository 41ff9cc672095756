"""The expected gain of a plan over DDP: logged before it is followed, and compared with the measurement later."""

import dataclasses
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gradcast import _core
from gradcast.comparison.compare import NOTICEABLE_GAIN, compute_ns, has_other_ops, link_of
from gradcast.training.measure import compute_cost
from gradcast.training.measure.compute_cost import ComputeFactors

# Below this speed-up a plan is not worth following: the baseline is the safer choice.
_WORTHWHILE = 1 + NOTICEABLE_GAIN
# On busy cores expectations have been too low by up to this much. Above it only a measurement decides.
_WORTH_TRYING = 0.95
_COMPUTE_BOUND_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class StepVariation:
    """The differences between single steps and the profile that was made from them.

    ``link``: see network_cost.cost_spread. ``compute``: see compute_cost.compute_variation; empty if no step is known.
    """

    link: tuple[float, float] = (1.0, 1.0)
    compute: tuple[ComputeFactors, ...] = ()


class TypicalStep(NamedTuple):
    """Median length of a step with a plan, and median of the lower bounds of the plan's mode."""

    step_ns: float
    bound_ns: float


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Expected speed-up over the DDP baseline, which has DDP's best bucket size.

    ``low``, ``high``: speed-ups with the network's costs at the first and the last decile of the measured blocks.
    ``limit``: the speed-up that no plan can exceed. ``compute_share``: of the baseline's step. ``reason``: what in the
    program costs the most overlap, with its line where one does; None if nothing does.
    """

    plan: TypicalStep
    baseline: TypicalStep
    low: float
    high: float
    limit: float
    compute_share: float
    reason: str | None = None

    @property
    def gain(self) -> float:
        return self.baseline.step_ns / self.plan.step_ns

    @property
    def is_worthwhile(self) -> bool:
        return self.gain >= _WORTHWHILE

    @property
    def is_worth_trying(self) -> bool:
        """Returns whether to follow the plan. If it proves not to be faster, the monitor gives it up."""
        may_gain = self.limit >= _WORTHWHILE and self.compute_share < _COMPUTE_BOUND_SHARE
        return self.is_worthwhile or (may_gain and self.gain >= _WORTH_TRYING)

    def sentence(self, baseline: str = "DDP") -> str:
        """``baseline``: by whom gradients are sent without gradcast."""
        span = f"({self.low:.2f}–{self.high:.2f})"  # noqa: RUF001, a range
        expected = f"expected {self.gain:.2f}x {span} over {baseline}; "
        allowed = f"the network allows {self.limit:.2f}x" + (f" while {self.reason}" if self.reason else "")
        if self.is_worthwhile:
            return f"{expected}{allowed}"
        if self.is_worth_trying:
            return f"{expected}{allowed}, so the plan is tried, and kept if it is faster"
        if self.compute_share >= _COMPUTE_BOUND_SHARE:
            return f"your step is compute-bound: expected gain below 2 %, running as {baseline}"
        if self.reason:
            why = self.reason
        elif self.limit < _WORTHWHILE:
            why = "no schedule can hide the remaining communication"
        else:
            why = "no plan was found that hides more communication"
        return (
            f"compute is {self.compute_share:.0%} of your step, but {why}: expected gain below 2 %, running as "
            f"{baseline} with its best bucket size"
        )


def expect(
    profile: _core.Profile,
    plan: _core.Plan,
    baseline_profile: _core.Profile,
    baseline: _core.Plan,
    variation: StepVariation,
    waiting_share: float = 0.0,
    *,
    read_first: Collection[str] = (),
    reason: str | None = None,
) -> Expectation:
    """The expected gain of ``plan`` over ``baseline``.

    ``baseline_profile``: with the compute times under the baseline, which uses the network at other times.
    ``variation``: of the steps that the profiles were made from. ``waiting_share``: see typical_step, of the plan's.
    ``read_first``: tensors that are needed before forward begins because it reads them unseen. ``reason``: see
    Expectation; None for what is found here.
    """
    pairs = [
        (
            typical_step(profile, plan, variation.compute, factor, waiting_share),
            typical_step(baseline_profile, baseline, variation.compute, factor),
        )
        for factor in (1.0, *variation.link)
    ]
    gains = [of_baseline.step_ns / of_plan.step_ns for of_plan, of_baseline in pairs]
    of_plan, of_baseline = pairs[0]
    limit = of_baseline.step_ns / of_plan.bound_ns
    if reason is None and read_first and limit < _WORTHWHILE:
        free = step_profiles(_needed_last(profile, read_first), variation.compute)
        if of_baseline.step_ns / _median_bound_ns(free, plan, link_of(profile)) >= _WORTHWHILE:
            what = "1 parameter" if len(read_first) == 1 else f"{len(read_first)} parameters"
            reason = f"forward reads {what} unseen, before it begins"
    return Expectation(
        plan=of_plan,
        baseline=of_baseline,
        low=min(gains),
        high=max(gains),
        limit=limit,
        compute_share=compute_ns(baseline_profile) / of_baseline.step_ns,
        reason=reason,
    )


def typical_step(
    profile: _core.Profile,
    plan: _core.Plan,
    steps: Sequence[ComputeFactors],
    link_factor: float = 1.0,
    waiting_share: float = 0.0,
) -> TypicalStep:
    """The typical step with the plan, on a network that costs ``link_factor`` times what the profile says.

    ``steps``: the compute of each measured step, as multiples of the profile's. The typical step is the median of these
    steps, not the step of medians: a good plan lets a block arrive just when forward needs it, and if compute varies,
    the later of the two counts each time (docs/internals/play.md).

    ``waiting_share``: of the steps, those that wait for all gradients before forward, because they are clipped. The
    result is then the mean of the typical steps of both kinds.
    """
    link = link_of(profile).scaled(link_factor, link_factor)
    return typical_of(step_profiles(profile, steps), link, plan, waiting_share)


def step_profiles(profile: _core.Profile, steps: Sequence[ComputeFactors]) -> list[_core.Profile]:
    """The profile with the compute of each step; the profile itself if no step is known."""
    return [compute_cost.scale_compute(profile, factors) for factors in steps] or [profile]


def typical_of(
    profiles: Sequence[_core.Profile], link: _core.LinkModel, plan: _core.Plan, waiting_share: float
) -> TypicalStep:
    """See typical_step. ``profiles``: one for each step."""
    if waiting_share > 0:
        kinds = []
        for share, mode in ((waiting_share, "hook"), (1 - waiting_share, "overlap")):
            in_mode = _core.Plan(blocks=plan.blocks, mode=mode, in_flight=plan.in_flight)
            kinds.append((share, typical_of(profiles, link, in_mode, 0.0)))
        return TypicalStep(*(sum(share * step[field] for share, step in kinds) for field in range(2)))
    steps_ns = [_core.play(each, link, plan).iteration_ns for each in profiles]
    return TypicalStep(statistics.median(steps_ns), _median_bound_ns(profiles, plan, link))


def _median_bound_ns(profiles: Sequence[_core.Profile], plan: _core.Plan, link: _core.LinkModel) -> float:
    return statistics.median(
        _core.bound(each, link, mode=plan.mode, in_flight=plan.in_flight, any_op=has_other_ops(plan)).best_ns
        for each in profiles
    )


def _needed_last(profile: _core.Profile, names: Collection[str]) -> _core.Profile:
    """The profile if forward read these tensors where it ends."""
    return profile.replace(
        tensors=[
            tensor.replace(need_ns=profile.forward_ns) if tensor.name in names else tensor for tensor in profile.tensors
        ]
    )
