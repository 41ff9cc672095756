"""What a plan is expected to gain over DDP, said before it is followed and held against the measurement afterwards."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from gradcast import _core
from gradcast.comparison.compare import compute_ns, has_other_ops
from gradcast.training.measure import compute_cost
from gradcast.training.measure.compute_cost import Shares

# Below this a plan is not worth following: DDP's way is the safer one.
WORTH = 1.02
# As much as expectations on busy cores have been too low. Down to there only a measurement can tell.
_TRIED = 0.95
_COMPUTE_BOUND = 0.95


@dataclasses.dataclass(frozen=True)
class StepVariation:
    """How far single steps were from the profile that was made of them: ``link``: see link_costs.spread; ``compute``:
    see compute_times.scatter, empty where no step is known."""

    link: tuple[float, float] = (1.0, 1.0)
    compute: tuple[Shares, ...] = ()


class UsualStep(NamedTuple):
    """Of the usual step: how long it takes with a plan, and what no plan of its mode can beat."""

    step_ns: float
    bound_ns: float


@dataclasses.dataclass(frozen=True)
class Expectation:
    """``plain``: with DDP's best bucket size. How many times as fast: ``low`` and ``high``: with the network's costs as
    low and as high as nine tenths of the measured blocks were; ``limit``: what no plan can exceed."""

    plan: UsualStep
    plain: UsualStep
    low: float
    high: float
    limit: float
    compute_share: float  # of DDP's step

    @property
    def gain(self) -> float:
        return self.plain.step_ns / self.plan.step_ns

    @property
    def is_worth_it(self) -> bool:
        return self.gain >= WORTH

    @property
    def is_worth_trying(self) -> bool:
        """The monitor gives the plan up where it is measured not to be faster."""
        may_gain = self.limit >= WORTH and self.compute_share < _COMPUTE_BOUND
        return self.is_worth_it or (may_gain and self.gain >= _TRIED)

    def sentence(self) -> str:
        expected = f"expected {self.gain:.2f}x ({self.low:.2f}–{self.high:.2f}) over DDP; "  # noqa: RUF001, a range
        if self.is_worth_it:
            return f"{expected}the network allows {self.limit:.2f}x"
        if self.is_worth_trying:
            return f"{expected}the network allows {self.limit:.2f}x, so the plan is tried, and kept if it is faster"
        if self.compute_share >= _COMPUTE_BOUND:
            return "your step is compute-bound: expected gain below 2 %, running as DDP"
        no_order = self.limit < WORTH
        why = "no order of the gradients hides the rest" if no_order else "no plan was found that hides more"
        return (
            f"compute is {self.compute_share:.0%} of your step, but {why}: expected gain below 2 %, running as DDP "
            "with its best bucket size"
        )


def expect(
    profile: _core.Profile,
    plan: _core.Plan,
    plain_profile: _core.Profile,
    plain: _core.Plan,
    scatter: StepVariation,
) -> Expectation:
    """``plain_profile``: with what compute takes beside the plain plan, which uses the network at other times.
    ``scatter``: of what the profiles were made from."""
    found = [
        (usual(profile, plan, scatter.compute, factor), usual(plain_profile, plain, scatter.compute, factor))
        for factor in (1.0, *scatter.link)
    ]
    gains = [of_plain.step_ns / of_plan.step_ns for of_plan, of_plain in found]
    of_plan, of_plain = found[0]
    return Expectation(
        plan=of_plan,
        plain=of_plain,
        low=min(gains),
        high=max(gains),
        limit=of_plain.step_ns / of_plan.bound_ns,
        compute_share=compute_ns(plain_profile) / of_plain.step_ns,
    )


def usual(profile: _core.Profile, plan: _core.Plan, scatter: Sequence[Shares], link_factor: float = 1.0) -> UsualStep:
    """The usual step with the plan, where the network costs ``link_factor`` times what the profile says.

    It is the median of the steps, not the step of medians: a good plan lets a block arrive just when forward needs it,
    and where compute scatters the later one of the two counts each time (docs/design.md).
    """
    steps = [compute_cost.scaled(profile, shares) for shares in scatter] or [profile]
    link = profile.link.scaled(link_factor, link_factor)
    bounds = [
        _core.bound(step, link, mode=plan.mode, in_flight=plan.in_flight, any_op=has_other_ops(plan)) for step in steps
    ]
    return UsualStep(
        statistics.median(_core.play(step, link, plan).iteration_ns for step in steps),
        statistics.median(bound.best_ns for bound in bounds),
    )
