"""What a plan is expected to take and to gain, from the steps that were measured."""

import dataclasses
from unittest import mock

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from training.profiles import compute_steps, profile_of

pytest.importorskip("training.needs")
from gradcast.training.measure.compute_cost import Compute, ComputeFactors, compute_variation, replace_compute
from gradcast.training.plan import agreement, calibration, loop, proposals
from gradcast.training.plan.expectation import StepVariation, expect, typical_step


def test_what_ddp_would_take_has_no_network_beside_its_forward():
    profile, variation = profile_of(200, 100, 10), StepVariation(link=(0.9, 1.1))
    baseline = proposals.baseline_plan(profile)
    alone = expect(profile, _core.make_plan(profile, profile.link), profile, baseline, variation)
    slower = replace_compute(profile, Compute(240e6, 120e6, 12e6))
    beside = expect(slower, _core.make_plan(slower, profile.link), profile, baseline, variation)
    assert beside.gain == pytest.approx(baseline.predicted_ns / _core.make_plan(slower, profile.link).predicted_ns)
    assert beside.gain < alone.gain
    assert beside.low <= beside.gain <= beside.high
    assert beside.compute_share == alone.compute_share


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("first", "last"), "forward reads 2 parameters unseen, before it begins"),
        (("first",), "forward reads 1 parameter unseen, before it begins"),
        ((), None),
    ],
)
def test_what_is_read_unseen_is_named_if_only_that_prevents_a_gain(names, reason):
    profile = profile_of(200, 100, 10)
    profile = profile.replace(tensors=[each.replace(ready_ns=200e6, need_ns=0) for each in profile.tensors])
    plan, baseline = _core.make_plan(profile, profile.link), proposals.baseline_plan(profile)
    said = expect(profile, plan, profile, baseline, StepVariation(), read_first=names)
    assert said.limit < 1.02
    assert said.reason == reason
    assert reason is None or f"but {reason}: expected gain below 2 %" in said.sentence()


@pytest.mark.parametrize(("mode", "baseline_ms"), [("overlap", 100), ("hook", 200)])
def test_the_baseline_is_not_expected_to_have_traffic_beside_its_forward_pass(mode, baseline_ms):
    given = profile_of(200, 100, 10)
    plan = _core.make_plan(given, given.link, mode=mode)
    agreed = agreement.AgreedPlan(given, plan, hold_iterations=7, variation=StepVariation(link=(0.9, 1.1)))
    proposer = proposals.Proposer(mock.Mock(), mode, 3, gradcast.Options())
    steps = calibration.CalibrationSteps(blocks=[], compute=compute_steps([(240, 200, 20)] * 3))
    with mock.patch.object(proposals, "expect", return_value=None) as expect:
        assert proposer.from_calibration(agreed, given, steps).hold_iterations == 7
    profile, _, baseline_profile, _, variation, waiting_share = expect.call_args.args
    assert waiting_share == 0
    assert (profile.backward_ns, profile.forward_ns) == (240e6, 200e6)
    # The baseline has traffic beside its backward pass, too.
    assert (baseline_profile.backward_ns, baseline_profile.forward_ns) == (240e6, 1e6 * baseline_ms)
    assert sum(tensor.update_ns for tensor in baseline_profile.tensors) == 20e6
    assert variation == StepVariation((0.9, 1.1), ((1, 1, 1),) * 4), "the warm-up's, if no block was measured"


def test_steps_scatter_as_their_slowest_ranks_do():
    profile = profile_of(200, 100, 10)
    steps = compute_steps([(250, 110, 10), (200, 120, 5)], disturbed=2)
    steps[3].reverse()
    assert compute_variation(profile, steps) == (
        (1.25, 1.1, 1.0),
        (1.25, 1.1, 1.0),
        (12.5, 11.0, 10.0),
        (1.25, 1.1, 1.0),
    )
    assert compute_variation(profile, []) == ()


