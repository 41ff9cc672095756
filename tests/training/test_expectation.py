"""What a plan is expected to take and to gain, from the steps that were measured."""

import dataclasses
from unittest import mock

import pytest

import gradcast
import training.needs  # noqa: F401, skips where there is no torch
from gradcast import _core
from training.profiles import compute_steps, linear, profile_of


def test_what_ddp_would_take_has_no_network_beside_its_forward():
    from gradcast.training.measure.compute_cost import Compute, with_compute
    from gradcast.training.plan import agreement
    from gradcast.training.plan.expectation import StepVariation, expect

    profile, scatter = profile_of(200, 100, 10), StepVariation(link=(0.9, 1.1))
    plain = agreement.plain_plan(profile)
    alone = expect(profile, _core.make_plan(profile, profile.link), profile, plain, scatter)
    slower = with_compute(profile, Compute(240e6, 120e6, 12e6))
    beside = expect(slower, _core.make_plan(slower, profile.link), profile, plain, scatter)
    assert beside.gain == pytest.approx(plain.predicted_ns / _core.make_plan(slower, profile.link).predicted_ns)
    assert beside.gain < alone.gain
    assert beside.low <= beside.gain <= beside.high
    assert beside.compute_share == alone.compute_share


@pytest.mark.parametrize(("mode", "plain_ms"), [("overlap", 100), ("hook", 200)])
def test_a_forward_pass_beside_the_network_is_not_expected_of_ddp(mode, plain_ms):
    from gradcast.training.plan import calibration, controller
    from gradcast.training.plan.agreement import Proposal
    from gradcast.training.plan.expectation import StepVariation

    given = profile_of(200, 100, 10)
    plan = _core.make_plan(given, given.link, mode=mode)
    live = mock.Mock(
        profile=given, in_force=plan, _mode=mode, _options=gradcast.Options(), scatter=StepVariation(link=(0.9, 1.1))
    )
    live._proposal.return_value = Proposal(given.to_json(), plan.to_json())
    live.agreed.hold_iterations = 7
    found = calibration.Found(blocks=[], compute=compute_steps([(240, 200, 20)] * 3))
    assert controller.PlanController._calibrated(live, found).hold_iterations == 7
    profile, _, scatter, plain_profile = live._proposal.call_args.args
    assert (profile.backward_ns, profile.forward_ns) == (240e6, 200e6)
    # DDP has the network beside its backward pass, too.
    assert (plain_profile.backward_ns, plain_profile.forward_ns) == (240e6, 1e6 * plain_ms)
    assert sum(tensor.update_ns for tensor in plain_profile.tensors) == 20e6
    assert scatter == StepVariation((0.9, 1.1), ((1, 1, 1),) * 4), "the warm-up's, where no block was measured"


def test_steps_scatter_as_their_slowest_ranks_do():
    from gradcast.training.measure.compute_cost import scatter

    profile = profile_of(200, 100, 10)
    steps = compute_steps([(250, 110, 10), (200, 120, 5)], disturbed=2)
    steps[3].reverse()
    assert scatter(profile, steps) == ((1.25, 1.1, 1.0), (1.25, 1.1, 1.0), (12.5, 11.0, 10.0), (1.25, 1.1, 1.0))
    assert scatter(profile, []) == ()


