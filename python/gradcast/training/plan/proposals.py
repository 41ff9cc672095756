"""What rank 0 proposes: a plan for the measured profile, the DDP baseline to compare it with, and the expected gain.

Also why a plan is made again during training, and how long the next change is then ignored.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.comparison.compare import NOTICEABLE_GAIN
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.errors import Error
from gradcast.files import load_plan, plan_hash
from gradcast.scaling import other_workers
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.early_waits import EarlyWaits
from gradcast.training.measure.step_trace import tensor_names
from gradcast.training.options import Options
from gradcast.training.plan import calibration, measured_profile
from gradcast.training.plan.agreement import AgreedPlan
from gradcast.training.plan.calibration import CalibrationSteps
from gradcast.training.plan.candidates import best_for_steps, choose_plan
from gradcast.training.plan.expectation import StepVariation, expect, further_calls
from gradcast.training.plan.warmup import Warmup
from gradcast.training.step.clipping import NORMS_NAME, NormClipping
from gradcast.training.step.gradient_buffers import PASSENGER_PREFIX, GradientSizes

_BASELINE_TOLERANCE = 0.002
_ANY_LINK = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1, beta_ns_per_byte=1)])
# If measuring again has gained nothing, the next changes are ignored for so many iterations, doubled each time.
_HOLD_ITERATIONS = 64
_HOLD_ITERATIONS_MAX = 4096
_REAL_CHANGE = 0.05  # share of the predicted step
# Another plan may be better if clipping certifies so many more or fewer steps, as a share of all.
_OTHER_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """A change that the monitor has found, and the plan in force at that time."""

    change: _core.Change
    before: AgreedPlan

    def sentence(self, now: AgreedPlan) -> str:
        times = f"{self.change.before_ns / 1e6:.1f} ms per step, now {self.change.after_ns / 1e6:.1f}"
        if self.change.cause == "network":
            what = f"the network has changed: it was busy for {times}"
        elif self.change.rank >= 0:
            what = f"rank {self.change.rank} has changed: the slowest rank computed {times}"
        else:
            what = f"compute has changed on most ranks: the slowest one computed {times}"
        return (
            f"{what}; planned again: {now.typical_step.step_ns / 1e6:.1f} ms per step predicted, "
            f"{self.before.typical_step.step_ns / 1e6:.1f} before"
        )

    def hold_iterations(self, profile: _core.Profile, plan: _core.Plan) -> int:
        """For how many iterations not to measure again: 0 if the change was real, more each time it was not."""
        old = self.before.plan
        if abs(plan.predicted_ns / self.before.in_force.predicted_ns - 1) > _REAL_CHANGE:
            return 0
        try:
            old.check(profile)
        except Error:
            return 0
        if _core.play(profile, profile.link, old).iteration_ns > (1 + NOTICEABLE_GAIN) * plan.predicted_ns:
            return 0
        return min(_HOLD_ITERATIONS_MAX, max(_HOLD_ITERATIONS, 2 * self.before.hold_iterations))


class Proposer:
    """Makes the proposals of one session. Only rank 0's is asked."""

    def __init__(
        self,
        sizes: GradientSizes,
        mode: str,
        world_size: int,
        options: Options,
        clipping: NormClipping | None = None,
        waits: EarlyWaits | None = None,
    ) -> None:
        """``mode``: of the plans. ``clipping``: tells how often it lets a step wait for all gradients. ``waits``: of
        the program's own; the profile has them already."""
        self._sizes, self._mode, self._clipping, self._waits = sizes, mode, clipping, waits
        # That a plan may have. Steps that clip wait for all gradients, which suits plans of hook mode.
        self._modes = (mode,) if clipping is None else (mode, "hook")
        self._world_size, self._options = world_size, options
        self._idle_saving_ns = 0.0  # found in the last warm-up
        self.variation = StepVariation()  # of the steps that the last proposal was made from
        self._baseline_profile: _core.Profile | None = None  # of the last proposal
        # Of the last proposals, the last one first: the share of steps that clipping certifies. Empty but on rank 0.
        self._shares: collections.deque[float] = collections.deque(maxlen=2)
        self._arrived = frozenset[str]()  # what has arrived when it decides
        self.read_first: set[str] = set()  # tensors that forward waits for before it begins, as it reads them unseen

    def from_warmup(self, profile: _core.Profile, warmup: Warmup, change: PlanChange | None) -> AgreedPlan:
        """The plan that the user has pinned, or one for the measured profile. ``change``: why it was measured again."""
        self._idle_saving_ns = warmup.idle_saving_ns
        path = self._options.plan_path
        if path is not None:
            return pinned_proposal(path, self._sizes, self._modes, self._world_size)
        plan = self._choose(profile, warmup.variation)
        hold_iterations = 0 if change is None else change.hold_iterations(profile, plan)
        return self._proposal(profile, plan, warmup.variation, hold_iterations=hold_iterations)

    def from_calibration(self, agreed: AgreedPlan, profile: _core.Profile, steps: CalibrationSteps) -> AgreedPlan:
        """The plan in force if its first steps confirm the profile that it was made for, otherwise a new one."""
        in_force = agreed.in_force
        link = self._corrected_link(in_force, profile, steps)
        compute = calibration.corrected_compute(profile, steps.compute)
        without_traffic = profile if link is None else profile.replace(link=link)
        corrected = without_traffic if compute is None else compute_cost.replace_compute(without_traffic, compute)
        baseline_profile = corrected
        if compute is not None and in_force.mode == "overlap":
            # Blocks in flight slow compute down. With DDP none are in flight during forward.
            baseline_profile = compute_cost.replace_compute(
                without_traffic, compute._replace(forward_ns=without_traffic.forward_ns)
            )
        samples = [sample for step in steps.blocks for sample in step]
        link_spread = (
            network_cost.cost_spread(samples, corrected.link, self._idle_saving_ns)
            if samples and in_force.in_flight == 1
            else self.variation.link
        )
        factors = compute_cost.compute_variation(corrected, steps.compute) or self.variation.compute
        variation = StepVariation(link_spread, factors, self.variation.call_ns)
        is_confirmed = link is None and compute is None
        plan = self._choose(corrected, variation, present=agreed.plan if is_confirmed else None)
        return self._proposal(corrected, plan, variation, baseline_profile, agreed.hold_iterations)

    def from_certified_share(self, agreed: AgreedPlan) -> AgreedPlan:
        """A plan for the share of steps that clipping certifies now; nothing is measured anew."""
        plan = self._choose(agreed.profile, self.variation)
        return self._proposal(agreed.profile, plan, self.variation, self._baseline_profile, agreed.hold_iterations)

    def from_compute(self, agreed: AgreedPlan, busy_ns: float) -> AgreedPlan:
        """A plan for another compute time of the slowest rank, ns; nothing is measured anew."""
        profile = agreed.profile
        update_ns = sum(tensor.update_ns for tensor in profile.tensors)
        passes_ns = profile.forward_ns + profile.backward_ns
        factor = max(0.0, busy_ns - update_ns - agreed.further_calls_ns) / passes_ns if passes_ns > 0 else 1.0
        factors = compute_cost.ComputeFactors(backward=factor, forward=factor, update=1.0)
        profile = compute_cost.scale_compute(profile, factors)
        plan = self._choose(profile, self.variation)
        return self._proposal(profile, plan, self.variation, hold_iterations=agreed.hold_iterations)

    def ask_if_share_differs(self) -> None:
        """Rank 0 asks all ranks to plan again if clipping certifies many more or fewer steps than when the plan was
        made. That travels with the norms: ranks whose programs replace gradients or leave out steps count differently.
        """
        if self._shares:
            change = self._clipping.certified_share_if(self._arrived) - self._shares[0]
            self._clipping.asks_for_plan = abs(change) >= _OTHER_SHARE

    @property
    def is_asked(self) -> bool:
        """Whether rank 0 has asked in the iteration before; the same on all ranks."""
        return self._clipping is not None and self._clipping.any_asks_for_plan

    def share_sentence(self, before: AgreedPlan, now: AgreedPlan) -> str:
        """What to log of a plan for another share; of rank 0."""
        shares = " of steps, ".join(f"{share:.0%}" for share in self._shares)
        return (
            f"clipping now certifies {shares} when the plan was made; planned again: "
            f"{now.typical_step.step_ns / 1e6:.1f} ms per step predicted, "
            f"{before.typical_step.step_ns / 1e6:.1f} before"
        )

    def from_checkpoint(self, state: dict[str, Any]) -> AgreedPlan:
        plan = _core.Plan.from_json(state["plan"])
        variation = StepVariation(call_ns=state.get("call_ns", 0.0))  # early states have none
        return self._proposal(_core.Profile.from_json(state["layout"]), plan, variation)

    def for_workers(self, profile: _core.Profile, here: MeasuredExchange, call_ns: float) -> AgreedPlan:
        """A plan from the profile of other workers. ``call_ns``: see StepVariation."""
        profile = other_workers.for_workers(profile, here)
        variation = StepVariation(call_ns=call_ns)
        return self._proposal(profile, self._choose(profile, variation), variation)

    def _corrected_link(
        self, in_force: _core.Plan, profile: _core.Profile, steps: CalibrationSteps
    ) -> _core.LinkModel | None:
        if not steps.blocks:
            return None
        shared_ns = None
        if in_force.in_flight > 1:
            periods_ns = calibration.planned_busy_periods_ns(in_force, profile)
            shared_ns = sum(max(0.0, each_ns - self._idle_saving_ns) for each_ns in periods_ns)
        return network_cost.corrected_link(
            profile.link, steps.blocks, shared_ns=shared_ns, known_saving_ns=self._idle_saving_ns
        )

    def _proposal(
        self,
        profile: _core.Profile,
        plan: _core.Plan,
        variation: StepVariation,
        baseline_profile: _core.Profile | None = None,
        hold_iterations: int = 0,
    ) -> AgreedPlan:
        """``baseline_profile``: the profile under the baseline, if it differs."""
        self.variation = variation
        if not self._options.adapt or profile.link is None:
            return AgreedPlan(profile, plan, call_ns=variation.call_ns)
        baseline_profile = baseline_profile or profile
        self._baseline_profile, baseline = baseline_profile, baseline_plan(baseline_profile)
        waiting_share = self._waiting_share(profile, plan)
        expectation = expect(
            profile, plan, baseline_profile, baseline, variation, waiting_share, read_first=self.read_first
        )
        reason = None if self._waits is None else self._waits.reason()
        if reason is not None:
            expectation = dataclasses.replace(expectation, reason=reason)
        if self._clipping is not None and self._clipping.certifies:
            # If the plan waits anyway, the share counts that would make the best one of overlap mode the better one.
            overlap = plan if plan.mode == self._mode else choose_plan(profile, self._mode, self._options)
            self._arrived = frozenset(arrived_with_first(profile, overlap))
            self._shares.appendleft(self._clipping.certified_share_if(self._arrived))
        calls = (1 - waiting_share) * further_calls(profile, _core.play(profile, profile.link, plan), plan.mode)
        return AgreedPlan(
            profile,
            plan,
            baseline=baseline,
            expectation=expectation,
            hold_iterations=hold_iterations,
            call_ns=variation.call_ns,
            further_calls=calls,
        )

    def _choose(
        self, profile: _core.Profile, variation: StepVariation, present: _core.Plan | None = None
    ) -> _core.Plan:
        """``present``: see best_for_steps."""
        share = functools.partial(self._waiting_share, profile)
        return best_for_steps(profile, self._modes, variation, self._options, share, present)

    def _waiting_share(self, profile: _core.Profile, plan: _core.Plan) -> float:
        """The share of steps in which clipping waits for all gradients: as if the last ones had followed this plan."""
        if self._clipping is None:
            return 0.0
        return 1.0 - self._clipping.certified_share_if(arrived_with_first(profile, plan))


