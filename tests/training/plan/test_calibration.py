"""A new plan is held against its own first steps, and made again where the network or compute takes something else."""

from unittest import mock

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from training.needs import torch
from training.plan.test_adapt import WARMUP_STEPS, train_both
from training.profiles import compute_steps, profile_of

pytest.importorskip("training.needs")
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.compute_cost import Compute, compute_of, replace_compute
from gradcast.training.measure.network_cost import Sample
from gradcast.training.measure.step_trace import Stamp, StepRecord
from gradcast.training.measure.stopwatch import Measurement
from gradcast.training.plan import calibration, candidates, measured_profile, proposals
from gradcast.training.plan.calibration import Calibration, corrected_compute, planned_busy_periods_ns
from gradcast.training.step.gradient_buffers import GradientSizes

CALIBRATION_STEPS = 9


def measured_by(*compute_ms):
    """One rank's warm-up of a tensor: backward, forward and update in ms per step, None where it has failed."""
    steps = [None if each is None else Compute(*(1e6 * ms for ms in each)) for each in compute_ms]
    return Measurement([1e6], [0.0], steps, [[Sample(100, 1e6)]], pack_ns_per_byte=0.0)


ONE_TENSOR = GradientSizes(["only"], [torch.empty(24)])


@pytest.mark.parametrize(
    ("ranks", "times_ms"),
    [
        # The slowest of each step, now the one and now the other.
        ([[(20, 10, 1), (10, 10, 1), (20, 10, 1)], [(10, 10, 1), (22, 12, 1), (10, 10, 1)]], (20, 10, 1)),
        # A step that one rank lacks says nothing.
        ([[(20, 10, 1), None, (30, 10, 1)], [(10, 10, 1), (90, 90, 1), (40, 20, 3)]], (30, 15, 2)),
        # No step of all: the usual one of each rank.
        ([[None, (20, 10, 1)], [(30, 20, 3), None]], (30, 15, 2)),
    ],
)
def test_a_measured_step_is_as_long_as_on_its_slowest_rank(ranks, times_ms):
    profile = measured_profile.combine_measurements([measured_by(*each) for each in ranks], ONE_TENSOR)
    times_ns = profile.backward_ns, profile.forward_ns, profile.tensors[0].update_ns
    assert times_ns == pytest.approx([1e6 * ms for ms in times_ms])


def test_a_rank_of_which_no_step_is_known_is_an_error_that_all_hear():
    with pytest.raises(gradcast.Error, match="no step could be measured, because backward failed in each of them"):
        measured_profile.combine_measurements([measured_by((20, 10, 1)), measured_by(None)], ONE_TENSOR)


@pytest.mark.parametrize("pack_ns_per_byte", [0.0, 1.5])
def test_what_packing_takes_is_not_the_networks(pack_ns_per_byte):
    whole = mock.Mock(size_bytes=4_000_000, ranges=[(0, 4_000_000)])
    packed = mock.Mock(size_bytes=2_000_000, ranges=[(0, 1_000_000), (5_000_000, 6_000_000)])
    calibration = Calibration(mock.Mock(blocks=[whole, packed], in_flight=1), pack_ns_per_byte)
    times = [(0, 0, 8e6), (1e6, 8e6, 15e6)]
    blocks = [mock.Mock(ready_ns=ready, due_ns=due, finish_ns=finish, device_ns=0) for ready, due, finish in times]
    for _ in range(CALIBRATION_STEPS):
        calibration.add_step(mock.Mock(blocks=blocks), None)
    found = calibration.gather(mock.Mock(computed_by_each=lambda compute, what: [compute()] * 2)).blocks
    assert found[0] == [(4_000_000, 8e6, False), (2_000_000, 7e6 - 2_000_000 * pack_ns_per_byte, True)]


