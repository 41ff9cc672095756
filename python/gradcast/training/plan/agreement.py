"""How the ranks agree on a plan: rank 0 proposes, and every rank checks.

Ranks that follow different plans average the wrong bytes without an error.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from gradcast import _core
from gradcast.comparison.measured_exchange import MeasuredExchange
from gradcast.errors import Error, refused
from gradcast.files import plan_hash
from gradcast.scaling import other_workers
from gradcast.training.measure.unseen_reads import UnseenRead
from gradcast.training.plan.expectation import Expectation, TypicalStep
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_buffers import GradientSizes

AGREEMENT = "the agreement on the plan"
STATE_VERSION = 1  # of handle.state_dict()


@dataclasses.dataclass(frozen=True)
class AgreedPlan:
    """What all ranks follow; before ``agree``, what rank 0 proposes.

    ``profile`` has the tensors in the order of the buffers. ``baseline``: the DDP baseline that the plan is compared
    with. ``runs_as_baseline``: the ranks follow that, because the plan gains too little. ``hold_iterations``: for how
    many iterations no change makes the ranks measure again. ``call_ns``: see StepVariation. ``further_calls``: how many
    of these a step makes with the plan, on average.
    """

    profile: _core.Profile
    plan: _core.Plan
    baseline: _core.Plan | None = None
    expectation: Expectation | None = None
    runs_as_baseline: bool = False
    hold_iterations: int = 0
    call_ns: float = 0.0
    further_calls: float = 0.0

    @property
    def in_force(self) -> _core.Plan:
        return self.baseline if self.runs_as_baseline else self.plan

    @property
    def further_calls_ns(self) -> float:
        """What calls of the optimizer beyond the first cost in a step with the plan in force."""
        return 0.0 if self.runs_as_baseline else self.call_ns * self.further_calls

    @property
    def typical_step(self) -> TypicalStep:
        if self.expectation is None:
            return TypicalStep(self.plan.predicted_ns, self.plan.bound_ns)
        return self.expectation.baseline if self.runs_as_baseline else self.expectation.plan


def agree(group: Group, propose: Callable[[], AgreedPlan]) -> AgreedPlan:
    """Takes what rank 0 proposes if it is valid on every rank. Collective.

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
    """What a checkpoint holds of the plan: strings and numbers. Before the first profile there is nothing to keep.

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
        state["call_ns"] = agreed.call_ns
        state["unseen_reads"] = list(unseen_reads)
        state["unseen_modules"] = {name: read.module for name, read in unseen_reads.items() if read.module}
    return state


def reason_to_measure(
    state: dict[str, Any], sizes: GradientSizes, mode: str, here: MeasuredExchange, *, adapt: bool
) -> str | None:
    """Why neither the plan of a checkpoint can be followed here, nor one made from its profile for the workers of
    ``here``; None if one of these can. ``adapt``: the plan may be corrected later.

    Raises Error if ``state`` is not what ``checkpoint_state`` returned.
    """
    try:
        if state.get("version", STATE_VERSION) != STATE_VERSION:  # the first release wrote none
            return "it was saved by another version of gradcast"
        if state["plan"] is None:
            return "it was saved before its plan was made"
        if state["mode"] != mode:
            return f"it was made in {state['mode']} mode, this training is in {mode} mode"
        world_size = len(here.hosts.host_of)
        if state["world_size"] != world_size:
            why = "options.adapt is off, so nothing would correct a plan for other workers" if not adapt else None
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
    """By name of a parameter, what ``checkpoint_state`` was given. Early states name no modules."""
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