def arrived_with_first(profile: _core.Profile, plan: _core.Plan) -> set[str]:
    """Names of the tensors that have arrived when clipping decides: with the first parameter that forward reads, and
    with the norms of what the ranks have sent."""
    first = next(tensor.name for tensor in profile.tensors if not tensor.name.startswith(PASSENGER_PREFIX))
    touched = [set(tensor_names(profile, block)) for block in plan.blocks]
    last = max(number for number, names in enumerate(touched) if names & {first, NORMS_NAME})
    return set().union(*touched[: last + 1]) - set().union(*touched[last + 1 :])


def baseline_plan(profile: _core.Profile) -> _core.Plan:
    """The DDP baseline: DDP's buckets with the best sizes for this profile. REQUIRES: the profile has a link.

    Among nearly equal sizes those that make the fewest buckets are taken. They are compared with one bucket in flight:
    with more, `play` hides the start-up cost of one behind another, and busy hosts do not.
    """
    candidates = [(ddp_baseline.plan(profile, caps, in_flight=1), caps) for caps in ddp_baseline.TUNED_CAPS_BYTES]
    near_ns = (1 + _BASELINE_TOLERANCE) * min(plan.predicted_ns for plan, _ in candidates)
    near = [each for each in candidates if each[0].predicted_ns <= near_ns]
    _, caps_bytes = min(near, key=lambda each: (len(each[0].blocks), each[0].predicted_ns))
    return ddp_baseline.plan(profile, caps_bytes)


