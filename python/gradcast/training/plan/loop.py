"""The plan loop of a session: measure, propose, agree, follow. All phases and transitions are in this file.

All ranks are in the same phase, and all change it at the start of the same iteration::

    phase        ends                                                     next phase
    WarmingUp    after the last warm-up step                              Calibrating: with a plan for what was measured
    Calibrating  after the plan's first steps: costs are as predicted     Following: with the same plan
    Calibrating  after the plan's first steps: costs differ               Following: with a plan for the corrected costs
    Following    when the monitor finds a change of network or compute    WarmingUp
    Following    when clipping certifies another share of steps           Calibrating: with a plan for it, if different
    both         when the ranks' shares of the batch have changed         Calibrating: with a plan for their compute
    any          when a checkpoint of as many workers is loaded           Following: with its plan
    any          when a checkpoint of other workers is loaded             Calibrating: with a plan from its profile
    Fixed        never

``Fixed`` replaces Calibrating and Following if the user has pinned a plan or turned ``adapt`` off. Calibrating is the
beginning of Following: iterations count for its monitor.

The monitor (include/gradcast/monitor.h) gets the same step reports on every rank and so decides the same. From time to
time it tries the DDP baseline for a few iterations. If the baseline is as fast, or if the plan is expected to gain too
little, the ranks follow the baseline: gradients are sent as DDP sends them. Around a
DDP module they let DDP do it itself after some steps (sessions/handover.py); otherwise they rest: they measure and
report nothing for some hundred steps, and then look again for a few. If the shares of the batch follow the
ranks' speed, a change of one rank's compute is measured again only if the shares do not answer it.

The proposer (proposals.py) only computes: a transition gives it measurements, and all ranks check what rank 0 proposes.
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from gradcast import _core, shares
from gradcast.comparison.compare import compute_ns
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.training.measure.early_waits import EarlyWaits
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.measure.unseen_reads import UnseenRead, agreed_reads
from gradcast.training.options import Options
from gradcast.training.plan import agreement, calibration
from gradcast.training.plan.agreement import AgreedPlan
from gradcast.training.plan.balancing import Balancing
from gradcast.training.plan.calibration import Calibration
from gradcast.training.plan.proposals import PlanChange, Proposer, is_usual_size_near
from gradcast.training.plan.step_alarms import StepAlarms
from gradcast.training.plan.step_meter import Iteration, StepMeter
from gradcast.training.plan.warmup import Warmup
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.step_reports import StepReport
from gradcast.training.step.clipping import NormClipping
from gradcast.training.step.gradient_exchange import GradientExchange
from gradcast.training.step.step_message import StepMessage

# After so many steps of a plan, and then again, the share of steps that clipping certifies is looked at.
_SHARE_STEPS = 64
# After so many steps of the baseline, followed for good, the monitor knows the usual times, and DDP takes over; after
# fewer if they were known before, after more if nobody may rest. With many ranks: rounds of reports.
_STEPS_UNTIL_DDP = 32
_STEPS_UNTIL_DDP_AGAIN = 12
_STEPS_AFTER_REASON = 512
# So many steps pass before the ranks look again; each time twice as many, up to the maximum.
_REST_STEPS = 400
_REST_STEPS_MAX = 3200
# Another plan may be better if clipping certifies so many more or fewer steps, as a share of all.
_OTHER_SHARE = 0.2


class Leaving(enum.Enum):
    """The time for which the ranks leave the reduction to DDP."""

    FOR_GOOD = enum.auto()
    FOR_TRIAL = enum.auto()


class Phase:
    """``on_baseline``: the open iteration follows the DDP baseline, for good or as a trial. ``times_blocks``: the next
    ``begin_iteration`` needs to know when the blocks of this iteration have finished. ``slowest_rank``: one that has
    lately computed at least a tenth longer than the others. ``rest_steps``: for which nothing is measured yet."""

    on_baseline = False
    times_blocks = False
    slowest_rank: int | None = None
    rest_steps = 0
    _rests_taken = 0

    def take_rest(self) -> int:
        """Returns for how many steps nothing is measured now."""
        self._rests_taken += 1
        return min(_REST_STEPS << (self._rests_taken - 1), _REST_STEPS_MAX)


class Fixed(Phase):
    pass


class WarmingUp(Phase):
    times_blocks = True

    def __init__(self, warmup: Warmup, change: PlanChange | None = None) -> None:
        """``change``: why the ranks measure again."""
        self.warmup, self.change = warmup, change


class Following(Phase):
    """Follows a plan, and feeds its monitor."""

    def __init__(
        self, monitor: _core.Monitor, calibration: Calibration | None = None, *, on_baseline: bool = False
    ) -> None:
        """``calibration``: of the plan's first steps, in the phase Calibrating."""
        self.monitor, self.calibration, self.on_baseline = monitor, calibration, on_baseline
        self.iterations = 0  # since calibration
        self.until_ddp = _STEPS_UNTIL_DDP
        self.ddp_steps_ns: list[float] | None = None  # of a trial in which DDP has reduced: this rank's

    @property
    def times_blocks(self) -> bool:  # type: ignore[override]
        return self.calibration is not None

    @property
    def slowest_rank(self) -> int | None:  # type: ignore[override]
        rank = self.monitor.slowest_rank
        return None if rank < 0 else rank

    def decide(self, reported: Iteration | None, reports: Sequence[StepReport] | None) -> _core.Decision | None:
        """Returns the monitor's decision. ``reported``: the iteration that the reports are of; None is returned for one
        before this plan."""
        if reported is None or reported.phase is not self:
            return None
        facts = [report.facts for report in reports or []]
        decision: _core.Decision = self.monitor.on_iteration(reported.on_baseline, facts)
        return decision


