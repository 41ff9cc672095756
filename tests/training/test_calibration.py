"""A new plan is held against its own first steps, and made again where the network or compute takes something else."""

import dataclasses
import random
from unittest import mock

import pytest

import gradcast
from gradcast import _core
from training.needs import torch
from training.test_adapt import Heard, make_module, run_step

WARMUP_STEPS = 3
CALIBRATION_STEPS = 9


def linear(alpha_ns, beta_ns_per_byte):
    return _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte)])


def steps_on(link, sizes, factor=1.0, disturbed=None):
    """Four steps of blocks that take ``factor`` times what the link says; the blocks of one step ten times as long."""
    from gradcast.training.link_costs import Sample

    cost = link.all_reduce.cost_ns
    return [
        [Sample(size, (10 if step == disturbed else 1) * factor * cost(size), at_once=True) for size in sizes]
        for step in range(4)
    ]


@pytest.mark.parametrize("factor", [0.98, 1.0, 1.02])
def test_a_link_that_is_right_stays(factor):
    from gradcast.training import link_costs

    link = linear(1e5, 8.0)
    assert link_costs.corrected(link, steps_on(link, [10_000, 500_000, 2_000_000], factor, disturbed=2)) is None


def test_where_blocks_of_few_sizes_take_longer_all_costs_grow_alike():
    from gradcast.training import link_costs

    link = linear(1e5, 8.0)
    corrected = link_costs.corrected(link, steps_on(link, [500_000, 2_000_000], 1.25))
    for size in (1_000, 500_000, 10_000_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(1.25 * link.all_reduce.cost_ns(size))


def test_blocks_of_several_sizes_say_what_a_start_and_a_byte_cost():
    from gradcast.training import link_costs

    found = steps_on(linear(3e5, 34.0), [100_000, 200_000, 700_000, 1_300_000], disturbed=1)
    corrected = link_costs.corrected(linear(1e5, 25.0), found)
    for size in (50_000, 500_000, 5_000_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(3e5 + 34.0 * size, rel=0.01)


@pytest.mark.parametrize("sizes", [[1_000_000] * 4, [400_000, 800_000, 1_000_000, 1_800_000]])
def test_where_each_time_another_block_is_late_the_steps_are_longer(sizes):
    from gradcast.training import link_costs

    link = linear(1e5, 8.0)
    found = steps_on(link, sizes)
    for late, step in enumerate(found):
        step[late] = step[late]._replace(time_ns=step[late].time_ns + 9e6)
    corrected = link_costs.corrected(link, found)
    together_ns, usual_ns = (sum(each.all_reduce.cost_ns(size) for size in sizes) for each in (corrected, link))
    assert together_ns == pytest.approx(usual_ns + 9e6)


def measured_by(*compute_ms):
    """One rank's warm-up of a tensor: backward, forward and update in ms per step, None where it has failed."""
    from gradcast.training.compute_times import Compute
    from gradcast.training.link_costs import Took
    from gradcast.training.planning import Measured

    steps = [None if each is None else Compute(*(1e6 * ms for ms in each)) for each in compute_ms]
    return Measured([1e6], [0.0], steps, [[100]], [[Took(1e6, at_once=False)]], pack_ns_per_byte=0.0)


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
    from gradcast.training.planning import measured_profile

    sizes = mock.Mock(buffer_of=[0], bytes_of=lambda _: 100, element_bytes_of=lambda _: 4)
    profile = measured_profile([measured_by(*each) for each in ranks], ["only"], sizes, name="measured")
    times_ns = profile.backward_ns, profile.forward_ns, profile.tensors[0].update_ns
    assert times_ns == pytest.approx([1e6 * ms for ms in times_ms])


def test_a_rank_of_which_no_step_is_known_is_an_error_that_all_hear():
    from gradcast.training.planning import measured_profile

    sizes = mock.Mock(buffer_of=[0], bytes_of=lambda _: 100, element_bytes_of=lambda _: 4)
    with pytest.raises(gradcast.Error, match="no step could be measured: backward has failed in each of them"):
        measured_profile([measured_by((20, 10, 1)), measured_by(None)], ["only"], sizes, name="measured")


def test_a_block_takes_from_when_it_was_due_until_it_has_finished():
    from gradcast.training.link_costs import Took, took

    times = [(10, 10, 30), (5, 30, 50), (70, 70, 75)]
    blocks = [mock.Mock(ready_ns=ready, due_ns=due, finish_ns=finish) for ready, due, finish in times]
    assert [took(block) for block in blocks] == [Took(20, False), Took(20, True), Took(5, False)]


@pytest.mark.parametrize("pack_ns_per_byte", [0.0, 1.5])
def test_what_packing_takes_is_not_the_networks(pack_ns_per_byte):
    from gradcast.training.calibration import Calibration

    whole = mock.Mock(size_bytes=4_000_000, ranges=[(0, 4_000_000)])
    packed = mock.Mock(size_bytes=2_000_000, ranges=[(0, 1_000_000), (5_000_000, 6_000_000)])
    calibration = Calibration(mock.Mock(blocks=[whole, packed], in_flight=1), pack_ns_per_byte)
    blocks = [mock.Mock(ready_ns=0, due_ns=0, finish_ns=8e6), mock.Mock(ready_ns=1e6, due_ns=8e6, finish_ns=15e6)]
    for _ in range(CALIBRATION_STEPS):
        calibration.step_ended(mock.Mock(blocks=blocks), None)
    found = calibration.found(mock.Mock(gather=lambda own: [own, own])).blocks
    assert found[0] == [(4_000_000, 8e6, False), (2_000_000, 7e6 - 2_000_000 * pack_ns_per_byte, True)]


def test_of_several_ranks_those_that_waited_for_a_gradient_are_not_asked():
    from gradcast.training.link_costs import Took, samples

    sizes = [[100, 200], [100, 200]]
    one = [[Took(30, True), Took(20, True)], [Took(11, True), Took(9, False)]]
    other = [[Took(10, False), Took(24, True)], [Took(13, True), Took(7, False)]]
    assert samples(sizes, [one, other]) == [(100, 10, False), (200, 22, True), (100, 12, True), (200, 7, False)]


SAVED_NS = 1.6e6
FOLLOWING, FIRST = [50_000, 70_000, 110_000, 170_000], [90_000, 120_000, 190_000, 210_000, 310_000, 400_000]


def with_pauses(link):
    """Steps in which the larger blocks find the network idle, and take less by the same time."""
    from gradcast.training.link_costs import Sample

    cost = link.all_reduce.cost_ns
    return [
        [
            *(Sample(size, cost(size), at_once=True) for size in FOLLOWING),
            *(Sample(size, cost(size) - SAVED_NS, at_once=False) for size in FIRST),
        ]
        for _ in range(4)
    ]


def test_what_blocks_save_after_a_pause_is_not_what_the_network_costs():
    """Fitted as they are, the larger ones would say that a start costs nothing, and a byte less than the wire takes."""
    from gradcast.training import link_costs

    link = linear(3e5, 105.0)
    found = [sample for step in with_pauses(link) for sample in step]
    fitted = link_costs.fitted(found, 0.0)
    bent = _core.fit_op_cost([(sample.size_bytes, sample.time_ns) for sample in found]).cost
    for size in (20_000, 100_000, 250_000, 800_000):
        assert fitted.all_reduce.cost_ns(size) == pytest.approx(link.all_reduce.cost_ns(size), rel=1e-6)
    assert bent.cost_ns(800_000) < link.all_reduce.cost_ns(800_000) - SAVED_NS / 2
    assert link_costs.spread(found, link) == pytest.approx((1.0, 1.0))


def test_a_plan_with_other_pauses_leaves_a_link_that_is_right():
    from gradcast.training import link_costs

    link = linear(3e5, 105.0)
    found = with_pauses(link)
    seen_ns, said_ns = (
        sum(cost(sample) for sample in found[0])
        for cost in (lambda sample: sample.time_ns, lambda sample: link.all_reduce.cost_ns(sample.size_bytes))
    )
    assert seen_ns < 0.97 * said_ns, "without a correction this would be another network"
    assert link_costs.corrected(link, found) is None
    corrected = link_costs.corrected(linear(1e5, 90.0), found)
    for size in (50_000, 400_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(link.all_reduce.cost_ns(size), rel=0.01)


@pytest.mark.parametrize("saved_ns", [SAVED_NS, -SAVED_NS])
def test_where_too_few_blocks_follow_others_or_pauses_cost_all_count_as_they_are(saved_ns):
    from gradcast.training.link_costs import Sample, in_a_row

    cost = linear(3e5, 105.0).all_reduce.cost_ns
    first = [Sample(size, cost(size) - saved_ns, at_once=False) for size in FIRST]
    following = [Sample(size, cost(size), at_once=True) for size in (FOLLOWING[:2] if saved_ns > 0 else FOLLOWING)]
    assert in_a_row(following + first) == following + first


def test_a_network_that_costs_something_else_for_large_blocks_saves_nothing():
    """Small ones follow each other, at 0.15 ns per byte; large ones come after pauses, and take 0.02."""
    from gradcast.training.link_costs import Sample, fitted

    small = [Sample(size << 10, 2e4 + 0.15 * (size << 10), at_once=True) for size in (32, 64, 128, 256)] * 3
    large = [Sample(size << 20, 5e4 + 0.02 * (size << 20), at_once=False) for size in (1, 2, 8, 25)] * 3
    link = fitted(small + large, 0.0)
    for size in (1 << 20, 4 << 20, 25 << 20):
        assert link.all_reduce.cost_ns(size) == pytest.approx(5e4 + 0.02 * size, rel=0.05)


def test_what_blocks_have_saved_before_counts_where_a_plan_does_not_tell():
    """A plan of few blocks, of which only two follow others."""
    from gradcast.training import link_costs

    link = linear(3e5, 105.0)
    steps = [[*step[:2], *step[len(FOLLOWING) :]] for step in with_pauses(link)]
    assert link_costs.corrected(link, steps, saved_ns=SAVED_NS) is None
    assert link_costs.spread(steps[0], link, SAVED_NS) == pytest.approx((1.0, 1.0))
    assert link_costs.corrected(link, steps) is not None, "as if the network were faster"


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_taken_for_what_blocks_save(seed):
    """Three sizes that are much alike follow others; nothing is saved, and all times scatter by 5 %."""
    from gradcast.training.link_costs import Sample, saved_after_pause_ns

    draw = random.Random(seed)
    link = linear(3e5, 105.0)

    def found(size, at_once):
        return Sample(size, link.all_reduce.cost_ns(size) * draw.gauss(1, 0.05), at_once)

    samples = [found(size, True) for size in (90_000, 100_000, 110_000) for _ in range(5)]
    samples += [found(size, False) for size in (30_000, 80_000, 120_000, 140_000, 300_000) for _ in range(5)]
    assert (saved_after_pause_ns(samples) or 0.0) < 0.05 * link.all_reduce.cost_ns(100_000)


def test_blocks_that_share_the_network_tell_only_all_together():
    from gradcast.training import link_costs

    link = linear(1e5, 25.0)
    found = [[link_costs.Sample(2_000_000, 1.3 * 4e7)]] * 4
    corrected = link_costs.corrected(link, found, shared_ns=4e7)
    for size in (50_000, 5_000_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(1.3 * link.all_reduce.cost_ns(size))
    assert link_costs.corrected(link, found, shared_ns=1.32 * 4e7) is None


@pytest.mark.parametrize("alpha_ns", [1e5, 1e6, 4e6])
@pytest.mark.parametrize("plain", [False, True])
def test_a_link_on_which_all_goes_as_play_says_is_right(alpha_ns, plain):
    from gradcast.training import link_costs, planning
    from gradcast.training.calibration import Calibration, planned_busy_periods_ns

    profile = even_profile(linear(alpha_ns, 2.0))
    plan = planning.plain_plan(profile) if plain else planning.decide(profile, "overlap", gradcast.Options())
    assert plan.in_flight == (2 if plain else 1)
    calibration = Calibration(plan, pack_ns_per_byte=0)
    played = [
        mock.Mock(ready_ns=block.ready_ns, due_ns=block.launch_ns, finish_ns=block.finish_ns)
        for block in _core.play(profile, profile.link, plan).blocks
    ]
    for _ in range(CALIBRATION_STEPS):
        calibration.step_ended(mock.Mock(blocks=played), None)
    found = calibration.found(mock.Mock(gather=lambda own: [own, own]))
    assert len(found.blocks) == CALIBRATION_STEPS - 1
    shared_ns = sum(planned_busy_periods_ns(plan, profile)) if plain else None
    assert link_costs.corrected(profile.link, found.blocks, shared_ns=shared_ns) is None


def even_profile(link):
    tensors = [
        _core.Tensor(name=str(i), bytes=1 << 20, ready_ns=1e7 * (8 - i), need_ns=1e7 * i, update_ns=0) for i in range(8)
    ]
    return _core.Profile(name="even", forward_ns=8e7, backward_ns=8e7, tensors=tensors, world_size=2, link=link)


def test_the_network_is_busy_while_some_block_is_on_it():
    from gradcast.training.calibration import busy_periods_ns

    assert busy_periods_ns([(10, 30), (35, 50), (50, 60)]) == [20, 25], "one after the other"
    # The second one begins beside the first, the third ends before it, the last one comes when all is quiet.
    assert busy_periods_ns([(10, 30), (31, 55), (15, 60), (70, 75)]) == [50, 5]
    assert busy_periods_ns([]) == []


def compute_steps(ranks, disturbed=None):
    """Four steps of ``ranks``: backward, forward, update in ms; those of one step take ten times as long."""
    from gradcast.training.compute_times import Compute

    return [
        [Compute(*(1e6 * ms * (10 if step == disturbed else 1) for ms in rank)) for rank in ranks] for step in range(4)
    ]


def profile_of(backward_ms, forward_ms, update_ms):
    tensors = [
        _core.Tensor(name=name, bytes=size, ready_ns=1e6 * ready_ms, need_ns=1e6 * need_ms, update_ns=1e6 * own_ms)
        for name, size, ready_ms, need_ms, own_ms in (
            ("first", 4_000_000, backward_ms, 0, 0.25 * update_ms),
            ("last", 12_000_000, 0.5 * backward_ms, 0.5 * forward_ms, 0.75 * update_ms),
        )
    ]
    return _core.Profile(
        name="hand-made", forward_ns=1e6 * forward_ms, backward_ns=1e6 * backward_ms, tensors=tensors, world_size=3,
        link=linear(1e5, 8.0),
    )  # fmt: skip


def test_compute_that_is_right_stays():
    from gradcast.training.calibration import corrected_compute

    profile = profile_of(200, 100, 10)
    assert corrected_compute(profile, compute_steps([(205, 102, 9), (190, 101, 9), (190, 99, 9)])) is None
    assert corrected_compute(profile, []) is None


def test_compute_beside_a_plan_is_that_of_each_steps_slowest_rank():
    from gradcast.training.calibration import corrected_compute
    from gradcast.training.compute_times import Compute, with_compute

    profile = profile_of(200, 100, 10)
    steps = compute_steps([(250, 125, 13), (210, 120, 12), (230, 130, 20)], disturbed=1)
    steps[2].reverse()
    steps[3].append(Compute(260e6, 150e6, 13e6))
    found = corrected_compute(profile, steps)
    assert found == Compute(255e6, 137.5e6, 13e6)
    found = Compute(250e6, 125e6, 13e6)
    stretched = with_compute(profile, found)
    assert (stretched.backward_ns, stretched.forward_ns) == (250e6, 125e6)
    assert [tensor.ready_ns for tensor in stretched.tensors] == [250e6, 125e6]
    assert [tensor.need_ns for tensor in stretched.tensors] == [0, 62.5e6]
    assert [tensor.update_ns for tensor in stretched.tensors] == [3.25e6, 9.75e6]
    assert stretched.link.to_json() == profile.link.to_json()
    # In the other direction, too; and where there is no update there is none afterwards.
    assert corrected_compute(profile, compute_steps([(100, 100, 10)] * 3)) == Compute(100e6, 100e6, 10e6)
    assert with_compute(profile_of(200, 100, 0), found).tensors[0].update_ns == 0


def test_what_a_step_computed_is_what_it_did_not_wait():
    from gradcast.training.compute_times import Compute, compute_of
    from gradcast.training.trace import StepRecord

    record = StepRecord(3, 3, None, None, 100)
    record.spans += [("backward", 100, 160), ("wait", 160, 170), ("update", 170, 175), ("update", 190, 195)]
    assert compute_of(record, busy_ns=130) == Compute(60, 60, 10)


def train(rank, mode, link_factor, compute_factor=None):
    from gradcast.training import calibration, compute_times, link_costs

    link = mock.Mock(
        side_effect=lambda link, _, shared_ns, saved_ns: link_factor and link.scaled(link_factor, link_factor)
    )

    def stretched(profile, steps):
        for step in steps:
            assert len(step) == 2
            assert all(min(each.backward_ns, each.forward_ns) > 0 for each in step)
        update_ns = sum(tensor.update_ns for tensor in profile.tensors)
        times = (profile.backward_ns, profile.forward_ns, update_ns)
        return compute_factor and compute_times.Compute(*(compute_factor * time for time in times))

    compute = mock.Mock(side_effect=stretched)
    # The process goes on with other tests.
    with (
        mock.patch.object(link_costs, "corrected", link),
        mock.patch.object(calibration, "corrected_compute", compute),
    ):
        found = train_both(rank, mode)
    assert link.call_count == compute.call_count == (1 if rank.index == 0 else 0), "rank 0 decides"
    for call in link.call_args_list + compute.call_args_list:
        assert len(call.args[1]) == CALIBRATION_STEPS - 1, "in the first step memory is allocated"
    return found


def train_both(rank, mode):
    """The versions that were followed, with their profiles, what was said, and whether the parameters are DDP's."""
    heard, seen = Heard(), []
    modules = [make_module(), make_module()]
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    options = gradcast.Options(warmup_steps=WARMUP_STEPS)
    handle = gradcast.attach(modules[0], sgds[0] if mode == "overlap" else None, options=options)
    steps = WARMUP_STEPS + CALIBRATION_STEPS + 3
    for step in range(steps):
        run_step(rank, step, modules[0], sgds[0])
        profile = handle.profile and handle.profile.to_json()
        seen.append((handle.plan_version, profile))
    handle.detach()
    ddp = torch.nn.parallel.DistributedDataParallel(modules[1])
    for step in range(steps):
        run_step(rank, step, ddp, sgds[1])
    equal = all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in modules), strict=True))
    return seen, [line for line in heard.lines if "warm-up has found" in line], equal


BEFORE, AFTER = WARMUP_STEPS + CALIBRATION_STEPS - 1, WARMUP_STEPS + CALIBRATION_STEPS + 1


def require_one_new_plan(results):
    """The profiles before and after it, and what rank 0 said."""
    for index, (seen, lines, equal) in enumerate(results):
        assert equal, "the parameters are not DDP's"
        assert seen == results[0][0]
        assert len(lines) == (1 if index == 0 else 0), "one rank speaks for all"
    seen, (line,), _ = results[0]
    assert [version for version, _ in seen[BEFORE : AFTER + 1]] == [4, 5, 5]
    return _core.Profile.from_json(seen[BEFORE][1]), _core.Profile.from_json(seen[AFTER][1]), line


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_where_the_network_costs_more_all_ranks_plan_again_at_the_same_step(ranks, mode):
    before, after, line = require_one_new_plan(ranks.run(2, train, mode, 3.0))
    assert after.link.all_reduce.cost_ns(1000) == pytest.approx(3 * before.link.all_reduce.cost_ns(1000), rel=1e-6)
    assert after.forward_ns == before.forward_ns
    assert "the network costs 3.00 times what the warm-up has found, and compute takes 1.00 times as long" in line


def test_where_compute_takes_longer_all_ranks_plan_again_at_the_same_step(ranks):
    before, after, line = require_one_new_plan(ranks.run(2, train, "overlap", None, 2.0))
    assert after.link.to_json() == before.link.to_json()
    assert after.forward_ns == pytest.approx(2 * before.forward_ns, abs=1)
    assert [each.ready_ns for each in after.tensors] == pytest.approx(
        [2 * each.ready_ns for each in before.tensors], abs=1
    )
    assert "the network costs 1.00 times what the warm-up has found, and compute takes 2.00 times as long" in line


def test_what_ddp_would_take_has_no_network_beside_its_forward():
    from gradcast.training import planning
    from gradcast.training.compute_times import Compute, with_compute
    from gradcast.training.expectation import Scatter, expect

    profile, scatter = profile_of(200, 100, 10), Scatter(link=(0.9, 1.1))
    plain = planning.plain_plan(profile)
    alone = expect(profile, _core.make_plan(profile, profile.link), profile, plain, scatter)
    slower = with_compute(profile, Compute(240e6, 120e6, 12e6))
    beside = expect(slower, _core.make_plan(slower, profile.link), profile, plain, scatter)
    assert beside.gain == pytest.approx(plain.predicted_ns / _core.make_plan(slower, profile.link).predicted_ns)
    assert beside.gain < alone.gain
    assert beside.low <= beside.gain <= beside.high
    assert beside.compute_share == alone.compute_share


@pytest.mark.parametrize(("mode", "plain_ms"), [("overlap", 100), ("hook", 200)])
def test_a_forward_pass_beside_the_network_is_not_expected_of_ddp(mode, plain_ms):
    from gradcast.training import calibration, live_plan
    from gradcast.training.expectation import Scatter
    from gradcast.training.planning import Proposal

    given = profile_of(200, 100, 10)
    plan = _core.make_plan(given, given.link, mode=mode)
    live = mock.Mock(
        profile=given, in_force=plan, _mode=mode, _options=gradcast.Options(), scatter=Scatter(link=(0.9, 1.1))
    )
    live._proposal.return_value = Proposal(given.to_json(), plan.to_json())
    live.agreed.hold_iterations = 7
    found = calibration.Found(blocks=[], compute=compute_steps([(240, 200, 20)] * 3))
    assert live_plan.LivePlan._calibrated(live, found).hold_iterations == 7
    profile, _, scatter, plain_profile = live._proposal.call_args.args
    assert (profile.backward_ns, profile.forward_ns) == (240e6, 200e6)
    # DDP has the network beside its backward pass, too.
    assert (plain_profile.backward_ns, plain_profile.forward_ns) == (240e6, 1e6 * plain_ms)
    assert sum(tensor.update_ns for tensor in plain_profile.tensors) == 20e6
    assert scatter == Scatter((0.9, 1.1), ((1, 1, 1),) * 4), "the warm-up's, where no block was measured"


def test_steps_scatter_as_their_slowest_ranks_do():
    from gradcast.training.compute_times import scatter

    profile = profile_of(200, 100, 10)
    steps = compute_steps([(250, 110, 10), (200, 120, 5)], disturbed=2)
    steps[3].reverse()
    assert scatter(profile, steps) == ((1.25, 1.1, 1.0), (1.25, 1.1, 1.0), (12.5, 11.0, 10.0), (1.25, 1.1, 1.0))
    assert scatter(profile, []) == ()


def test_the_usual_step_is_the_median_of_the_steps_not_the_step_of_medians():
    """The one block arrives just when forward has come to it: where either is late, the step is."""
    from gradcast.training import planning
    from gradcast.training.compute_times import Shares
    from gradcast.training.expectation import Scatter, expect, usual

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
    plain = planning.plain_plan(profile)
    expected = expect(profile, plan, profile, plain, Scatter((1.0, 2.0), found))
    assert expected.plan == once
    assert expected.plain == usual(profile, plain, found)
    assert expected.gain == expected.plain.step_ns / once.step_ns
    assert expected.limit == expected.plain.step_ns / once.bound_ns
    agreed = planning.Agreed(profile, plan, (0, 1), plain, expected)
    assert (agreed.usual, agreed.in_force) == (expected.plan, plan)
    aside = dataclasses.replace(agreed, steps_aside=True)
    assert (aside.usual, aside.in_force) == (expected.plain, plain)
    assert dataclasses.replace(agreed, expectation=None).usual == (plan.predicted_ns, plan.bound_ns)


def test_where_ddps_way_is_taken_its_own_compute_is_expected():
    """Beside the plan it took twice as long; that it does not now is no change."""
    from gradcast.training import live_plan, planning
    from gradcast.training.compute_times import Compute, with_compute
    from gradcast.training.expectation import Scatter, expect

    alone = profile_of(200, 100, 10)
    beside = with_compute(alone, Compute(400e6, 200e6, 20e6))
    plan, plain = _core.make_plan(beside, beside.link), planning.plain_plan(alone)
    agreed = planning.Agreed(
        beside, plan, (0, 1), plain, expect(beside, plan, alone, plain, Scatter()), steps_aside=True
    )
    live = mock.Mock(in_force=plain, _sees_compute=True)
    on_device = mock.Mock(in_force=plain, _sees_compute=False)
    with mock.patch.object(_core, "Monitor") as monitor:
        live_plan.LivePlan._new_monitor(live, agreed)
        live_plan.LivePlan._new_monitor(live, dataclasses.replace(agreed, steps_aside=False))
        live_plan.LivePlan._new_monitor(on_device, agreed)
    # On a device nobody knows, and nothing is expected.
    assert [call.kwargs["busy_ns"] for call in monitor.call_args_list] == pytest.approx([310e6, 620e6, 0])


def test_where_it_is_right_the_plan_stays(ranks):
    for seen, lines, equal in ranks.run(2, train, "overlap", None):
        assert equal
        assert lines == []
        assert {version for version, _ in seen[WARMUP_STEPS + 1 :]} == {4}


def test_what_is_expected_of_a_plan_that_stays_is_by_its_own_steps():
    from gradcast.training import live_plan, planning
    from gradcast.training.compute_times import Shares
    from gradcast.training.expectation import Scatter, expect

    profile = profile_of(200, 100, 10)
    plan, plain = _core.make_plan(profile, profile.link), planning.plain_plan(profile)
    expected = [
        expect(profile, plan, profile, plain, Scatter(compute=(Shares(each, each, each),))) for each in (1.0, 1.0, 1.2)
    ]
    agreed = planning.Agreed(profile, plan, (0, 1), plain, expected[0])
    live = mock.Mock(agreed=agreed)
    live_plan.LivePlan._stay_with(live, dataclasses.replace(agreed, plan=plain, expectation=expected[1]))
    live._describe.assert_not_called()
    live_plan.LivePlan._stay_with(live, dataclasses.replace(agreed, plan=plain, expectation=expected[2]))
    live._describe.assert_called_once()
    assert live.agreed.usual.step_ns == expected[2].plan.step_ns > expected[0].plan.step_ns
    assert live.agreed.plan is plan, "by which steps are told that followed it"
