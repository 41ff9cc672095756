"""Which plan the next iteration follows: those of the warm-up, the one made from its measurements, or the plain one.

The plan is made again where its own first iterations show that the network or compute takes something else than the
warm-up has found (calibration.py). From then on the monitor (include/gradcast/monitor.h) hears on every rank the same
facts of every iteration and comes to the same decisions: to try the plain plan for a few iterations, to stay with it
where it is as fast, and to measure again where the network or the compute has changed for good.
"""

import collections
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.errors import Error
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.stage_exposure import StageExposure
from gradcast.training.measure.step_trace import StepTrace
from gradcast.training.options import Options
from gradcast.training.plan import agreement, calibration, measured_profile
from gradcast.training.plan.agreement import Agreed, Proposal
from gradcast.training.plan.calibration import Calibration
from gradcast.training.plan.change import PlanChange
from gradcast.training.plan.expectation import StepVariation, expect
from gradcast.training.plan.warmup import Warmup
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.step_reports import StepReport, StepReports
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_exchange import GradientExchange

_log = logging.getLogger("gradcast")


class PlanController:
    """Of one session. ``agreed``: the plan in force. ``plain``: the open iteration follows the plain one."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        buffers: GradientBuffers,
        group: Group,
        exchange: GradientExchange,
        trace: StepTrace,
        mode: str,
        options: Options,
    ) -> None:
        """``mode``: of the plans."""
        self._names, self._parameters, self._buffers = list(names), list(parameters), buffers
        self._group, self._exchange, self._trace = group, exchange, trace
        self._mode, self._options = mode, options
        self._notes = StepReports(buffers, group.rank, group.world_size)
        self.exposed = StageExposure()
        self._link_ns = 0
        self._monitor: _core.Monitor | None = None
        # Of the last iterations: whose facts they are, and whether they followed the plain plan.
        self._history: collections.deque[tuple[_core.Monitor | None, bool]] = collections.deque(maxlen=self._notes.lag)
        self._change: PlanChange | None = None  # why this warm-up measures again
        self._calibration: Calibration | None = None  # while the plan is new
        self.comparison: _core.Comparison | None = None  # the last one
        self.profile: _core.Profile | None = None
        self.scatter = StepVariation()  # on rank 0, of what the plan was made from
        # The same on all ranks; see measure.Stopwatch. Also what only another warm-up has met, or that of a checkpoint.
        self.unseen_reads: set[int] = set()
        self._saved_after_pause_ns = 0.0  # on rank 0, in the warm-up; see link_costs
        self.version = 0
        self.plain = False
        self.interrupted = False  # this iteration: how long it takes tells nothing
        self._begin_warmup(range(len(names)))

    @property
    def _sees_compute(self) -> bool:
        """On a device the host runs ahead: what it does not wait is not what the device computes."""
        return self._buffers.flats[0].device.type == "cpu"

    @property
    def failed_iteration(self) -> int | None:
        """The last one that is known of in which some rank's backward pass has failed."""
        return self._notes.failed_iteration

    @property
    def in_force(self) -> _core.Plan:
        return self.agreed.in_force

    @property
    def slowest_rank(self) -> int | None:
        """The rank that computes at least a tenth longer than the others lately."""
        rank = -1 if self._monitor is None else self._monitor.slowest_rank
        return None if rank < 0 else rank

    def adopt(self, state: dict[str, Any]) -> None:
        """Follows the plan of a checkpoint. Collective."""
        if self.warmup is not None:
            self.warmup.stop_watching()
        self.warmup, self._change, self._calibration = None, None, None
        self.profile = _core.Profile.from_json(state["profile"])
        self.unseen_reads |= {self._names.index(name) for name in state["unseen_reads"]}
        self._take(self._agreement(lambda: self._saved(state)))

    def next(self, start_ns: int) -> None:
        """An iteration begins, and nothing travels. ``start_ns``: when its backward pass has started."""
        own = self._own_note(start_ns)
        notes = self._notes.exchange(own)
        if notes is not None:
            self.exposed.add(notes)
        if self.warmup is not None:
            self._advance_warmup()
        elif self._calibration is not None:
            self._advance_calibration(own)
        elif self._monitor is not None and len(self._history) == self._notes.lag:
            monitor, plain = self._history[0]
            if monitor is self._monitor:
                self._decide(self._monitor.on_iteration(plain, [note.facts for note in notes or []]))
        self._history.append((self._monitor, self.plain))

    def summary(self) -> str | None:
        """What was expected and what came, where both are known."""
        compared = self.comparison
        if compared is None or compared.plain_count == 0:
            return None
        expectation = self.agreed.expectation
        expected = "" if expectation is None else f"expected {expectation.gain:.2f}x over DDP, "
        return (
            f"{expected}measured {compared.plain_ns / compared.plan_ns:.2f}x (± {compared.noise:.2f}): "
            f"{compared.plan_ns / 1e6:.1f} ms per step with the plan, {compared.plain_ns / 1e6:.1f} as DDP"
        )

    def _own_note(self, start_ns: int) -> StepReport | None:
        self.exposed.together_after(self._stage_that_waits())
        record = self._trace.current
        facts = self._own_facts(start_ns)
        if record is None:
            return None
        stages_ns = self.exposed.own_stages_ns(record, start_ns - record.start_ns)
        return None if facts is None else StepReport(facts, stages_ns)

    def _stage_that_waits(self) -> str:
        if self._buffers.flats[0].device.type != "cpu":
            return "forward"  # it ends where the next backward pass begins, and there the host waits for everything
        if self._mode == "hook" and self._options.max_grad_norm is None:
            return "backward"
        return "loop" if self.plain or self.warmup is not None else "forward"

    def _own_facts(self, start_ns: int) -> _core.RankFacts | None:
        link_ns = self._exchange.counters().link_ns
        before, self._link_ns = self._link_ns, link_ns
        record, interrupted = self._trace.current, self.interrupted
        self.interrupted = False
        if record is None or interrupted:
            return None
        step_ns = start_ns - record.start_ns
        return _core.RankFacts(step_ns=step_ns, busy_ns=step_ns - record.total_ns("wait"), link_ns=link_ns - before)

    def _decide(self, decision: _core.Decision) -> None:
        self.comparison = self._monitor.comparison()
        if decision.change is not None:
            self._measure_again(decision.change)
            return
        if decision.stepped_aside:
            self._tell(
                logging.WARNING,
                f"DDP's way is as fast here: {self.comparison.plain_ns / 1e6:.1f} ms per step, "
                f"{self.comparison.plan_ns / 1e6:.1f} with the plan; running as DDP",
            )
            self.agreed = dataclasses.replace(self.agreed, runs_as_baseline=True)
            self.version += 1
        if decision.plain != self.plain:
            self.plain = decision.plain
            self._follow()

    def _measure_again(self, change: _core.Change) -> None:
        self._change = PlanChange(change, self.agreed)
        self._monitor = None
        self._begin_warmup(self.agreed.order)
        self.warmup.stopwatch.backward_started()

    def _begin_warmup(self, order: Sequence[int]) -> None:
        self.warmup: Warmup | None = Warmup(
            self._names, self._parameters, self._buffers, self._group, self._mode, self._options, order=order
        )
        self._agree_on(self.warmup.first())

    def _advance_warmup(self) -> None:
        """Where an iteration begins, which all ranks do equally often: a loop may leave step() out on one of them."""
        self.warmup.stopwatch.backward_started()
        ended = self._exchange.timeline()
        if not ended:
            return
        agreed = self.warmup.step_ended(ended[-1])
        if agreed is not None:
            self._agree_on(agreed)
            return
        with self._exchange.watch.waiting("the agreement on the plan"):
            self.profile = self.warmup.profile(self._buffers.flats)
            self._saved_after_pause_ns = self.warmup.saved_after_pause_ns
            self.unseen_reads |= self.warmup.unseen_reads
            agreed = self._agreement(self._decided)
        self.warmup = None
        self._take(agreed)
        self._describe()
        if self._change is not None:
            self._tell(logging.INFO, self._change.sentence(self.agreed))
            self._change = None
        if self._monitor is not None:
            self._calibration = Calibration(self.in_force, self.profile.link.pack_ns_per_byte)

    def _advance_calibration(self, own: StepReport | None) -> None:
        """``own``: of the step that ends now."""
        ended = self._exchange.timeline()
        compute = None
        if own is not None and self._sees_compute:
            compute = compute_cost.compute_of(self._trace.current, own.facts.busy_ns)
        if not self._calibration.step_ended(ended[-1] if ended else None, compute):
            return
        with self._exchange.watch.waiting("the agreement on the plan"):
            found = self._calibration.found(self._group)
            agreed = self._agreement(lambda: self._calibrated(found))
        self._calibration = None
        is_right = agreed.profile.to_json() == self.profile.to_json()
        if is_right and agreed.runs_as_baseline == self.agreed.runs_as_baseline:
            self._stay_with(agreed)
            return
        if not is_right:
            network = _costs_ns(self.in_force, agreed.profile.link) / _costs_ns(self.in_force, self.profile.link)
            computing = compute_ns(agreed.profile) / compute_ns(self.profile)
            self._tell(
                logging.INFO,
                f"with this plan the network costs {network:.2f} times what the warm-up has found, and compute takes "
                f"{computing:.2f} times as long; planned again",
            )
        self.profile = agreed.profile
        self._take(agreed)
        self._describe()

    def _stay_with(self, agreed: Agreed) -> None:
        """The plan is as before; by its own steps, not by the warm-up's, another gain may be expected of it."""
        before, self.agreed = self.agreed, dataclasses.replace(self.agreed, expectation=agreed.expectation)
        if agreed.expectation.sentence() != before.expectation.sentence():
            self._describe()

    def _agreement(self, propose: Callable[[], Proposal]) -> Agreed:
        """On what rank 0 proposes. What it raises, all ranks raise: none waits for a proposal that never comes."""
        proposal: Proposal | Error | None = None
        if self._group.rank == 0:
            try:
                proposal = propose()
            except Error as error:
                proposal = error
        return agreement.agree(self._group, self._names, proposal)

    def _decided(self) -> Proposal:
        path = self._options.plan_path
        if path is not None:
            return agreement.pinned(path, self._names, self._buffers, self._mode, self._group.world_size)
        plan = agreement.decide(self.profile, self._mode, self._options)
        return self._proposal(self.profile, plan, self.warmup.scatter)

    def _calibrated(self, found: calibration.Found) -> Proposal:
        """The plan that was agreed on, where what it was made from is right, or one that is made again."""
        one_by_one = self.in_force.in_flight == 1
        shared_ns = None
        if not one_by_one:
            periods_ns = calibration.planned_busy_periods_ns(self.in_force, self.profile)
            shared_ns = sum(max(0.0, each_ns - self._saved_after_pause_ns) for each_ns in periods_ns)
        link = None
        if found.blocks:
            link = network_cost.corrected(
                self.profile.link, found.blocks, shared_ns=shared_ns, saved_ns=self._saved_after_pause_ns
            )
        compute = calibration.corrected_compute(self.profile, found.compute)
        idle = self.profile if link is None else measured_profile.with_link(self.profile, link)
        profile = idle if compute is None else compute_cost.with_compute(idle, compute)
        plain_profile = profile
        if compute is not None and self.in_force.mode == "overlap":
            # Compute takes longer beside the network; backward has it beside it in DDP, too, but forward has not.
            plain_profile = compute_cost.with_compute(idle, dataclasses.replace(compute, forward_ns=idle.forward_ns))
        samples = [sample for step in found.blocks for sample in step]
        spread = (
            network_cost.spread(samples, profile.link, self._saved_after_pause_ns)
            if samples and one_by_one
            else self.scatter.link
        )
        scatter = StepVariation(spread, compute_cost.scatter(profile, found.compute) or self.scatter.compute)
        is_right = link is None and compute is None
        plan = self.agreed.plan if is_right else agreement.decide(profile, self._mode, self._options)
        proposal = self._proposal(profile, plan, scatter, plain_profile)
        return dataclasses.replace(proposal, hold_iterations=self.agreed.hold_iterations)

    def _saved(self, state: dict[str, Any]) -> Proposal:
        plan = _core.Plan.from_json(state["plan"])
        return self._proposal(_core.Profile.from_json(state["layout"]), plan, StepVariation())

    def _proposal(
        self,
        profile: _core.Profile,
        plan: _core.Plan,
        scatter: StepVariation,
        plain_profile: _core.Profile | None = None,
    ) -> Proposal:
        """``plain_profile``: beside the plain plan, if that is another one."""
        self.scatter = scatter
        if not self._options.adapt or profile.link is None:
            return Proposal(profile.to_json(), plan.to_json())
        plain_profile = plain_profile or profile
        plain = agreement.plain_plan(plain_profile)
        return Proposal(
            profile.to_json(),
            plan.to_json(),
            plain.to_json(),
            expect(profile, plan, plain_profile, plain, scatter),
            hold_iterations=0 if self._change is None else self._change.hold_iterations(profile, plan),
        )

    def _take(self, agreed: Agreed) -> None:
        """The plan of a warm-up or of a checkpoint, from the next iteration on."""
        self._agree_on(agreed)
        self.comparison, self._monitor = None, None
        # A plan that the user has chosen stays.
        if self._options.adapt and agreed.profile.link is not None:
            self._monitor = self._new_monitor(agreed)

    def _new_monitor(self, agreed: Agreed) -> _core.Monitor:
        profile, busy_ns = agreed.profile, compute_ns(agreed.profile)
        if not self._sees_compute:
            busy_ns = 0.0
        elif agreed.runs_as_baseline:  # of the plan that is followed: beside the other one compute may take longer
            busy_ns = agreed.expectation.compute_share * agreed.expectation.plain.step_ns
        return _core.Monitor(
            self._group.world_size,
            busy_ns=busy_ns,
            link_ns=sum(calibration.planned_busy_periods_ns(self.in_force, profile)),
            has_plain=agreed.plain is not None,
            begins_plain=agreed.runs_as_baseline,
            hold_iterations=agreed.hold_iterations,
        )

    def _agree_on(self, agreed: Agreed) -> None:
        self.agreed, self.plain = agreed, agreed.runs_as_baseline
        self.version += 1
        self._follow()

    def _follow(self) -> None:
        self._exchange.follow(self.agreed.active(baseline=self.plain))

    def _describe(self) -> None:
        usual, count = self.agreed.usual, len(self.in_force.blocks)
        self._tell(
            logging.INFO,
            f"plan {self.version}: {count} blocks, {usual.step_ns / 1e6:.1f} ms per step predicted, "
            f"{usual.bound_ns / 1e6:.1f} ms is the bound",
        )
        if self.agreed.expectation is not None:
            self._tell(logging.INFO, self.agreed.expectation.sentence())

    def _tell(self, level: int, sentence: str) -> None:
        if self._group.rank == 0:
            _log.log(level, "%s", sentence)


def _costs_ns(plan: _core.Plan, link: _core.LinkModel) -> float:
    """Of all blocks, one after the other."""
    return sum(link.all_reduce.cost_ns(block.size_bytes) for block in plan.blocks)
