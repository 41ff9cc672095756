"""What a plan is expected to gain over DDP, said before it is followed and held against the measurement afterwards."""

import dataclasses

from gradcast import _core
from gradcast.compare import compute_ns

# Below this a plan is not worth following: DDP's way is the safer one.
WORTH = 1.02
# As much as expectations on busy cores have been too low. Down to there only a measurement can tell.
_TRIED = 0.95
_COMPUTE_BOUND = 0.95


@dataclasses.dataclass(frozen=True)
class Expectation:
    """How many times as fast as DDP with its best bucket size. ``low`` and ``high``: with the network's costs as low
    and as high as nine tenths of the measured blocks were. ``limit``: what no plan can exceed."""

    gain: float
    low: float
    high: float
    limit: float
    compute_share: float  # of DDP's step

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
    spread: tuple[float, float],
) -> Expectation:
    """``plain_profile``: with what compute takes beside the plain plan, which uses the network at other times.
    ``spread``: of the blocks' costs around the profiles' link, see link_costs.spread."""
    gains = [
        _iteration_ns(plain_profile, plain, factor) / _iteration_ns(profile, plan, factor) for factor in (*spread, 1.0)
    ]
    return Expectation(
        gain=plain.predicted_ns / plan.predicted_ns,
        low=min(gains),
        high=max(gains),
        limit=plain.predicted_ns / plan.bound_ns,
        compute_share=compute_ns(plain_profile) / plain.predicted_ns,
    )


def _iteration_ns(profile: _core.Profile, plan: _core.Plan, factor: float) -> float:
    return _core.play(profile, profile.link.scaled(factor, factor), plan).iteration_ns
