"""Which plan the next iteration follows: the current phase (phases.py), and what the phases do."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from gradcast import _core, shares
from gradcast.comparison.compare import compute_ns
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.training.measure import compute_cost
from gradcast.training.measure.clocks import clock_of
from gradcast.training.measure.early_waits import EarlyWaits
from gradcast.training.measure.stage_exposure import StageExposure
from gradcast.training.measure.step_trace import Stamp, StepTrace
from gradcast.training.measure.unseen_reads import UnseenRead, agreed_reads
from gradcast.training.options import Options
from gradcast.training.plan import agreement, calibration
from gradcast.training.plan.agreement import AgreedPlan
from gradcast.training.plan.balancing import Balancing
from gradcast.training.plan.calibration import Calibration
from gradcast.training.plan.phases import Calibrating, Fixed, Following, Monitored, MonitorFeed, PlanPhase, WarmingUp
from gradcast.training.plan.proposals import PlanChange, Proposer
from gradcast.training.plan.step_alarms import StepAlarms
from gradcast.training.plan.warmup import Warmup
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.step_reports import StepReport, StepReports
from gradcast.training.step.clipping import NormClipping
from gradcast.training.step.gradient_buffers import PASSENGER_PREFIX
from gradcast.training.step.gradient_exchange import GradientExchange


class PlanController:
    """The plan of one session. ``agreed``: the plan in force, during the warm-up one of its plans. ``phase``: see
    phases.py."""

    def __init__(
        self,
        exchange: GradientExchange,
        module: nn.Module,
        group: Group,
        trace: StepTrace,
        waits: EarlyWaits,
        mode: str,
        options: Options,
        clipping: NormClipping | None,
    ) -> None:
        """``clipping``: tells how often it lets a step wait for all gradients."""
        self._buffers, self._module = exchange.buffers, module
        self.group, self.exchange, self.trace = group, exchange, trace
        self.mode, self._options = mode, options
        self.step_reports = StepReports(self._buffers, group.rank, group.world_size)
        self.proposer = Proposer(self._buffers, mode, group.world_size, options, clipping, waits)
        # On a device the host runs ahead, so the time that the host does not wait is not compute.
        self._sees_compute = self._buffers.flats[0].device.type == "cpu"
        self._clock = clock_of(self._buffers.flats[0].device)
        self._start_ns = 0  # of the open iteration's backward pass
        self.alarms = StepAlarms(
            group, self.step_reports.lag, exchange, options.on_alarm, on_device=not self._sees_compute
        )
        self._link_ns = 0  # of all iterations until now
        self.exposed = StageExposure()
        self.comparison: _core.Comparison | None = None  # the last one with the baseline
        self.profile: _core.Profile | None = None  # the measured one
        # Of parameters with unseen reads on some rank, in any warm-up or in the checkpoint.
        self.unseen_reads: dict[int, UnseenRead] = {}
        self.version = 0
        self.interrupted = False  # how long the open iteration takes tells nothing
        self.balancing: Balancing | None = None
        # In the warm-up what is no gradient travels last: it may be ready only where backward ends.
        is_gradient = [not name.startswith(PASSENGER_PREFIX) for name in self._buffers.names]
        with self.agreeing():
            self.phase: PlanPhase = self._begin_warmup(sorted(range(len(is_gradient)), key=is_gradient.__getitem__))

    @property
    def warmup(self) -> Warmup | None:
        """The warm-up, while it lasts."""
        return self.phase.warmup if isinstance(self.phase, WarmingUp) else None

    @property
    def may_correct_plans(self) -> bool:
        return self._options.adapt and self._options.plan_path is None

    def release(self) -> None:
        """Leaves the module. What the plan was can still be told."""
        if self.warmup is not None:
            self.warmup.release()
        del self._module

    def adopt(self, state: dict[str, Any], here: MeasuredExchange) -> None:
        """Follows the plan of a checkpoint, or one made from its profile if it is of other workers than those of
        ``here``. Collective, inside ``together``."""
        if self.warmup is not None:
            self.warmup.release()
        self.profile = _core.Profile.from_json(state["profile"])
        reads = agreement.unseen_reads(state)
        self._add_unseen({self._buffers.names.index(name): read for name, read in reads.items()})
        if state["world_size"] == self.group.world_size:
            agreed = self._agree(lambda: self.proposer.from_checkpoint(state))
            self.phase = self.start_plan(agreed, Following, describes=False)
            return
        call_ns = state.get("call_ns", 0.0)
        agreed = self._agree(lambda: self.proposer.for_workers(self.profile, here, call_ns))
        self.profile = agreed.profile
        self.group.info(
            f"the profile of the checkpoint is of {state['world_size']} workers; planned for {self.group.world_size} "
            "without measuring, and the first steps correct it",
        )
        self.phase = self.start_plan(agreed, Calibrating)

    def defers(self, change: _core.Change) -> bool:
        """Whether other shares of the batch may come, which answer this change."""
        return self.balancing is not None and self.balancing.defers(change)

    def begin_iteration(self, start_ns: int, weights: Sequence[float] | None) -> None:
        """Call this when an iteration begins, with nothing in flight, except in a device's queue unless
        ``phase.times_blocks``. ``start_ns``: when its backward pass began. ``weights``: of the last iteration, None if
        it had none."""
        own = self._own_report(start_ns)
        self._start_ns = start_ns
        reports = self.step_reports.exchange(own)
        if reports is not None:
            self.exposed.add(reports)
        self.alarms.hear(self.trace.current.step if self.trace.current else 0, reports)
        change = self._changed_shares(weights, reports)
        if change is not None and isinstance(self.phase, Monitored):
            self.phase = self._plan_for_compute(change.busy_ns)
        else:
            self.phase = self.phase.begin_iteration(own, reports)
        self.phase.iteration_began()
        calibrates = isinstance(self.phase, Calibrating) and not self._sees_compute
        self.trace.device_clock = self._clock if calibrates else None
        is_usual = self.warmup is None and self.phase.on_baseline == self.agreed.runs_as_baseline
        self.alarms.iteration_began(self._waiting_stage() if is_usual else None)

    def log_comparison(self) -> None:
        """The expected and the measured speed-up, if the baseline was tried."""
        compared = self.comparison
        if compared is None or compared.baseline_count == 0:
            return
        expectation = self.agreed.expectation
        expected = "" if expectation is None else f"expected {expectation.gain:.2f}x over DDP, "
        self.group.info(
            f"{expected}measured {compared.baseline_ns / compared.plan_ns:.2f}x (± {compared.noise:.2f}): "
            f"{compared.plan_ns / 1e6:.1f} ms per step with the plan, {compared.baseline_ns / 1e6:.1f} as DDP",
        )

    # --- What the phases do ---

    def start_plan(self, agreed: AgreedPlan, first_phase: type[Monitored], *, describes: bool = True) -> PlanPhase:
        """Follows a plan made from measurements. ``first_phase``: of a plan that is not fixed. ``describes``: logs what
        it promises."""
        self.follow(agreed)
        self.alarms.plan_began(agreed)
        self.comparison = None
        if describes:
            self.describe()
        if not self._options.adapt or agreed.profile.link is None:  # a pinned plan has no link
            return Fixed()
        return first_phase(self, MonitorFeed(self._new_monitor(agreed), self.step_reports.lag))

    def measure_again(self, change: _core.Change) -> PlanPhase:
        """Collective."""
        with self.agreeing():
            self.alarms.change_found(change)
            phase = self._begin_warmup(self.exchange.order, PlanChange(change, self.agreed))
            phase.warmup.stopwatch.backward_started()
            return phase

    def fall_back(self) -> None:
        self.group.warning(
            f"the DDP baseline is as fast here: {self.comparison.baseline_ns / 1e6:.1f} ms per step, "
            f"{self.comparison.plan_ns / 1e6:.1f} with the plan; running as DDP",
        )
        self.agreed = dataclasses.replace(self.agreed, runs_as_baseline=True)
        self.alarms.plan_began(self.agreed)
        self.version += 1

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Around all that ranks do to follow another plan: what fails on one of them raises on all. Collective."""
        with self.exchange.watch.waiting(agreement.AGREEMENT), self.group.together(agreement.AGREEMENT):
            yield

    def agree_on_measured_plan(self, warmup: Warmup, change: PlanChange | None) -> AgreedPlan:
        """Collective, inside ``agreeing()``."""
        self.profile = warmup.profile(self._buffers.flats)
        warmup.release()
        self._add_unseen(warmup.unseen_reads)
        return self._agree(lambda: self.proposer.from_warmup(self.profile, warmup, change))

    def agree_on_calibrated_plan(self, calibration_: Calibration) -> AgreedPlan:
        """Collective, inside ``agreeing()``."""
        steps = calibration_.gather(self.group)
        return self._agree(lambda: self.proposer.from_calibration(self.agreed, self.profile, steps))

    def plan_for_certified_share(self, present: PlanPhase) -> PlanPhase:
        """``present``: the phase that stays if the plan does. Collective."""
        with self.agreeing():
            agreed = self._agree(lambda: self.proposer.from_certified_share(self.agreed))
            self.group.info(self.proposer.share_sentence(self.agreed, agreed))
            if self.keep_if_confirmed(agreed):
                return present
            return self.start_plan(agreed, Calibrating)

    def _changed_shares(
        self, weights: Sequence[float] | None, reports: Sequence[StepReport] | None
    ) -> shares.Change | None:
        """A change that is in force since the last iteration."""
        if self.balancing is None:
            return None
        tells = self._sees_compute and self.warmup is None
        change = self.balancing.begin_iteration(weights, reports if tells else None)
        if change is not None:
            self.alarms.shares_changed()
        return change

    def _plan_for_compute(self, busy_ns: float) -> PlanPhase:
        """``busy_ns``: compute of the slowest rank. Collective."""
        with self.agreeing():
            agreed = self._agree(lambda: self.proposer.from_compute(self.agreed, busy_ns))
            self.profile = agreed.profile
            return self.start_plan(agreed, Calibrating)

    def keep_if_confirmed(self, agreed: AgreedPlan) -> bool:
        """Keeps the plan in force if calibration has confirmed it; its own steps update what is expected of it. Returns
        whether it is kept."""
        if agreed.profile != self.profile:
            return False
        if agreed.runs_as_baseline != self.agreed.runs_as_baseline:
            return False
        # Not ==, since the times that a plan promises may be rounded on their way to other ranks.
        kept, now = (
            (each.plan.mode, each.plan.in_flight, each.plan.hash(agreed.profile)) for each in (self.agreed, agreed)
        )
        if kept != now:
            return False
        before, self.agreed = self.agreed, dataclasses.replace(self.agreed, expectation=agreed.expectation)
        self.alarms.plan_began(self.agreed, is_new=False)
        if agreed.expectation.sentence() != before.expectation.sentence():
            self.describe()
        return True

    def follow_corrected(self, agreed: AgreedPlan) -> PlanPhase:
        if agreed.profile != self.profile:
            in_force = self.agreed.in_force
            network = _cost_ns(in_force, agreed.profile.link) / _cost_ns(in_force, self.profile.link)
            compute = compute_ns(agreed.profile) / compute_ns(self.profile)
            self.group.info(
                f"with this plan the network costs {network:.2f} times what the warm-up measured, and compute takes "
                f"{compute:.2f} times as long; planned again",
            )
        self.profile = agreed.profile
        return self.start_plan(agreed, Following)

    def follow(self, agreed: AgreedPlan) -> None:
        self.agreed = agreed
        self.version += 1
        self.activate(on_baseline=agreed.runs_as_baseline)

    def activate(self, *, on_baseline: bool) -> None:
        self.exchange.follow(self.agreed.profile, self.agreed.baseline if on_baseline else self.agreed.plan)

    def describe(self) -> None:
        """Logs what the plan in force promises."""
        typical, count = self.agreed.typical_step, len(self.agreed.in_force.blocks)
        self.group.info(
            f"plan {self.version}: {count} blocks, {typical.step_ns / 1e6:.1f} ms per step predicted, "
            f"lower bound {typical.bound_ns / 1e6:.1f} ms",
        )
        if self.agreed.expectation is not None:
            self.group.info(self.agreed.expectation.sentence())

    def compute_of_last_step(self, own: StepReport | None) -> Callable[[], compute_cost.Compute | None] | None:
        """``own``: this rank's report of the step that ends now. On a device, what is returned waits for it."""
        if own is None:
            return None
        record, end, call_ns = self.trace.current, self._start_ns, self.agreed.call_ns
        if self._sees_compute:
            return functools.partial(compute_cost.compute_of, record, own.facts.busy_ns, call_ns)
        if not (isinstance(record.start_ns, Stamp) and isinstance(end, Stamp)):
            return None
        return functools.partial(compute_cost.device_compute_of, record, end, self._clock, call_ns)

    # --- Parts ---

    def _add_unseen(self, reads: dict[int, UnseenRead]) -> None:
        self.unseen_reads = agreed_reads([self.unseen_reads, reads])
        self.proposer.read_first = {self._buffers.names[i] for i, read in self.unseen_reads.items() if not read.module}
        modules = {read.module for read in self.unseen_reads.values()} - {""}
        if modules and self.mode == "overlap":
            self.group.info(f"{len(modules)} modules wait, when they begin, for weights that they read unseen")

    def _begin_warmup(self, order: Sequence[int], change: PlanChange | None = None) -> WarmingUp:
        """Collective."""
        warmup = Warmup(self._buffers, self._module, self.group, self.mode, self._options, order=order)
        self.follow(self._agree(warmup.first_plan))
        return WarmingUp(self, warmup, change)

    def _new_monitor(self, agreed: AgreedPlan) -> _core.Monitor:
        busy_ns = compute_ns(agreed.profile) + agreed.further_calls_ns
        if not self._sees_compute:
            busy_ns = 0.0
        elif agreed.runs_as_baseline:  # compute may take longer under the plan than under the baseline
            busy_ns = agreed.expectation.compute_share * agreed.expectation.baseline.step_ns
        return _core.Monitor(
            self.group.world_size,
            busy_ns=busy_ns,
            link_ns=sum(calibration.planned_busy_periods_ns(agreed.in_force, agreed.profile)),
            has_baseline=agreed.baseline is not None,
            begins_on_baseline=agreed.runs_as_baseline,
            hold_iterations=agreed.hold_iterations,
        )

    def _agree(self, propose: Callable[[], AgreedPlan]) -> AgreedPlan:
        return agreement.agree(self.group, propose)

    def _own_report(self, start_ns: int) -> StepReport | None:
        self.exposed.set_waiting_stage(self._waiting_stage())
        record = self.trace.current
        facts = self._own_facts(start_ns)
        if record is None:
            return None
        stages_ns = self.exposed.own_stages_ns(record, start_ns - record.start_ns)
        return None if facts is None else StepReport(facts, stages_ns)

    def _waiting_stage(self) -> str:
        if not self._sees_compute:  # on a device
            return "forward"  # where it ends, the host waits for the blocks before those that it has just queued
        if self.mode == "hook":
            return "backward"
        return "loop" if self.phase.on_baseline or self.warmup is not None else "forward"

    def _own_facts(self, start_ns: int) -> _core.RankFacts | None:
        link_ns = self.exchange.counters().link_ns
        before, self._link_ns = self._link_ns, link_ns
        record, interrupted = self.trace.current, self.interrupted
        self.interrupted = False
        if record is None or interrupted:
            return None
        step_ns = start_ns - record.start_ns
        return _core.RankFacts(step_ns=step_ns, busy_ns=step_ns - record.total_ns("wait"), link_ns=link_ns - before)


def _cost_ns(plan: _core.Plan, link: _core.LinkModel) -> float:
    """Network cost of all blocks, one after the other."""
    return sum(link.all_reduce.cost_ns(block.size_bytes) for block in plan.blocks)
