"""Agreement of the ranks on a plan: rank 0 proposes, and every rank checks.

Ranks that follow different plans average the wrong bytes without an error.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradcast import _core
from gradcast.comparison.compare import compute_ns, link_of
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.errors import Error, refused
from gradcast.files import plan_hash
from gradcast.scaling import other_workers
from gradcast.training.measure.unseen_reads import UnseenRead
from gradcast.training.plan.expectation import Expectation, StepVariation, TypicalStep
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_buffers import GradientSizes

AGREEMENT = "the agreement on the plan"
# Of handle.state_dict(). Up to 1, usage flags lay behind the gradients; the first release wrote none.
STATE_VERSION = 2


class CertifiedShare(NamedTuple):
    """The ``share`` of steps that clipping certified when a plan was made, given that the gradients of the parameters
    ``arrived`` (names) have arrived then."""

    arrived: frozenset[str]
    share: float


@dataclasses.dataclass(frozen=True)
class AgreedPlan:
    """The plan that all ranks follow; before ``agree``, rank 0's proposal.

    ``profile`` has the tensors in the order of the buffers. ``baseline``: the DDP baseline that the plan is compared
    with. ``runs_as_baseline``: the ranks follow the baseline, because the plan gains too little. ``hold_iterations``:
    the number of iterations in which no change makes the ranks measure again. ``further_calls``: calls of the optimizer
    beyond the first, mean per step with the plan.

    The basis of later proposals: ``variation`` of the measured steps; ``baseline_profile``, the profile under the
    baseline, None where nothing is compared; ``idle_saving_ns``, see network_cost.idle_saving_ns; ``certified``, None
    without clipping by the norm.
    """

    profile: _core.Profile
    plan: _core.Plan
    baseline: _core.Plan | None = None
    expectation: Expectation | None = None
    runs_as_baseline: bool = False
    hold_iterations: int = 0
    further_calls: float = 0.0
    variation: StepVariation = dataclasses.field(default_factory=StepVariation)
    baseline_profile: _core.Profile | None = None
    idle_saving_ns: float = 0.0
    certified: CertifiedShare | None = None

    @property
    def in_force(self) -> _core.Plan:
        if not self.runs_as_baseline:
            return self.plan
        assert self.baseline is not None, "it runs as its baseline"
        return self.baseline

    @property
    def further_calls_ns(self) -> float:
        """Cost of the optimizer's calls beyond the first, in a step with the plan in force."""
        return 0.0 if self.runs_as_baseline else self.profile.part_ns * self.further_calls

    @property
    def typical_step(self) -> TypicalStep:
        if self.expectation is None:
            return TypicalStep(self.plan.predicted_ns, self.plan.bound_ns)
        return self.expectation.baseline if self.runs_as_baseline else self.expectation.plan

    def is_same_as(self, other: "AgreedPlan") -> bool:
        """Returns whether both have the same blocks for the same profile; they may expect different gains."""

        # Not ==, since the times that a plan promises may be rounded on their way to other ranks.
        def kind(agreed: AgreedPlan) -> tuple[Any, ...]:
            plan, profile = agreed.plan, agreed.profile
            return plan.mode, plan.in_flight, plan.hash(profile), agreed.runs_as_baseline, profile.to_json()

        return kind(self) == kind(other)

    def with_basis_of(self, other: "AgreedPlan") -> "AgreedPlan":
        """Returns this plan with the other one's expectation and basis."""
        names = ("expectation", "variation", "baseline_profile", "idle_saving_ns", "certified")
        return dataclasses.replace(self, **{name: getattr(other, name) for name in names})

    def log(self, group: Group, version: int) -> None:
        """Logs the prediction, on rank 0."""
        typical, count = self.typical_step, len(self.in_force.blocks)
        group.info(
            f"plan {version}: {count} blocks, {typical.step_ns / 1e6:.1f} ms per step predicted, "
            f"lower bound {typical.bound_ns / 1e6:.1f} ms",
        )
        if self.expectation is not None:
            group.info(self.expectation.sentence(group.baseline))

    def correction_sentence(self, before: "AgreedPlan", measured: _core.Profile) -> str:
        """Returns a log line about the costs that this plan is made for. ``measured``: the profile until now."""
        network, former = (
            sum(link.all_reduce.cost_ns(block.size_bytes) for block in before.in_force.blocks)
            for link in (link_of(self.profile), link_of(measured))
        )
        compute = compute_ns(self.profile) / compute_ns(measured)
        return (
            f"with this plan the network costs {network / former:.2f} times what the warm-up measured, and compute "
            f"takes {compute:.2f} times as long; planned again"
        )