class PlanLoop:
    """``agreed``: the plan in force, in a warm-up one of its plans; ``version`` counts them. ``profile``: the
    measured one. ``unseen_reads``: of parameters with unseen reads on some rank, in any warm-up or in the
    checkpoint. ``comparison``: the monitor's last one with the baseline. ``reason_against_ddp``: returns this
    rank's reason why DDP cannot reduce by itself, if it has one; None if there is no DDP. ``leaves_to_ddp``: all
    ranks have agreed that DDP does so from the next forward pass on: for good, or for a trial;
    ``ddp_has_usual_size``: with buckets of its own size, not of the baseline's."""

    def __init__(
        self,
        exchange: GradientExchange,
        message: StepMessage,
        module: nn.Module,
        group: Group,
        trace: StepTrace,
        waits: EarlyWaits,
        mode: str,
        options: Options,
        clipping: NormClipping | None,
    ) -> None:
        self.agreed: AgreedPlan
        buffers = exchange.buffers
        self.group, self.exchange, self._clipping = group, exchange, clipping
        self.meter = StepMeter(exchange, message, trace, group)
        certified_share_if = None if clipping is None else clipping.record.certified_share_if
        self.proposer = Proposer(buffers, mode, group.world_size, options, certified_share_if, waits.reason)
        on_device = not self.meter.sees_compute
        self.alarms = StepAlarms(group, self.meter.reports.lag, exchange, options.watch.on_alarm, on_device=on_device)
        self.balancing: Balancing | None = None
        self._make_warmup = functools.partial(Warmup, buffers, module, group, mode, options)
        self.profile: _core.Profile | None = None
        self.unseen_reads: dict[int, UnseenRead] = {}
        self.comparison: _core.Comparison | None = None
        self.version = 0
        self.reason_against_ddp: Callable[[], str | None] | None = None
        self.leaves_to_ddp: Leaving | None = None
        self.ddp_has_usual_size = True
        self._logged_reason = ""
        with self._agreeing():
            self.phase: Phase = self._begin_warmup(buffers.order_of_warmup)

    @property
    def warmup(self) -> Warmup | None:
        """The warm-up, while it lasts."""
        return self.phase.warmup if isinstance(self.phase, WarmingUp) else None

    def release(self) -> None:
        """Leaves the module. The plan can still be read."""
        if self.warmup is not None:
            self.warmup.release()
        del self._make_warmup
        self.reason_against_ddp = None

    def log_comparison(self) -> None:
        """Logs the expected and the measured speed-up, if the baseline was tried."""
        compared = self.comparison
        if compared is None or compared.baseline_count == 0:
            return
        expectation = self.agreed.expectation
        baseline = self.group.baseline
        expected = "" if expectation is None else f"expected {expectation.gain:.2f}x over {baseline}, "
        self.group.info(
            f"{expected}measured {compared.baseline_ns / compared.plan_ns:.2f}x (± {compared.noise:.2f}): "
            f"{compared.plan_ns / 1e6:.1f} ms per step with the plan, {compared.baseline_ns / 1e6:.1f} as {baseline}",
        )

    # --- Measure ---

    def begin_iteration(self, start_ns: int, weights: Sequence[float] | None) -> None:
        """Decides what the iteration that begins follows. ``start_ns``: the start of its backward pass. ``weights``:
        those of the last iteration, None if it had none. REQUIRES: nothing is in flight, except in a device's queue
        unless ``phase.times_blocks``."""
        self.leaves_to_ddp = None  # no forward pass came before this backward pass
        if self.rests:
            self.phase.rest_steps -= 1
            if not self.rests:
                self.end_rest()
            return
        trace = self.meter.trace
        own, reports = self.meter.step_ended(start_ns, self._waiting_stage())
        if self.meter.iterations:
            self.meter.iterations[-1].weights = () if weights is None else tuple(weights)
        self.alarms.add(trace.current.step if trace.current else 0, self.meter.reported, reports)
        change = self._changed_shares(reports)
        match self.phase:
            case Following() if change is not None:
                self.phase = self._plan_for_compute(change.busy_ns)
            case WarmingUp() as phase:
                self.phase = self._after_warmup_step(phase)
            case Following(calibration=Calibration()) as phase:
                self.phase = self._after_calibration_step(phase, own)
            case Following() as phase:
                self.phase = self._after_step(phase, reports)
        self.meter.stamp_device(isinstance(self.phase, Following) and self.phase.calibration is not None)
        is_usual = self.warmup is None and self.phase.on_baseline == self.agreed.runs_as_baseline
        expected = self.alarms.expected(self._waiting_stage()) if is_usual else None
        self.meter.iterations.append(Iteration(self.phase, self.phase.on_baseline, expected))

    def _waiting_stage(self) -> str:
        if not self.meter.sees_compute:  # on a device
            return "forward"  # where it ends, the host waits for the blocks before those that it has just queued
        if self.proposer.mode == "hook":
            return "backward"
        return "loop" if self.phase.on_baseline or self.warmup is not None else "forward"

    def _changed_shares(self, reports: Sequence[StepReport] | None) -> shares.Change | None:
        """Returns a change that is in force since the last iteration."""
        if self.balancing is None:
            return None
        are_usable = self.meter.sees_compute and self.warmup is None
        last, reported = self.meter.iterations[-1] if self.meter.iterations else None, self.meter.reported
        change = self.balancing.begin_iteration(last, reported, reports if are_usable else None)
        if change is not None:
            self.alarms.shares_changed()
        return change

    # --- Transitions ---

    def _after_warmup_step(self, phase: WarmingUp) -> Phase:
        # All ranks begin equally many iterations; on one of them the loop may omit step().
        phase.warmup.stopwatch.backward_started()
        ended = self.exchange.timeline()
        if not ended:
            return phase
        next_plan = phase.warmup.step_ended(ended[-1], None if self.meter.sees_compute else self.meter.trace.current)
        if next_plan is not None:
            self._follow(next_plan)
            return phase
        with self._agreeing():
            measured = phase.warmup.measured(self.exchange.buffers.flats)
            self.profile = measured.profile
            phase.warmup.release()
            self._add_unseen(measured.unseen_reads)
            agreed = self._agree(lambda: self.proposer.from_warmup(measured, phase.change))
            following = self.start_plan(agreed)
        if phase.change is not None:
            self.group.info(phase.change.sentence(agreed))
        return following

    def _after_calibration_step(self, phase: Following, own: StepReport | None) -> Phase:
        ended = self.exchange.timeline()
        compute = self.meter.compute_of_last_step(own, self.agreed.profile.part_ns)
        calibration, measured = phase.calibration, self.profile
        assert calibration is not None, "it is of the plan's first steps"
        assert measured is not None, "a warm-up has measured it"
        if not calibration.add_step(ended[-1] if ended else None, compute):
            return phase
        with self._agreeing():
            steps = calibration.gather(self.group)
            agreed = self._agree(lambda: self.proposer.from_calibration(self.agreed, measured, steps))
            if self.keep_if_confirmed(agreed):
                phase.calibration = None
                return phase
            if agreed.profile != measured:
                self.group.info(agreed.correction_sentence(self.agreed, measured))
            self.profile = agreed.profile
            return self.start_plan(agreed, calibrates=False)

    def _after_step(self, phase: Following, reports: Sequence[StepReport] | None) -> Phase:
        if phase.ddp_steps_ns is None:
            decision = phase.decide(self.meter.reported, reports)
        else:
            decision = self._trial_ended(phase, phase.ddp_steps_ns)
        if decision is not None:
            self.comparison = phase.monitor.comparison()
            if decision.change is not None and not (self.balancing and self.balancing.defers(decision.change)):
                return self._measure_again(decision.change)
            self._obey(phase, decision)
        if self.agreed.runs_as_baseline and phase.iterations % self.meter.reports.turns == 0:
            phase.until_ddp -= 1
            if phase.until_ddp <= 0 and not self.leave_to_ddp(Leaving.FOR_GOOD):
                self._rest(phase)
        phase.iterations += 1
        rounds, position = divmod(phase.iterations, _SHARE_STEPS)
        if rounds and position == 0:
            self._ask_if_share_differs()
        if rounds and position == 1 and self._clipping is not None and self._clipping.message.any_asks_for_plan:
            return self._plan_for_certified_share(phase)
        return phase

    def _obey(self, phase: Following, decision: _core.Decision) -> None:
        """Begins or ends a trial of the baseline, or follows it for good."""
        begins = decision.on_baseline and not phase.on_baseline and not decision.stepped_aside
        if not (begins and self.leave_to_ddp(Leaving.FOR_TRIAL)) and decision.on_baseline != phase.on_baseline:
            phase.on_baseline = decision.on_baseline
            self._activate(on_baseline=decision.on_baseline)
        if decision.stepped_aside:
            found = phase.monitor.comparison()
            self.group.warning(
                f"the {self.group.baseline} baseline is as fast here: {found.baseline_ns / 1e6:.1f} ms per step, "
                f"{found.plan_ns / 1e6:.1f} with the plan; running as {self.group.baseline}",
            )
            self.agreed = dataclasses.replace(self.agreed, runs_as_baseline=True)
            self.alarms.plan_began(self.agreed)
            self.version += 1

    def leave_to_ddp(self, leaving: Leaving) -> bool:
        """Lets DDP reduce by itself, if there is one, and no rank has a reason against it."""
        if self.reason_against_ddp is None:
            return False
        with self._agreeing():
            found = self.group.gather((self.reason_against_ddp(), is_usual_size_near(self.agreed)))
        self.ddp_has_usual_size = found[0][1]  # rank 0's: others may round differently
        rank, reason = next(((rank, why) for rank, (why, _) in enumerate(found) if why is not None), (0, None))
        if reason is None:
            self.leaves_to_ddp = leaving
        elif reason != self._logged_reason:
            self.group.info(f"running as DDP means with DDP's buckets, not by DDP itself: {reason} (rank {rank})")
            self._logged_reason = reason
        return reason is None

    def look_again(self, ddp_steps_ns: list[float] | None) -> None:
        """Follows the plan in force again after DDP has reduced. ``ddp_steps_ns``: of a trial, this rank's steps."""
        if isinstance(self.phase, Following):
            self.phase.until_ddp, self.phase.ddp_steps_ns = _STEPS_UNTIL_DDP_AGAIN, ddp_steps_ns

    def _rest(self, phase: Following) -> None:
        """Measures nothing for some steps, unless the shares of the batch or of clipped steps may change meanwhile."""
        phase.until_ddp = _STEPS_AFTER_REASON
        if self.balancing is None and self._clipping is None and phase.on_baseline:
            phase.rest_steps = phase.take_rest()
            self.meter.pause()
            self.group.info(
                f"gradients are sent as by {self.group.baseline} from here on, and nothing is measured; "
                f"gradcast looks again after {phase.rest_steps} steps",
            )

    @property
    def rests(self) -> bool:
        """True while nothing is measured or reported; the same on all ranks."""
        return self.phase.rest_steps > 0

    def end_rest(self) -> None:
        """Measures again from the next iteration on. Call this on all ranks at the same one."""
        self.phase.rest_steps = 0
        self.meter.resume()
        self.look_again(None)

    def _trial_ended(self, phase: Following, own_ns: Sequence[float]) -> _core.Decision:
        """Gives the steps of a trial to the monitor. ``own_ns``: of this rank."""
        phase.ddp_steps_ns = None
        with self._agreeing():
            steps = list(zip(*self.group.gather(list(own_ns)), strict=False))
        while True:  # as many as it has asked for
            times_ns = steps.pop(0) if steps else ()
            facts = [_core.RankFacts(step_ns=each, busy_ns=0, link_ns=0) for each in times_ns]
            decision = phase.monitor.on_iteration(True, facts)
            if not decision.on_baseline or decision.stepped_aside:
                return decision

    def _measure_again(self, change: _core.Change) -> Phase:
        with self._agreeing():
            self.alarms.change_found(change)
            phase = self._begin_warmup(self.exchange.order, PlanChange(change, self.agreed))
            phase.warmup.stopwatch.backward_started()
            return phase

    def _ask_if_share_differs(self) -> None:
        """Rank 0 asks all ranks to plan again if clipping certifies many more or fewer steps than when the plan was
        made. The request is sent with the norms: ranks whose programs replace gradients or omit steps count
        differently."""
        certified, clipping = self.agreed.certified, self._clipping
        if self.group.rank == 0 and certified is not None and clipping is not None:
            change = clipping.record.certified_share_if(certified.arrived) - certified.share
            clipping.message.asks_for_plan = abs(change) >= _OTHER_SHARE

    def _plan_for_certified_share(self, phase: Following) -> Phase:
        with self._agreeing():
            agreed = self._agree(lambda: self.proposer.from_certified_share(self.agreed))
            now, before = agreed.certified, self.agreed.certified
            assert now is not None, "clipping certifies steps"
            assert before is not None, "clipping certifies steps"
            self.group.info(
                f"clipping now certifies {now.share:.0%} of steps, {before.share:.0%} when "
                f"the plan was made; planned again: {agreed.typical_step.step_ns / 1e6:.1f} ms per step predicted, "
                f"{self.agreed.typical_step.step_ns / 1e6:.1f} before",
            )
            return phase if self.keep_if_confirmed(agreed) else self.start_plan(agreed)

    def _plan_for_compute(self, busy_ns: float) -> Phase:
        """Plans for another compute time. ``busy_ns``: of the slowest rank."""
        with self._agreeing():
            agreed = self._agree(lambda: self.proposer.from_compute(self.agreed, busy_ns))
            self.profile = agreed.profile
            return self.start_plan(agreed)

    def adopt(self, state: dict[str, Any], here: MeasuredExchange) -> None:
        """Follows the plan of a checkpoint, or one made from its profile if it is of other workers than those of
        ``here``. Collective, inside ``together``."""
        if self.rests:
            self.end_rest()
        if self.warmup is not None:
            self.warmup.release()
        profile = self.profile = agreement.saved_profile(state, "profile")
        names, reads = self.exchange.buffers.names, agreement.unseen_reads(state)
        self._add_unseen({names.index(name): read for name, read in reads.items()})
        if state["world_size"] == self.group.world_size:
            agreed = self._agree(lambda: self.proposer.from_checkpoint(state))
            self.phase = self.start_plan(agreed, calibrates=False, describes=False)
            return
        agreed = self._agree(lambda: self.proposer.for_workers(profile, here))
        self.profile = agreed.profile
        self.group.info(
            f"the profile of the checkpoint is of {state['world_size']} workers; planned for {self.group.world_size} "
            "without measuring, and the first steps correct it",
        )
        self.phase = self.start_plan(agreed)

    # --- Agree ---

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Context for a transition to another plan: a failure on one rank raises on all. Collective."""
        with self.exchange.watch.waiting(agreement.AGREEMENT), self.group.together(agreement.AGREEMENT):
            yield

    def _agree(self, propose: Callable[[], AgreedPlan]) -> AgreedPlan:
        return agreement.agree(self.group, propose)

    def keep_if_confirmed(self, agreed: AgreedPlan) -> bool:
        """Keeps the plan in force if the proposal is the same one, with what is now expected of it. Returns whether it
        is kept."""
        if not agreed.is_same_as(self.agreed):
            return False
        before, self.agreed = self.agreed, self.agreed.with_basis_of(agreed)
        self.alarms.plan_began(self.agreed, is_new=False)
        now, former = agreed.expectation, before.expectation
        if now is not None and former is not None and now.sentence() != former.sentence():
            self.agreed.log(self.group, self.version)
        return True

    # --- Follow ---

    def start_plan(self, agreed: AgreedPlan, *, calibrates: bool = True, describes: bool = True) -> Phase:
        """Follows a plan made from measurements. ``calibrates``: its first steps correct it. ``describes``: logs the
        prediction."""
        self._connect([agreed.plan, agreed.baseline])
        self._follow(agreed)
        self.alarms.plan_began(agreed)
        self.comparison = None
        if describes:
            agreed.log(self.group, self.version)
        if not self.proposer.options.plan.adapt or agreed.profile.link is None:  # a pinned plan has no link
            return Fixed()
        first_steps = Calibration(agreed.in_force, agreed.profile.link.pack_ns_per_byte) if calibrates else None
        return Following(self.new_monitor(agreed), first_steps, on_baseline=agreed.runs_as_baseline)

    def _follow(self, agreed: AgreedPlan) -> None:
        self.agreed = agreed
        self.version += 1
        self._activate(on_baseline=agreed.runs_as_baseline)

    def _connect(self, plans: Sequence[_core.Plan | None]) -> None:
        """Connects the ranks for all blocks of these plans before one is followed."""
        blocks = [block for plan in plans if plan is not None for block in plan.blocks]
        self.group.connect(self.exchange.buffers.messages(blocks))

    def _activate(self, *, on_baseline: bool) -> None:
        plan = self.agreed.baseline if on_baseline else self.agreed.plan
        assert plan is not None, "a trial of the baseline needs one"
        self.exchange.follow(self.agreed.profile, plan)

    def _begin_warmup(self, order: Sequence[int], change: PlanChange | None = None) -> WarmingUp:
        warmup = self._make_warmup(order=order)
        first = self._agree(warmup.first_plan)
        self._connect(warmup.plans)
        self._follow(first)
        return WarmingUp(warmup, change)

    def new_monitor(self, agreed: AgreedPlan) -> _core.Monitor:
        busy_ns, expected = compute_ns(agreed.profile) + agreed.further_calls_ns, agreed.expectation
        if not self.meter.sees_compute:
            busy_ns = 0.0
        elif agreed.runs_as_baseline and expected is not None:
            # Compute may take longer under the plan than under the baseline.
            busy_ns = expected.compute_share * expected.baseline.step_ns
        return _core.Monitor(
            self.group.world_size,
            busy_ns=busy_ns,
            link_ns=sum(calibration.planned_busy_periods_ns(agreed.in_force, agreed.profile)),
            has_baseline=agreed.baseline is not None,
            begins_on_baseline=agreed.runs_as_baseline,
            hold_iterations=agreed.hold_iterations // self.meter.reports.turns,
        )

    def _add_unseen(self, reads: dict[int, UnseenRead]) -> None:
        self.unseen_reads = agreed_reads([self.unseen_reads, reads])
        names = self.exchange.buffers.names
        first = frozenset(names[index] for index, read in self.unseen_reads.items() if not read.module)
        self.proposer = dataclasses.replace(self.proposer, read_first=first)
        modules = {read.module for read in self.unseen_reads.values()} - {""}
        if modules and self.proposer.mode == "overlap":
            self.group.info(f"{len(modules)} modules wait, when they begin, for weights that they read unseen")