@pytest.mark.parametrize("alpha_ns", [1e5, 1e6, 4e6])
@pytest.mark.parametrize("baseline", [False, True])
def test_a_link_on_which_all_goes_as_play_says_is_right(alpha_ns, baseline):
    profile = even_profile(link_of(alpha_ns, 2.0))
    plan = (
        proposals.baseline_plan(profile) if baseline else candidates.choose_plan(profile, "overlap", gradcast.Options())
    )
    assert plan.in_flight == (2 if baseline else 1)
    calibration = Calibration(plan, pack_ns_per_byte=0)
    played = [
        mock.Mock(ready_ns=block.ready_ns, due_ns=block.launch_ns, finish_ns=block.finish_ns, device_ns=0)
        for block in _core.play(profile, profile.link, plan).blocks
    ]
    for _ in range(CALIBRATION_STEPS):
        calibration.add_step(mock.Mock(blocks=played), None)
    found = calibration.gather(mock.Mock(computed_by_each=lambda compute, what: [compute()] * 2))
    assert len(found.blocks) == CALIBRATION_STEPS - 1
    shared_ns = sum(planned_busy_periods_ns(plan, profile)) if baseline else None
    assert network_cost.corrected_link(profile.link, found.blocks, shared_ns=shared_ns) is None


def even_profile(link):
    tensors = [
        _core.Tensor(name=str(i), bytes=1 << 20, ready_ns=1e7 * (8 - i), need_ns=1e7 * i, update_ns=0) for i in range(8)
    ]
    return _core.Profile(name="even", forward_ns=8e7, backward_ns=8e7, tensors=tensors, world_size=2, link=link)


def test_the_network_is_busy_while_some_block_is_on_it():
    from gradcast.intervals import busy_periods_ns

    assert busy_periods_ns([(10, 30), (35, 50), (50, 60)]) == [20, 25], "one after the other"
    # The second one begins beside the first, the third ends before it, the last one comes when all is quiet.
    assert busy_periods_ns([(10, 30), (31, 55), (15, 60), (70, 75)]) == [50, 5]
    assert busy_periods_ns([]) == []


def test_compute_that_is_right_stays():
    profile = profile_of(200, 100, 10)
    assert corrected_compute(profile, compute_steps([(205, 102, 9), (190, 101, 9), (190, 99, 9)])) is None
    assert corrected_compute(profile, []) is None


def test_compute_beside_a_plan_is_that_of_each_steps_slowest_rank():
    profile = profile_of(200, 100, 10)
    steps = compute_steps([(250, 125, 13), (210, 120, 12), (230, 130, 20)], disturbed=1)
    steps[2].reverse()
    steps[3].append(Compute(260e6, 150e6, 13e6))
    found = corrected_compute(profile, steps)
    assert found == Compute(255e6, 137.5e6, 13e6)
    found = Compute(250e6, 125e6, 13e6)
    stretched = replace_compute(profile, found)
    assert (stretched.backward_ns, stretched.forward_ns) == (250e6, 125e6)
    assert [tensor.ready_ns for tensor in stretched.tensors] == [250e6, 125e6]
    assert [tensor.need_ns for tensor in stretched.tensors] == [0, 62.5e6]
    assert [tensor.update_ns for tensor in stretched.tensors] == [3.25e6, 9.75e6]
    assert stretched.link == profile.link
    # In the other direction, too; and where there is no update there is none afterwards.
    assert corrected_compute(profile, compute_steps([(100, 100, 10)] * 3)) == Compute(100e6, 100e6, 10e6)
    assert replace_compute(profile_of(200, 100, 0), found).tensors[0].update_ns == 0


def test_what_a_step_computed_is_what_it_did_not_wait():
    record = StepRecord(3, 3, None, None, 100)
    record.spans += [("backward", 100, 160), ("wait", 160, 170), ("update", 170, 175), ("update", 190, 195)]
    assert compute_of(record, busy_ns=130) == Compute(60, 60, 10)
    assert compute_of(record, busy_ns=50) == Compute(50, 0, 10), "backward has waited, too"


