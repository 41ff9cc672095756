"""Candidate plans for a measured profile, and the choice between them by how they do in the measured steps."""

import statistics
from collections.abc import Callable, Sequence

from gradcast import _core
from gradcast.comparison.compare import NOTICEABLE_GAIN, has_other_ops, link_of
from gradcast.training.options import Options
from gradcast.training.plan import measured_profile
from gradcast.training.plan.expectation import StepVariation, step_profiles, typical_of

# Makes a plan of packed blocks more expensive than any other.
_NEVER_PACK_NS_PER_BYTE = 1e6
# The docstring of Options says why.
_FEWER_BLOCKS = {_core.DEFAULT_POLICY: {"block_tolerance": 0.005}}
# Plans for a network that costs so many times what was measured leave more or less room for blocks that come late.
_OTHER_LINKS = (0.8, 0.9, 1.1, 1.2)
# Another plan has to promise so much, because the steps of the next hour are not those that were measured.
_BETTER_SHARE = 0.015


def best_for_steps(
    profile: _core.Profile,
    modes: Sequence[str],
    variation: StepVariation,
    options: Options,
    waiting_share: Callable[[_core.Plan], float] = lambda _: 0.0,
    present: _core.Plan | None = None,
) -> _core.Plan:
    """The candidate with the shortest steps, if they vary as much as those that were measured (``variation``).

    A plan for medians lets a block arrive just when it is needed. What a late block holds up then depends on the plan:
    a large one that carries what forward reads first costs more than a small one.

    ``modes``: that a plan may have. ``waiting_share``: see typical_step. ``present``: stays unless a candidate is
    better by a margin; by default the best plan for the profile itself.
    """

    steps = step_profiles(profile, variation.compute)
    own = link_of(profile)
    links = [own.scaled(factor, factor) for factor in (1.0, *variation.link)]

    def step_ns(plan: _core.Plan) -> float:
        share = waiting_share(plan)
        return statistics.fmean(typical_of(steps, link, plan, share).step_ns for link in links)

    present = present or min((choose_plan(profile, mode, options) for mode in modes), key=step_ns)
    others = [profile.replace(link=own.scaled(each, each)) for each in _OTHER_LINKS]
    candidates = [choose_plan(each, mode, options) for each in others for mode in modes]
    best = min(candidates, key=step_ns)
    return _predicted(profile, best) if step_ns(best) <= (1 - _BETTER_SHARE) * step_ns(present) else present


def choose_plan(profile: _core.Profile, mode: str, options: Options) -> _core.Plan:
    """A plan for a measured profile.

    A model knows only roughly what time and memory a packed block needs. So packed blocks have to promise a noticeable
    gain over a plan without any.
    """
    own = link_of(profile)
    plan = _made_plan(profile, own, mode, options)
    if any(len(block.ranges) > 1 for block in plan.blocks):
        pieces = {op: getattr(own, op).pieces for op in ("all_reduce", "reduce_scatter", "all_gather")}
        unpacked_link = _core.LinkModel(**pieces, pack_ns_per_byte=_NEVER_PACK_NS_PER_BYTE)
        unpacked = _made_plan(profile, unpacked_link, mode, options)
        if unpacked.predicted_ns <= plan.predicted_ns * (1 + NOTICEABLE_GAIN):
            plan = unpacked
    return plan


def _made_plan(profile: _core.Profile, link: _core.LinkModel, mode: str, options: Options) -> _core.Plan:
    if options.plan.policy != _core.DEFAULT_POLICY:
        profile = measured_profile.with_message_joined(profile)
    return _core.make_plan(
        profile,
        link,
        policy=options.plan.policy,
        mode=mode,
        in_flight=options.plan.in_flight,
        parameters=_FEWER_BLOCKS.get(options.plan.policy, {}) | dict(options.plan.policy_parameters),
    )


def _predicted(profile: _core.Profile, plan: _core.Plan) -> _core.Plan:
    """A plan that was made for another link, with the times and bounds of the profile's own."""
    own = link_of(profile)
    played = _core.play(profile, own, plan)
    any_op = has_other_ops(plan)
    bound = _core.bound(profile, own, mode=plan.mode, in_flight=plan.in_flight, any_op=any_op)
    blocks = [
        block.replace(start_ns=times.launch_ns, finish_ns=times.finish_ns)
        for block, times in zip(plan.blocks, played.blocks, strict=True)
    ]
    return plan.replace(
        blocks=blocks, predicted_ns=played.iteration_ns, bound_ns=bound.best_ns, plain_bound_ns=bound.plain_ns
    )