def rehearse(sizes: GradientSizes, mode: str, options: Options) -> None:
    """Raises the Error that proposing a plan to several workers would raise because of the options."""
    modes = (mode,) if options.max_grad_norm is None else (mode, "hook")
    if options.plan_path is not None:
        pinned_proposal(options.plan_path, sizes, modes, world_size=1)
        return
    profile = measured_profile.layout_profile(sizes, range(len(sizes.names)), world_size=2, name="rehearsal")
    for each in modes:
        choose_plan(profile.replace(link=_ANY_LINK), each, options)


def pinned_proposal(path: str, sizes: GradientSizes, modes: Sequence[str], world_size: int) -> AgreedPlan:
    """The plan of a file, with the layout that it was made for. Raises Error if it was made for another model."""
    plan, made_with = load_plan(path)
    names = sizes.names
    tensors = made_with.get("tensors")
    if tensors is None:
        raise Error(
            f"{path} does not note the order of its tensors (made_with.tensors); make it with handle.save_plan() or, "
            "from the file of handle.save_profile(), with `gradcast dev plan`",
            "invalid_plan",
        )
    if sorted(tensors) != sorted(names):
        differing = sorted(set(tensors) ^ set(names)) or sorted(tensors)
        raise Error(
            f"{path} is a plan for another model: only one of the two has {differing[0]}; make a plan for this model",
            "invalid_plan",
        )
    if plan.mode not in modes:
        raise Error(
            f"{path} is a plan for {plan.mode} mode; this training is in {modes[0]} mode, make a plan for that",
            "invalid_plan",
        )
    order = [names.index(name) for name in tensors]
    profile = measured_profile.layout_profile(sizes, order, world_size=world_size, name="pinned")
    plan.check(profile)
    if made_with.get("hash") != plan_hash(plan, profile):
        raise Error(f"{path} is a plan for tensors of other sizes or types; make it again", "invalid_plan")
    return AgreedPlan(profile, plan)
