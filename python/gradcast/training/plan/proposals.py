"""Rank 0's proposals: a plan for the measured profile, the DDP baseline to compare it with, and the expected gain.

Pure: a proposal depends on measurements, options and the shares that clipping certified, and changes nothing.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.comparison.compare import NOTICEABLE_GAIN, link_of
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.errors import Error
from gradcast.files import load_plan, plan_hash
from gradcast.scaling import other_workers
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.step_trace import tensor_names
from gradcast.training.options import Options
from gradcast.training.plan import agreement, calibration, measured_profile
from gradcast.training.plan.agreement import AgreedPlan, CertifiedShare
from gradcast.training.plan.calibration import CalibrationSteps
from gradcast.training.plan.candidates import best_for_steps, choose_plan
from gradcast.training.plan.expectation import StepVariation, expect
from gradcast.training.plan.warmup import WarmupResult
from gradcast.training.step.gradient_buffers import PASSENGER_PREFIX, GradientSizes
from gradcast.training.step.step_message import MESSAGE_NAME

_log = logging.getLogger("gradcast")

_BASELINE_TOLERANCE = 0.002
# DDP reduces by itself with buckets of its usual size unless others gain as much: buckets cost time of the host, too.
_USUAL_SIZE_TOLERANCE = 0.02
_ANY_LINK = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1, beta_ns_per_byte=1)])
# If measuring again has gained nothing, the next changes are ignored for so many iterations, doubled each time.
_HOLD_ITERATIONS = 64
_HOLD_ITERATIONS_MAX = 4096
_REAL_CHANGE = 0.05  # share of the predicted step


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
        """The iterations before measuring again: 0 if the change was real, more each time it was not."""
        old = self.before.plan
        if abs(plan.predicted_ns / self.before.in_force.predicted_ns - 1) > _REAL_CHANGE:
            return 0
        try:
            old.check(profile)
        except Error:
            return 0
        if _core.play(profile, link_of(profile), old).iteration_ns > (1 + NOTICEABLE_GAIN) * plan.predicted_ns:
            return 0
        return min(_HOLD_ITERATIONS_MAX, max(_HOLD_ITERATIONS, 2 * self.before.hold_iterations))


@dataclasses.dataclass(frozen=True)
class Proposer:
    """Computes rank 0's proposals. ``mode``: of the plans. ``certified_share_if``: of clipping by the norm, the share
    of the last steps that would be certified when these tensors have arrived; None without. ``reason``: the program's
    line that costs the most overlap; the profile contains its cost. ``read_first``: tensors that forward waits for
    before it begins, because it reads them unseen."""

    sizes: GradientSizes
    mode: str
    world_size: int
    options: Options
    certified_share_if: Callable[[Collection[str]], float] | None = None
    reason: Callable[[], str | None] = lambda: None
    read_first: frozenset[str] = frozenset()

    @property
    def may_correct(self) -> bool:
        """True if later measurements may replace a plan."""
        return self.options.plan.adapt and self.options.plan.path is None

    @property
    def _modes(self) -> tuple[str, ...]:
        """Modes that a plan may have. Steps that clip wait for all gradients, which suits plans of hook mode."""
        return (self.mode,) if self.certified_share_if is None else (self.mode, "hook")

    def from_warmup(self, measured: WarmupResult, change: PlanChange | None) -> AgreedPlan:
        """Returns the plan that the user has pinned, or one for the measured profile. ``change``: why it was measured
        again."""
        path, profile = self.options.plan.path, measured.profile
        pinned = path and pinned_proposal(path, self.sizes, self._modes, self.world_size)
        if pinned:
            return pinned
        variation = measured.variation
        plan = self._choose(profile, variation)
        hold_iterations = 0 if change is None else change.hold_iterations(profile, plan)
        saving_ns = measured.idle_saving_ns
        return self._completed(
            AgreedPlan(profile, plan, hold_iterations=hold_iterations, variation=variation, idle_saving_ns=saving_ns)
        )

    def from_calibration(self, agreed: AgreedPlan, profile: _core.Profile, steps: CalibrationSteps) -> AgreedPlan:
        """Returns the plan in force if its first steps confirm its profile, otherwise a new one."""
        in_force, idle_saving_ns = agreed.in_force, agreed.idle_saving_ns
        link = _corrected_link(agreed, profile, steps)
        compute = calibration.corrected_compute(profile, steps.compute)
        as_predicted = profile if link is None else profile.replace(link=link)
        corrected = as_predicted if compute is None else compute_cost.replace_compute(as_predicted, compute)
        baseline_profile = corrected
        if compute is not None and in_force.mode == "overlap":
            # Blocks in flight slow compute down. With DDP none are in flight during forward.
            baseline_profile = compute_cost.replace_compute(
                as_predicted, compute._replace(forward_ns=as_predicted.forward_ns)
            )
        samples = [sample for step in steps.blocks for sample in step]
        link_spread = agreed.variation.link
        if samples and in_force.in_flight == 1:
            link_spread = network_cost.cost_spread(samples, link_of(corrected), idle_saving_ns)
        factors = compute_cost.compute_variation(corrected, steps.compute) or agreed.variation.compute
        variation = StepVariation(link_spread, factors)
        is_confirmed = link is None and compute is None
        plan = self._choose(corrected, variation, present=agreed.plan if is_confirmed else None)
        found: dict[str, Any] = {
            "profile": corrected,
            "plan": plan,
            "variation": variation,
            "baseline_profile": baseline_profile,
        }
        return self._completed(dataclasses.replace(agreed, **found))

    def from_certified_share(self, agreed: AgreedPlan) -> AgreedPlan:
        """Returns a plan for the share of steps that clipping certifies now; nothing is measured anew."""
        return self._completed(dataclasses.replace(agreed, plan=self._choose(agreed.profile, agreed.variation)))

    def from_compute(self, agreed: AgreedPlan, busy_ns: float) -> AgreedPlan:
        """Returns a plan for another compute time of the slowest rank, ns; nothing is measured anew."""
        profile = agreed.profile
        update_ns = sum(tensor.update_ns for tensor in profile.tensors)
        passes_ns = profile.forward_ns + profile.backward_ns
        factor = max(0.0, busy_ns - update_ns - agreed.further_calls_ns) / passes_ns if passes_ns > 0 else 1.0
        factors = compute_cost.ComputeFactors(backward=factor, forward=factor, update=1.0)
        profile = compute_cost.scale_compute(profile, factors)
        plan = self._choose(profile, agreed.variation)
        return self._completed(dataclasses.replace(agreed, profile=profile, plan=plan, baseline_profile=None))

    def from_checkpoint(self, state: dict[str, Any]) -> AgreedPlan:
        plan = _core.Plan.from_json(state["plan"])
        return self._completed(AgreedPlan(agreement.saved_profile(state, "layout"), plan))

    def for_workers(self, profile: _core.Profile, here: MeasuredExchange) -> AgreedPlan:
        """Returns a plan from the profile of other workers."""
        profile = other_workers.for_workers(profile, here)
        return self._completed(AgreedPlan(profile, self._choose(profile, StepVariation())))

    def _completed(self, draft: AgreedPlan) -> AgreedPlan:
        """Returns the plan with its baseline and what is expected, if later measurements may replace it."""
        profile, plan, variation = draft.profile, draft.plan, draft.variation
        if not self.options.plan.adapt or profile.link is None:
            return draft
        baseline_profile = draft.baseline_profile or profile
        baseline = baseline_plan(baseline_profile)
        waiting_share = self._waiting_share(profile, plan)
        steps = profile, plan, baseline_profile, baseline, variation, waiting_share
        expectation = expect(*steps, read_first=self.read_first, reason=self.reason())
        calls = (1 - waiting_share) * (_core.play(profile, profile.link, plan).parts - 1)
        return dataclasses.replace(
            draft,
            baseline=baseline,
            expectation=expectation,
            further_calls=calls,
            baseline_profile=baseline_profile,
            certified=self._certified(profile, plan),
        )

    def _certified(self, profile: _core.Profile, plan: _core.Plan) -> CertifiedShare | None:
        if self.certified_share_if is None:
            return None
        # If the plan waits anyway, the share counts that would make the best one of overlap mode the better one.
        overlap = plan if plan.mode == self.mode else choose_plan(profile, self.mode, self.options)
        arrived = frozenset(arrived_with_first(profile, overlap))
        return CertifiedShare(arrived, self.certified_share_if(arrived))

    def _choose(
        self, profile: _core.Profile, variation: StepVariation, present: _core.Plan | None = None
    ) -> _core.Plan:
        """Chooses a plan. ``present``: see best_for_steps."""
        share = functools.partial(self._waiting_share, profile)
        return best_for_steps(profile, self._modes, variation, self.options, share, present)

    def _waiting_share(self, profile: _core.Profile, plan: _core.Plan) -> float:
        """The share of steps in which clipping waits for all gradients: as if the last ones had followed this plan."""
        if self.certified_share_if is None:
            return 0.0
        return 1.0 - self.certified_share_if(arrived_with_first(profile, plan))


def _corrected_link(agreed: AgreedPlan, profile: _core.Profile, steps: CalibrationSteps) -> _core.LinkModel | None:
    if not steps.blocks:
        return None
    shared_ns = None
    if agreed.in_force.in_flight > 1:
        periods_ns = calibration.planned_busy_periods_ns(agreed.in_force, profile)
        shared_ns = sum(max(0.0, each_ns - agreed.idle_saving_ns) for each_ns in periods_ns)
    return network_cost.corrected_link(
        link_of(profile), steps.blocks, shared_ns=shared_ns, known_saving_ns=agreed.idle_saving_ns
    )


def arrived_with_first(profile: _core.Profile, plan: _core.Plan) -> set[str]:
    """Names of the tensors that have arrived when clipping decides: with the first parameter that forward reads, and
    with the norms of what the ranks have sent, in the step message."""
    first = next(tensor.name for tensor in profile.tensors if not tensor.name.startswith(PASSENGER_PREFIX))
    touched = [set(tensor_names(profile, block)) for block in plan.blocks]
    last = max(number for number, names in enumerate(touched) if names & {first, MESSAGE_NAME})
    return set().union(*touched[: last + 1]) - set().union(*touched[last + 1 :])


def baseline_plan(profile: _core.Profile) -> _core.Plan:
    """The DDP baseline: DDP's buckets with the best sizes for this profile. REQUIRES: the profile has a link.

    Among nearly equal sizes those that make the fewest buckets are taken. They are compared with one bucket in flight:
    with more, `play` hides the start-up cost of one behind another, and busy hosts do not.
    """
    profile = measured_profile.with_message_joined(profile)
    candidates = [(ddp_baseline.plan(profile, caps, at_a_time=1), caps) for caps in ddp_baseline.TUNED_CAPS_BYTES]
    near_ns = (1 + _BASELINE_TOLERANCE) * min(plan.predicted_ns for plan, _ in candidates)
    near = [each for each in candidates if each[0].predicted_ns <= near_ns]
    _, caps_bytes = min(near, key=lambda each: (len(each[0].blocks), each[0].predicted_ns))
    return ddp_baseline.plan(profile, caps_bytes)


def is_usual_size_near(agreed: AgreedPlan) -> bool:
    """Returns whether the baseline, if there is one, is hardly faster than DDP with buckets of its usual size."""
    if agreed.baseline is None:
        return True
    profile = measured_profile.with_message_joined(agreed.baseline_profile or agreed.profile)
    usual_ns = ddp_baseline.plan(profile, ddp_baseline.USUAL_CAPS_BYTES).predicted_ns
    return usual_ns <= (1 + _USUAL_SIZE_TOLERANCE) * agreed.baseline.predicted_ns


def rehearse(sizes: GradientSizes, mode: str, options: Options) -> None:
    """Raises the Error that proposing a plan to several workers would raise because of the options."""
    modes = (mode,) if options.clip.norm is None else (mode, "hook")
    if options.plan.path is not None:
        pinned_proposal(options.plan.path, sizes, modes, world_size=1)
        return
    profile = measured_profile.layout_profile(sizes, sizes.order_of_warmup, world_size=2, name="rehearsal")
    for each in modes:
        choose_plan(profile.replace(link=_ANY_LINK), each, options)


def pinned_proposal(path: str, sizes: GradientSizes, modes: Sequence[str], world_size: int) -> AgreedPlan | None:
    """The plan of a file, with the layout that it was made for; None for that of an earlier version of gradcast. Raises
    Error if it was made for another model."""
    plan, made_with = load_plan(path)
    names = sizes.names
    tensors = made_with.get("tensors")
    if tensors is None:
        raise Error(
            f"{path} does not note the order of its tensors (made_with.tensors); make it with handle.save_plan() or, "
            "from the file of handle.save_profile(), with `gradcast dev plan`",
            "invalid_plan",
        )
    if MESSAGE_NAME not in tensors:
        _log.warning(
            "the plan of %s was made by an earlier version of gradcast, which laid gradients out in another way; this "
            "training measures and plans for itself: save its plan in place of that one",
            path,
        )
        return None
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
    other = f"{path} is a plan for tensors of other sizes or types, or with other clipping"
    try:
        plan.check(profile)
    except Error as error:
        raise Error(f"{other}, or was changed ({error}); make it again", "invalid_plan") from None
    if made_with.get("hash") != plan_hash(plan, profile):
        raise Error(f"{other}; make it again", "invalid_plan")
    return AgreedPlan(profile, plan)