def agree(group: Group, propose: Callable[[], AgreedPlan]) -> AgreedPlan:
    """Returns rank 0's proposal if it is valid on every rank. Collective.

    Raises on every rank if ``propose`` fails on rank 0, or if the proposal is not valid on some rank.
    """
    proposal = group.computed_by_first(propose, AGREEMENT)

    def answer() -> str:
        found = ""
        for each in (proposal.plan, proposal.baseline):
            if each is not None:
                each.check(proposal.profile)
                found += f" {plan_hash(each, proposal.profile)}"
        return found

    answers = group.computed_by_each(answer, "checking the plan")
    for rank, other in enumerate(answers):
        if other != answers[0]:
            raise Error(
                f"the ranks do not agree on the plan: rank 0 has{answers[0]}, rank {rank} has{other}; "
                "start the training again with the same version of gradcast and the same model on all ranks",
                "invalid_plan",
            )
    expectation = proposal.expectation
    return dataclasses.replace(proposal, runs_as_baseline=expectation is not None and not expectation.is_worth_trying)


def checkpoint_state(
    agreed: AgreedPlan, profile: _core.Profile | None, mode: str, unseen_reads: Mapping[str, UnseenRead]
) -> dict[str, Any]:
    """Returns the part of a checkpoint about the plan: strings and numbers. Before the first profile it is empty.

    ``unseen_reads``: by name of a parameter.
    """
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "mode": mode,
        "world_size": agreed.profile.world_size,
        "profile": None,
        "plan": None,
    }
    if profile is not None:
        # The layout is that of the plan's own profile; a pinned plan's profile holds nothing else.
        state |= {"profile": profile.to_json(), "layout": agreed.profile.to_json(), "plan": agreed.plan.to_json()}
        state["unseen_reads"] = list(unseen_reads)
        state["unseen_modules"] = {name: read.module for name, read in unseen_reads.items() if read.module}
    return state


def saved_profile(state: dict[str, Any], key: str) -> _core.Profile:
    """Returns the profile under this key of a checkpoint. Early states have the cost of a part beside it."""
    profile = _core.Profile.from_json(state[key])
    return profile.replace(part_ns=state["call_ns"]) if "call_ns" in state else profile


def reason_to_measure(
    state: dict[str, Any], sizes: GradientSizes, mode: str, here: MeasuredExchange, *, adapt: bool
) -> str | None:
    """Returns the reason why neither the plan of a checkpoint can be followed here, nor one made from its profile for
    the workers of ``here``; None if one of these can. ``adapt``: the plan may be corrected later.

    Raises Error if ``state`` is not what ``checkpoint_state`` returned.
    """
    try:
        plan = state["plan"]
        if state.get("version", 1) != STATE_VERSION:
            return "it was saved by another version of gradcast"
        if plan is None:
            return "it was saved before its plan was made"
        if state["mode"] != mode:
            return f"it was made in {state['mode']} mode, this training is in {mode} mode"
        world_size = len(here.hosts.host_of)
        if state["world_size"] != world_size:
            why = "options.plan.adapt is off, so nothing would correct a plan for other workers" if not adapt else None
            why = why or other_workers.why_not(_core.Profile.from_json(state["profile"]), here)
            if why is not None:
                return f"it was made for {state['world_size']} workers, this training has {world_size}, and {why}"
        layout = _core.Profile.from_json(state["layout"])
        saved = {tensor.name: (tensor.bytes, tensor.buffer) for tensor in layout.tensors}
        own = {name: (sizes.bytes_of(index), sizes.buffer_of[index]) for index, name in enumerate(sizes.names)}
        if saved != own:
            differing = sorted(name for name in {*saved, *own} if saved.get(name) != own.get(name))
            return f"it was made for another model: {differing[0]} differs"
        if not own.keys() >= unseen_reads(state).keys():
            raise KeyError("unseen_reads")
    except (KeyError, TypeError) as error:
        raise refused(
            f"the state is not one that handle.state_dict() returned ({error!r}); pass that to load_state_dict()"
        ) from None
    return None


def unseen_reads(state: dict[str, Any]) -> dict[str, UnseenRead]:
    """Returns the ``unseen_reads`` that ``checkpoint_state`` was given. Early states name no modules."""
    modules = {**state.get("unseen_modules", {})}
    without = UnseenRead("", "the checkpoint names no module")
    return {name: UnseenRead(modules[name]) if name in modules else without for name in state["unseen_reads"]}


def plan_text(plan: _core.Plan, profile: _core.Profile, profile_path: str | None) -> str:
    """The text of a plan file. It names the order of the tensors and, if given, the file of the profile."""
    made_with = {"hash": plan_hash(plan, profile), "tensors": [tensor.name for tensor in profile.tensors]}
    if profile_path is not None:
        made_with["profile"] = profile_path
    if profile.link is not None:
        made_with["network"] = "the measured network"
        made_with["link"] = json.loads(profile.link.to_json())
    return plan.replace(extra={**plan.extra, "made_with": made_with}).to_json()