@pytest.mark.parametrize(
    ("backward_ends", "expected"), [(160, Compute(60, 70, 0)), (300, Compute(130, 0, 0)), (100, None), (90, None)]
)
def test_device_stamps_leave_backward_between_nothing_and_the_step(backward_ends, expected):
    clock = mock.Mock(between=lambda start, end: float(end - start))
    start, stop, end, resumed, next_start = (Stamp.at(0, each) for each in (100, backward_ends, 200, 220, 250))
    record = StepRecord(3, 3, None, None, start, spans=[("backward", start, stop), ("wait", end, resumed)])
    assert compute_cost.device_compute_of(record, next_start, clock, 0.0) == expected


def train(rank, mode, link_factor, compute_factor=None):
    link = mock.Mock(
        side_effect=lambda link, _, shared_ns, known_saving_ns: link_factor and link.scaled(link_factor, link_factor)
    )

    def stretched(profile, steps):
        for step in steps:
            assert len(step) == 2
            assert all(min(each.backward_ns, each.forward_ns) > 0 for each in step)
        update_ns = sum(tensor.update_ns for tensor in profile.tensors)
        times = (profile.backward_ns, profile.forward_ns, update_ns)
        return compute_factor and compute_cost.Compute(*(compute_factor * time for time in times))

    compute = mock.Mock(side_effect=stretched)
    # The process goes on with other tests.
    with (
        mock.patch.object(network_cost, "corrected_link", link),
        mock.patch.object(calibration, "corrected_compute", compute),
    ):
        found = train_both(rank, mode, WARMUP_STEPS + CALIBRATION_STEPS + 3, version_and_profile)
    assert link.call_count == compute.call_count == (1 if rank.index == 0 else 0), "rank 0 decides"
    for call in link.call_args_list + compute.call_args_list:
        assert len(call.args[1]) == CALIBRATION_STEPS - 1, "in the first step memory is allocated"
    lines = [line for line in found["lines"] if "warm-up measured" in line]
    return found["seen"], lines, found["equal"]


def version_and_profile(handle):
    return handle.plan_version, handle.profile and handle.profile.to_json()


BEFORE, AFTER = WARMUP_STEPS + CALIBRATION_STEPS - 1, WARMUP_STEPS + CALIBRATION_STEPS + 1


@pytest.mark.parametrize(
    ("mode", "network", "compute"), [("overlap", 3.0, None), ("hook", 3.0, None), ("overlap", None, 2.0)]
)
def test_where_it_is_wrong_all_ranks_plan_again_at_the_same_step(ranks, mode, network, compute):
    results = ranks.run(2, train, mode, network, compute)
    for index, (seen, lines, equal) in enumerate(results):
        assert equal, "the parameters are not DDP's"
        assert seen == results[0][0]
        assert len(lines) == (1 if index == 0 else 0), "one rank speaks for all"
    seen, (line,), _ = results[0]
    assert [version for version, _ in seen[BEFORE : AFTER + 1]] == [4, 5, 5]
    before, after = (_core.Profile.from_json(seen[step][1]) for step in (BEFORE, AFTER))
    network, compute = network or 1.0, compute or 1.0
    assert after.link.all_reduce.cost_ns(1000) == pytest.approx(
        network * before.link.all_reduce.cost_ns(1000), rel=1e-6
    )
    assert after.forward_ns == pytest.approx(compute * before.forward_ns, abs=1)
    ready_ns = [compute * each.ready_ns for each in before.tensors]
    assert [each.ready_ns for each in after.tensors] == pytest.approx(ready_ns, abs=1)
    said = f"costs {network:.2f} times what the warm-up measured, and compute takes {compute:.2f} times as long"
    assert f"the network {said}" in line


def test_where_it_is_right_the_plan_stays(ranks):
    for seen, lines, equal in ranks.run(2, train, "overlap", None):
        assert equal
        assert lines == []
        # A machine whose steps vary may bring another plan later, but not because the costs were wrong.
        assert seen[WARMUP_STEPS + 1][0] == 4