def test_the_usual_step_is_the_median_of_the_steps_not_the_step_of_medians():
    """The one block arrives just when forward has come to it: where either is late, the step is."""
    tensors = [
        _core.Tensor(name=name, bytes=12_000_000, ready_ns=ready_ns, need_ns=need_ns)
        for name, ready_ns, need_ns in (("first", 200e6, 0), ("last", 100e6, 96e6))
    ]
    link = link_of(0, 8.0)
    profile = _core.Profile(name="tight", forward_ns=100e6, backward_ns=200e6, tensors=tensors, world_size=2, link=link)
    plan = _core.make_plan(profile, link)
    assert plan.predicted_ns == pytest.approx(396e6), "the first tensor takes 96 ms from the end of backward"
    # Of five steps backward is short in one, long in two, and as it is in the medians otherwise.
    found = tuple(ComputeFactors(backward, 1.0, 1.0) for backward in (0.9, 1.0, 1.0, 1.1, 1.3))
    step_ns, bound_ns = typical_step(profile, plan, found)
    assert step_ns == bound_ns == pytest.approx(396e6)
    assert typical_step(profile, plan, ()) == (plan.predicted_ns, plan.bound_ns)
    # Now the one and now the other takes longer; in the median nothing does.
    found = (
        ComputeFactors(1.1, 1, 1),
        ComputeFactors(1, 3, 1),
        ComputeFactors(1.2, 1, 1),
        ComputeFactors(1, 2, 1),
        ComputeFactors(1, 1, 1),
    )
    once, twice = (typical_step(profile, plan, found, factor) for factor in (1.0, 2.0))
    assert once.step_ns >= once.bound_ns > 1.04 * plan.bound_ns
    assert twice.step_ns > once.step_ns
    baseline = proposals.baseline_plan(profile)
    expected = expect(profile, plan, profile, baseline, StepVariation((1.0, 2.0), found))
    assert expected.plan == once
    assert expected.baseline == typical_step(profile, baseline, found)
    assert expected.gain == expected.baseline.step_ns / once.step_ns
    assert expected.limit == expected.baseline.step_ns / once.bound_ns
    agreed = agreement.AgreedPlan(profile, plan, baseline, expected)
    assert (agreed.typical_step, agreed.in_force) == (expected.plan, plan)
    aside = dataclasses.replace(agreed, runs_as_baseline=True)
    assert (aside.typical_step, aside.in_force) == (expected.baseline, baseline)
    assert dataclasses.replace(agreed, expectation=None).typical_step == (plan.predicted_ns, plan.bound_ns)


def loop_seeing(compute):
    return mock.Mock(meter=mock.Mock(sees_compute=compute, reports=mock.Mock(turns=1)))


def test_where_ddps_way_is_taken_its_own_compute_is_expected():
    """Beside the plan it took twice as long; that it does not now is no change."""
    alone = profile_of(200, 100, 10)
    beside = replace_compute(alone, Compute(400e6, 200e6, 20e6))
    plan, baseline = _core.make_plan(beside, beside.link), proposals.baseline_plan(alone)
    agreed = agreement.AgreedPlan(
        beside, plan, baseline, expect(beside, plan, alone, baseline, StepVariation()), runs_as_baseline=True
    )
    on_host, on_device = (loop_seeing(sees_compute) for sees_compute in (True, False))
    with mock.patch.object(_core, "Monitor") as monitor:
        loop.PlanLoop.new_monitor(on_host, agreed)
        loop.PlanLoop.new_monitor(on_host, dataclasses.replace(agreed, runs_as_baseline=False))
        loop.PlanLoop.new_monitor(on_device, agreed)
    # On a device nobody knows, and nothing is expected.
    assert [call.kwargs["busy_ns"] for call in monitor.call_args_list] == pytest.approx([310e6, 620e6, 0])


