"""Which plan is followed when steps differ: never a worse one, and the usual one when they do not."""

import statistics

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from gradcast.files import load_profile

pytest.importorskip("training.needs")
from gradcast.training.measure.compute_cost import ComputeFactors
from gradcast.training.measure.network_cost import Sample
from gradcast.training.plan import agreement, calibration, candidates, proposals
from gradcast.training.plan.expectation import StepVariation, typical_step

OPTIONS = gradcast.Options()
SCATTERED = tuple(ComputeFactors(backward, forward, 1.0) for backward in (0.9, 1.0, 1.1) for forward in (0.9, 1.0, 1.1))
# Steps that no choice has seen: between and beyond those it is made for.
UNSEEN = tuple(ComputeFactors(1.9 - each, each, 1.0) for each in (0.85, 0.95, 1.05))


def on_link(name, ratio):
    """A bundled profile on a link on which communication takes ``ratio`` times as long as compute."""
    profile = load_profile(name)
    beta = ratio * (profile.backward_ns + profile.forward_ns) / sum(tensor.bytes for tensor in profile.tensors)
    return profile.replace(link=link_of(1e6, beta))


def mean_step_ns(profile, plan, steps, links):
    return statistics.fmean(typical_step(profile, plan, steps, factor).step_ns for factor in links)


def best_and_usual(profile, variation, mode="overlap"):
    return (
        candidates.best_for_steps(profile, (mode,), variation, OPTIONS),
        candidates.choose_plan(profile, mode, OPTIONS),
    )


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize(
    "variation", [StepVariation(), StepVariation((0.98, 1.02), (ComputeFactors(1.01, 0.99, 1.0),) * 8)]
)
def test_steady_steps_follow_the_plan_for_the_profile(mode, variation):
    for name in ("resnet50", "vgg16", "gpt2", "bert_base"):
        for ratio in (0.5, 1.0, 2.0):
            best, usual = best_and_usual(on_link(name, ratio), variation, mode)
            assert best == usual, (name, ratio)


def test_steps_that_differ_get_a_plan_that_is_shorter_in_other_such_steps_too():
    variation, gains = StepVariation((0.8, 1.25), SCATTERED), {}
    for name in ("resnet50", "vgg16", "bert_base"):
        for ratio in (0.7, 1.0, 1.5):
            profile = on_link(name, ratio)
            best, usual = best_and_usual(profile, variation)
            assert best.predicted_ns == pytest.approx(_core.play(profile, profile.link, best).iteration_ns)
            assert best.bound_ns == pytest.approx(usual.bound_ns)
            unseen = [mean_step_ns(profile, plan, UNSEEN, (0.85, 1.0, 1.15)) for plan in (best, usual)]
            gains[name, ratio] = unseen[1] / unseen[0]
    assert min(gains.values()) >= 1.0
    assert statistics.fmean(gains.values()) > 1.01


def test_the_present_plan_stays_unless_another_is_better_by_a_margin():
    profile, variation = on_link("vgg16", 1.5), StepVariation((0.8, 1.25), SCATTERED)
    best, usual = best_and_usual(profile, variation)
    assert best != usual
    for present, expected in ((usual, best), (best, best)):
        assert candidates.best_for_steps(profile, ("overlap",), variation, OPTIONS, present=present) == expected
    assert candidates.best_for_steps(profile, ("overlap",), StepVariation(), OPTIONS, present=usual) == usual


def test_a_plan_has_fewer_parts_where_each_call_of_the_optimizer_costs():
    free, parts = on_link("gpt2", 1.0), []
    usual = candidates.choose_plan(free, "overlap", OPTIONS)
    for part_ns in (0.0, 1e6, 20e6):
        profile = free.replace(part_ns=part_ns)
        best = candidates.best_for_steps(profile, ("overlap",), StepVariation(), OPTIONS)
        played = _core.play(profile, profile.link, best)
        parts.append(played.parts)
        assert typical_step(profile, best, ()).step_ns == best.predicted_ns == played.iteration_ns
        assert best.bound_ns <= best.predicted_ns <= typical_step(profile, usual, ()).step_ns
    assert parts[0] >= parts[1] > parts[2]


@pytest.mark.parametrize("scatter", [0.0, 0.25])
def test_a_confirmed_profile_whose_blocks_scatter_gets_another_plan(scatter):
    """``scatter``: of single blocks, around the times of the profile."""
    profile = on_link("vgg16", 1.5)
    plan = candidates.choose_plan(profile, "overlap", OPTIONS)
    factors = (1 - scatter, 1.0, 1 + scatter, 1.0)
    blocks = [
        [
            Sample(
                block.size_bytes, factors[(step + number) % 4] * profile.link.all_reduce.cost_ns(block.size_bytes), True
            )
            for number, block in enumerate(plan.blocks)
        ]
        for step in range(8)
    ]
    proposer = proposals.Proposer(None, "overlap", 2, OPTIONS)
    agreed = agreement.AgreedPlan(profile, plan)
    proposal = proposer.from_calibration(agreed, profile, calibration.CalibrationSteps(blocks, compute=[]))
    assert proposal.profile == profile
    assert (proposal.plan == plan) == (scatter == 0)
