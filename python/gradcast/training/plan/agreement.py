"""From measurements to the plan that all ranks follow.

Rank 0 decides, everybody checks: ranks that follow different plans average the wrong bytes without an error.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.errors import Error
from gradcast.files import load_plan, plan_hash
from gradcast.training.options import Options
from gradcast.training.plan import measured_profile
from gradcast.training.plan.expectation import Expectation, UsualStep
from gradcast.training.ranks.group import Group
from gradcast.training.step.active_plan import ActivePlan
from gradcast.training.step.gradient_buffers import Sizes

_MIB = 1 << 20
# DDP's own cap, then smaller ones: warm-up costs little more than DDP, and the link model gets blocks of different
# sizes, measured while the cores are as busy as in training, which an idle probe would miss (docs/training.md).
_CAP_MAX_BYTES = 25 * _MIB
_CAP_MIN_BYTES = 16 * 1024
_CAP_SHARES = (1, 1, 4, 16, 2, 64)
# A packed block needs memory and time that a model knows only roughly. It has to promise more than noise.
_NEVER_PACK_NS_PER_BYTE = 1e6
_PACKING_GAIN = 1.02
# A measured start-up cost may be too low by much, even 0, and a plan of many blocks pays for that with each. So of
# the plans that are nearly the best, the one with the fewest blocks.
_FEWER_BLOCKS = {_core.DEFAULT_POLICY: {"block_tolerance": 0.005}}
_PLAIN_TOLERANCE = 0.002


@dataclasses.dataclass(frozen=True)
class Proposal:
    """What rank 0 wants all ranks to follow, as JSON texts. ``plain``: the plan to compare with, as DDP would send."""

    profile: str
    plan: str
    plain: str | None = None
    expectation: Expectation | None = None
    hold_iterations: int = 0  # for so long nothing is to be measured again


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all ranks follow. ``profile`` has the tensors in the buffers' order, ``order`` their parameters' indices.
    ``steps_aside``: they follow ``plain``, since the plan gains too little."""

    profile: _core.Profile
    plan: _core.Plan
    order: tuple[int, ...]
    plain: _core.Plan | None = None
    expectation: Expectation | None = None
    runs_as_baseline: bool = False
    hold_iterations: int = 0

    @property
    def in_force(self) -> _core.Plan:
        return self.plain if self.runs_as_baseline else self.plan

    def active(self, *, baseline: bool) -> ActivePlan:
        """What an iteration follows: the plan, or the DDP baseline."""
        return ActivePlan(self.profile, self.plain if baseline else self.plan, self.order)

    @property
    def usual(self) -> UsualStep:
        """With the plan in force."""
        if self.expectation is None:
            return UsualStep(self.plan.predicted_ns, self.plan.bound_ns)
        return self.expectation.plain if self.runs_as_baseline else self.expectation.plan