def test_further_calls_of_the_optimizer_are_compute_that_is_expected_and_not_of_the_passes():
    profile = profile_of(200, 100, 10).replace(link=link_of(1e5, 24.0))
    plan = _core.make_plan(profile, profile.link)
    profile = profile.replace(part_ns=50e6)
    proposer = proposals.Proposer(mock.Mock(), "overlap", 3, gradcast.Options())
    agreed = proposer._completed(agreement.AgreedPlan(profile, plan))
    assert agreed.further_calls == 1, "so nothing is shown"
    with mock.patch.object(_core, "Monitor") as monitor:
        loop.PlanLoop.new_monitor(loop_seeing(True), agreed)
    assert monitor.call_args.kwargs["busy_ns"] == pytest.approx(360e6)
    same = proposer.from_compute(agreed, 360e6).profile
    assert (same.backward_ns, same.forward_ns) == pytest.approx((200e6, 100e6))
    baseline = dataclasses.replace(agreed, runs_as_baseline=True)
    assert proposer.from_compute(baseline, 310e6).profile.forward_ns == pytest.approx(100e6)
    clips = proposals.Proposer(mock.Mock(), "overlap", 3, gradcast.Options(), lambda _: 0.25)
    assert clips._completed(agreement.AgreedPlan(profile, plan)).further_calls == 0.25


def test_what_is_expected_of_a_plan_that_stays_is_by_its_own_steps():
    profile = profile_of(200, 100, 10)
    plan, baseline = _core.make_plan(profile, profile.link), proposals.baseline_plan(profile)
    expected = [
        expect(profile, plan, profile, baseline, StepVariation(compute=(ComputeFactors(each, each, each),)))
        for each in (1.0, 1.0, 1.2)
    ]
    agreed = agreement.AgreedPlan(profile, plan, baseline, expected[0])
    live, same = mock.Mock(agreed=agreed), _core.Plan.from_json(plan.to_json())
    live.group.baseline, keep_if_confirmed = "DDP", loop.PlanLoop.keep_if_confirmed
    assert keep_if_confirmed(live, dataclasses.replace(agreed, plan=same, expectation=expected[1]))
    live.group.info.assert_not_called()
    assert keep_if_confirmed(live, dataclasses.replace(agreed, plan=same, expectation=expected[2]))
    live.group.info.assert_called_with(live.agreed.expectation.sentence())
    assert live.agreed.typical_step.step_ns == expected[2].plan.step_ns > expected[0].plan.step_ns
    assert live.agreed.plan is plan, "the object by which steps that followed it are found"
    assert not keep_if_confirmed(live, dataclasses.replace(agreed, profile=profile_of(200, 100, 20)))
    assert not keep_if_confirmed(live, dataclasses.replace(agreed, runs_as_baseline=True))
    for other in (baseline, _core.make_plan(profile, profile.link, mode="hook")):
        assert not keep_if_confirmed(live, dataclasses.replace(agreed, plan=other))


def test_a_checkpoint_keeps_what_a_part_of_the_optimizers_step_costs():
    def proposer():
        return proposals.Proposer(mock.Mock(), "overlap", 3, gradcast.Options())

    free = profile_of(200, 100, 10).replace(link=link_of(1e5, 24.0))
    profile = free.replace(part_ns=5e6)
    plan = _core.make_plan(free, free.link)
    saved = proposer()._completed(agreement.AgreedPlan(profile, plan))
    state = agreement.checkpoint_state(saved, profile, "overlap", {})
    loaded = proposer().from_checkpoint(state)
    assert loaded.expectation == saved.expectation
    assert loaded.expectation.plan.step_ns > loaded.plan.predicted_ns
    assert loaded.profile.part_ns == 5e6
    with mock.patch.object(proposals.other_workers, "for_workers", side_effect=lambda profile, here: profile):
        assert proposer().for_workers(profile, mock.Mock()).profile.part_ns == 5e6
    early = state | {"layout": free.to_json(), "call_ns": 5e6}
    assert proposer().from_checkpoint(early).expectation == saved.expectation