def test_the_usual_step_is_the_median_of_the_steps_not_the_step_of_medians():
    """The one block arrives just when forward has come to it: where either is late, the step is."""
    from gradcast.training.measure.compute_cost import Shares
    from gradcast.training.plan import agreement
    from gradcast.training.plan.expectation import StepVariation, expect, usual

    tensors = [
        _core.Tensor(name=name, bytes=12_000_000, ready_ns=ready_ns, need_ns=need_ns)
        for name, ready_ns, need_ns in (("first", 200e6, 0), ("last", 100e6, 96e6))
    ]
    link = linear(0, 8.0)
    profile = _core.Profile(name="tight", forward_ns=100e6, backward_ns=200e6, tensors=tensors, world_size=2, link=link)
    plan = _core.make_plan(profile, link)
    assert plan.predicted_ns == pytest.approx(396e6), "the first tensor takes 96 ms from the end of backward"
    # Of five steps backward is short in one, long in two, and as it is in the medians otherwise.
    found = tuple(Shares(backward, 1.0, 1.0) for backward in (0.9, 1.0, 1.0, 1.1, 1.3))
    step_ns, bound_ns = usual(profile, plan, found)
    assert step_ns == bound_ns == pytest.approx(396e6)
    assert usual(profile, plan, ()) == (plan.predicted_ns, plan.bound_ns)
    # Now the one and now the other takes longer; in the median nothing does.
    found = (Shares(1.1, 1, 1), Shares(1, 3, 1), Shares(1.2, 1, 1), Shares(1, 2, 1), Shares(1, 1, 1))
    once, twice = (usual(profile, plan, found, factor) for factor in (1.0, 2.0))
    assert once.step_ns >= once.bound_ns > 1.04 * plan.bound_ns
    assert twice.step_ns > once.step_ns
    plain = agreement.plain_plan(profile)
    expected = expect(profile, plan, profile, plain, StepVariation((1.0, 2.0), found))
    assert expected.plan == once
    assert expected.plain == usual(profile, plain, found)
    assert expected.gain == expected.plain.step_ns / once.step_ns
    assert expected.limit == expected.plain.step_ns / once.bound_ns
    agreed = agreement.Agreed(profile, plan, (0, 1), plain, expected)
    assert (agreed.usual, agreed.in_force) == (expected.plan, plan)
    aside = dataclasses.replace(agreed, runs_as_baseline=True)
    assert (aside.usual, aside.in_force) == (expected.plain, plain)
    assert dataclasses.replace(agreed, expectation=None).usual == (plan.predicted_ns, plan.bound_ns)


def test_where_ddps_way_is_taken_its_own_compute_is_expected():
    """Beside the plan it took twice as long; that it does not now is no change."""
    from gradcast.training.measure.compute_cost import Compute, with_compute
    from gradcast.training.plan import agreement, controller
    from gradcast.training.plan.expectation import StepVariation, expect

    alone = profile_of(200, 100, 10)
    beside = with_compute(alone, Compute(400e6, 200e6, 20e6))
    plan, plain = _core.make_plan(beside, beside.link), agreement.plain_plan(alone)
    agreed = agreement.Agreed(
        beside, plan, (0, 1), plain, expect(beside, plan, alone, plain, StepVariation()), runs_as_baseline=True
    )
    live = mock.Mock(in_force=plain, _sees_compute=True)
    on_device = mock.Mock(in_force=plain, _sees_compute=False)
    with mock.patch.object(_core, "Monitor") as monitor:
        controller.PlanController._new_monitor(live, agreed)
        controller.PlanController._new_monitor(live, dataclasses.replace(agreed, runs_as_baseline=False))
        controller.PlanController._new_monitor(on_device, agreed)
    # On a device nobody knows, and nothing is expected.
    assert [call.kwargs["busy_ns"] for call in monitor.call_args_list] == pytest.approx([310e6, 620e6, 0])


def test_what_is_expected_of_a_plan_that_stays_is_by_its_own_steps():
    from gradcast.training.measure.compute_cost import Shares
    from gradcast.training.plan import agreement, controller
    from gradcast.training.plan.expectation import StepVariation, expect

    profile = profile_of(200, 100, 10)
    plan, plain = _core.make_plan(profile, profile.link), agreement.plain_plan(profile)
    expected = [
        expect(profile, plan, profile, plain, StepVariation(compute=(Shares(each, each, each),)))
        for each in (1.0, 1.0, 1.2)
    ]
    agreed = agreement.Agreed(profile, plan, (0, 1), plain, expected[0])
    live = mock.Mock(agreed=agreed)
    controller.PlanController._stay_with(live, dataclasses.replace(agreed, plan=plain, expectation=expected[1]))
    live._describe.assert_not_called()
    controller.PlanController._stay_with(live, dataclasses.replace(agreed, plan=plain, expectation=expected[2]))
    live._describe.assert_called_once()
    assert live.agreed.usual.step_ns == expected[2].plan.step_ns > expected[0].plan.step_ns
    assert live.agreed.plan is plan, "by which steps are told that followed it"