def warmup_plans(profile: _core.Profile, mode: str) -> list[_core.Plan]:
    """Plain plans, DDP's buckets from the last tensor to the first, of several sizes."""
    total = sum(tensor.bytes for tensor in profile.tensors)
    link = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1, beta_ns_per_byte=1)])
    plans = []
    for share in _CAP_SHARES:
        cap = max(_CAP_MIN_BYTES, min(_CAP_MAX_BYTES, total // share))
        parameters = {"first_bytes": min(cap, _MIB) if share == 1 else cap, "cap_bytes": cap}
        plans.append(_core.make_plan(profile, link, policy="ddp", mode=mode, parameters=parameters))
    return plans


def decide(profile: _core.Profile, mode: str, options: Options) -> _core.Plan:
    """Rank 0's plan of the measured profile."""
    plan = _plan(profile, profile.link, mode, options)
    if any(len(block.ranges) > 1 for block in plan.blocks):
        link = json.loads(profile.link.to_json()) | {"pack_ns_per_byte": _NEVER_PACK_NS_PER_BYTE}
        in_place = _plan(profile, _core.LinkModel.from_json(json.dumps(link)), mode, options)
        if in_place.predicted_ns <= plan.predicted_ns * _PACKING_GAIN:
            plan = in_place
    return plan


def plain_plan(profile: _core.Profile) -> _core.Plan:
    """DDP's way, with the bucket sizes that are best on this profile; of those that are nearly the best the ones that
    make the fewest buckets. Compared as if buckets went one after the other: `play` hides the start-up cost of one
    behind another in flight, and busy hosts do not (docs/benchmarks.md). REQUIRES: it has a link."""
    found = [(ddp_baseline.plan(profile, caps, in_flight=1), caps) for caps in ddp_baseline.TUNED_CAPS_BYTES]
    near_ns = (1 + _PLAIN_TOLERANCE) * min(plan.predicted_ns for plan, _ in found)
    near = [each for each in found if each[0].predicted_ns <= near_ns]
    _, caps_bytes = min(near, key=lambda each: (len(each[0].blocks), each[0].predicted_ns))
    return ddp_baseline.plan(profile, caps_bytes)


def _plan(profile: _core.Profile, link: _core.LinkModel, mode: str, options: Options) -> _core.Plan:
    return _core.make_plan(
        profile,
        link,
        policy=options.policy,
        mode=mode,
        in_flight=options.in_flight,
        parameters=_FEWER_BLOCKS.get(options.policy, {}) | dict(options.policy_parameters),
    )


def pinned(path: str, names: Sequence[str], sizes: Sizes, mode: str, world_size: int) -> Proposal:
    """A plan file and the layout that it was made for; raises for another model's."""
    plan, fields = load_plan(path)
    note = fields.get("made_with")
    tensors = note.get("tensors") if isinstance(note, dict) else None
    if not isinstance(tensors, list):
        raise Error(
            f"{path} does not note the order of its tensors (made_with.tensors); make it with handle.save_plan() or, "
            "from the file of handle.save_profile(), with `gradcast plan`",
            "invalid_plan",
        )
    if sorted(map(str, tensors)) != sorted(names):
        differing = sorted(set(map(str, tensors)) ^ set(names))
        raise Error(f"{path} is a plan for another model: only one of the two has {differing[0]}", "invalid_plan")
    if plan.mode != mode:
        raise Error(f"{path} is a plan for {plan.mode} mode; this training is in {mode} mode", "invalid_plan")
    index_of = {name: index for index, name in enumerate(names)}
    order = [index_of[name] for name in tensors]
    profile = measured_profile.layout_profile(names, sizes, order, world_size=world_size, name="pinned")
    plan.check(profile)
    if note.get("hash") != plan_hash(plan, profile):
        raise Error(f"{path} is a plan for tensors of other sizes or types; make it again", "invalid_plan")
    return Proposal(profile.to_json(), plan.to_json())


def saved(agreed: Agreed, profile: _core.Profile | None, mode: str, unseen_reads: Sequence[str]) -> dict[str, Any]:
    """For a checkpoint: strings and numbers. Without a profile there is nothing yet that is worth keeping.

    ``unseen_reads``: see measure.Stopwatch, names."""
    state: dict[str, Any] = {"mode": mode, "world_size": agreed.profile.world_size, "profile": None, "plan": None}
    if profile is not None:
        # The plan's own profile has its layout; a pinned plan's carries nothing else.
        state |= {"profile": profile.to_json(), "layout": agreed.profile.to_json(), "plan": agreed.plan.to_json()}
        state["unseen_reads"] = list(unseen_reads)
    return state


def reason_to_measure(
    state: dict[str, Any], names: Sequence[str], sizes: Sizes, mode: str, world_size: int
) -> str | None:
    """Why what a checkpoint holds cannot be followed here; None where it can."""
    try:
        if state["plan"] is None:
            return "it was saved before its plan was made"
        if state["mode"] != mode:
            return f"it is of {state['mode']} mode, this is {mode} mode"
        if state["world_size"] != world_size:
            return f"it is of {state['world_size']} workers, these are {world_size}"
        layout = _core.Profile.from_json(state["layout"])
        found = {tensor.name: (tensor.bytes, tensor.buffer) for tensor in layout.tensors}
        own = {name: (sizes.bytes_of(index), sizes.buffer_of[index]) for index, name in enumerate(names)}
        if found != own:
            differing = sorted(name for name in {*found, *own} if found.get(name) != own.get(name))
            return f"it is of another model: {differing[0]} differs"
        if not own.keys() >= set(state["unseen_reads"]):
            raise KeyError("unseen_reads")
    except (KeyError, TypeError) as error:
        raise Error(f"this is not what handle.state_dict() returned: {error!r}", "invalid_use") from None
    return None


def agree(group: Group, names: Sequence[str], proposal: Proposal | Error | None) -> Agreed:
    """Rank 0's proposal, checked by every rank; those of others are not heard. Raises the same error on every rank if
    it does not hold on one."""
    proposal = group.from_first(proposal)
    if isinstance(proposal, Error):
        raise proposal
    profile = _core.Profile.from_json(proposal.profile)
    plan = _core.Plan.from_json(proposal.plan)
    plain = None if proposal.plain is None else _core.Plan.from_json(proposal.plain)
    try:
        answer = ""
        for each in (plan, plain):
            if each is not None:
                each.check(profile)
                answer += f" {plan_hash(each, profile)}"
    except Error as error:
        answer = f" refused: {error}"
    answers = group.gather(answer)
    for rank, other in enumerate(answers):
        if other != answers[0] or other.startswith(" refused"):
            raise Error(
                f"the ranks do not agree on the plan: rank 0 has{answers[0]}, rank {rank} has{other}", "invalid_plan"
            )
    index_of = {name: index for index, name in enumerate(names)}
    order = tuple(index_of[tensor.name] for tensor in profile.tensors)
    expectation = proposal.expectation
    runs_as_baseline = expectation is not None and not expectation.is_worth_trying
    return Agreed(profile, plan, order, plain, expectation, runs_as_baseline, proposal.hold_iterations)


def plan_text(plan: _core.Plan, profile: _core.Profile, profile_path: str | None) -> str:
    """A plan file that names the order of its tensors, and its profile's file where there is one."""
    fields = json.loads(plan.to_json())
    note = {"hash": plan_hash(plan, profile), "tensors": [tensor.name for tensor in profile.tensors]}
    if profile_path is not None:
        note["profile"] = profile_path
    if profile.link is not None:
        note["network"] = "the measured network"
        note["link"] = json.loads(profile.link.to_json())
    return json.dumps({**fields, "made_with": note}, indent=1) + "\n"
