"""What the network costs, from how long blocks took in the warm-up and in the plan that followed it."""

import random
from unittest import mock

import pytest

from conftest import link_of
from gradcast import _core

pytest.importorskip("training.needs")
from gradcast.training.measure import network_cost
from gradcast.training.measure.network_cost import Sample


def steps_on(link, sizes, factor=1.0, disturbed=None):
    """Four steps of blocks that take ``factor`` times what the link says; the blocks of one step ten times as long."""
    cost = link.all_reduce.cost_ns
    return [
        [Sample(size, (10 if step == disturbed else 1) * factor * cost(size), back_to_back=True) for size in sizes]
        for step in range(4)
    ]


@pytest.mark.parametrize("factor", [0.98, 1.0, 1.02])
def test_a_link_that_is_right_stays(factor):
    link = link_of(1e5, 8.0)
    assert network_cost.corrected_link(link, steps_on(link, [10_000, 500_000, 2_000_000], factor, disturbed=2)) is None


def test_where_blocks_of_few_sizes_take_longer_all_costs_grow_alike():
    link = link_of(1e5, 8.0)
    corrected = network_cost.corrected_link(link, steps_on(link, [500_000, 2_000_000], 1.25))
    for size in (1_000, 500_000, 10_000_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(1.25 * link.all_reduce.cost_ns(size))


def test_blocks_of_several_sizes_say_what_a_start_and_a_byte_cost():
    found = steps_on(link_of(3e5, 34.0), [100_000, 200_000, 700_000, 1_300_000], disturbed=1)
    corrected = network_cost.corrected_link(link_of(1e5, 25.0), found)
    for size in (50_000, 500_000, 5_000_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(3e5 + 34.0 * size, rel=0.01)


@pytest.mark.parametrize("sizes", [[1_000_000] * 4, [400_000, 800_000, 1_000_000, 1_800_000]])
def test_where_each_time_another_block_is_late_the_steps_are_longer(sizes):
    link = link_of(1e5, 8.0)
    found = steps_on(link, sizes)
    for late, step in enumerate(found):
        step[late] = step[late]._replace(time_ns=step[late].time_ns + 9e6)
    corrected = network_cost.corrected_link(link, found)
    together_ns, usual_ns = (sum(each.all_reduce.cost_ns(size) for size in sizes) for each in (corrected, link))
    assert together_ns == pytest.approx(usual_ns + 9e6)


def test_a_block_takes_from_when_it_was_due_until_it_has_finished():
    times = [(10, 10, 30), (5, 30, 50), (70, 70, 75)]
    blocks = [mock.Mock(ready_ns=ready, due_ns=due, finish_ns=finish, device_ns=0) for ready, due, finish in times]
    plan = mock.Mock(blocks=[mock.Mock(size_bytes=size) for size in (1, 2, 3)])
    assert network_cost.samples_of_rank(plan, blocks) == [(1, 20, False), (2, 20, True), (3, 5, False)]
    blocks[1].device_ns = 12  # as the device has timed it
    assert network_cost.samples_of_rank(plan, blocks)[1] == (2, 12, True)


US, SIZES = 1000, [1 << power for power in range(14, 25)]


def fast_blocks(poll_ns):
    """Single blocks on a link that takes 20 us and 3 us per MB, which begin at any time. Their ends are seen when the
    host looks, every ``poll_ns``."""
    seen = []
    for number, size in enumerate(SIZES * 4):
        lasted_ns, due_ns = round(20 * US + 0.003 * size), number * 1007 * US
        finish_ns = -(-(due_ns + lasted_ns) // poll_ns) * poll_ns
        seen.append((size, {"ready_ns": due_ns, "due_ns": due_ns, "finish_ns": finish_ns}, lasted_ns))
    return seen


def test_a_fast_link_is_that_of_the_devices_times_not_of_the_polls():
    found = {}
    for name, is_timed in (("polled", False), ("timed", True)):
        sizes, times, lasted = zip(*fast_blocks(50 * US), strict=True)
        blocks = [mock.Mock(**each, device_ns=ns * is_timed) for each, ns in zip(times, lasted, strict=True)]
        plan = mock.Mock(blocks=[mock.Mock(size_bytes=size) for size in sizes])
        samples = network_cost.combined([network_cost.samples_of_rank(plan, blocks)] * 2)
        found[name] = network_cost.fit_link(samples, 0.0).all_reduce.pieces[0].alpha_ns
    assert found["timed"] == pytest.approx(20 * US, rel=0.01)
    assert found["polled"] > 1.5 * 20 * US


def test_of_several_ranks_those_that_waited_for_a_gradient_are_not_asked():
    one = [Sample(100, 30, True), Sample(200, 20, True), Sample(100, 11, True), Sample(200, 9, False)]
    other = [Sample(100, 10, False), Sample(200, 24, True), Sample(100, 13, True), Sample(200, 7, False)]
    assert network_cost.combined([one, other]) == [(100, 10, False), (200, 22, True), (100, 12, True), (200, 7, False)]


SAVED_NS = 1.6e6
FOLLOWING, FIRST = [50_000, 70_000, 110_000, 170_000], [90_000, 120_000, 190_000, 210_000, 310_000, 400_000]


def with_pauses(link):
    """Steps in which the larger blocks find the network idle, and take less by the same time."""
    cost = link.all_reduce.cost_ns
    return [
        [
            *(Sample(size, cost(size), back_to_back=True) for size in FOLLOWING),
            *(Sample(size, cost(size) - SAVED_NS, back_to_back=False) for size in FIRST),
        ]
        for _ in range(4)
    ]


def test_what_blocks_save_after_a_pause_is_not_what_the_network_costs():
    """Fitted as they are, the larger ones would say that a start costs nothing, and a byte less than the wire takes."""
    link = link_of(3e5, 105.0)
    found = [sample for step in with_pauses(link) for sample in step]
    fitted = network_cost.fit_link(found, 0.0)
    bent = _core.fit_op_cost([(sample.size_bytes, sample.time_ns) for sample in found]).cost
    for size in (20_000, 100_000, 250_000, 800_000):
        assert fitted.all_reduce.cost_ns(size) == pytest.approx(link.all_reduce.cost_ns(size), rel=1e-6)
    assert bent.cost_ns(800_000) < link.all_reduce.cost_ns(800_000) - SAVED_NS / 2
    assert network_cost.cost_spread(found, link) == pytest.approx((1.0, 1.0))


def test_a_plan_with_other_pauses_leaves_a_link_that_is_right():
    link = link_of(3e5, 105.0)
    found = with_pauses(link)
    seen_ns, said_ns = (
        sum(cost(sample) for sample in found[0])
        for cost in (lambda sample: sample.time_ns, lambda sample: link.all_reduce.cost_ns(sample.size_bytes))
    )
    assert seen_ns < 0.97 * said_ns, "without a correction this would be another network"
    assert network_cost.corrected_link(link, found) is None
    corrected = network_cost.corrected_link(link_of(1e5, 90.0), found)
    for size in (50_000, 400_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(link.all_reduce.cost_ns(size), rel=0.01)


@pytest.mark.parametrize("saved_ns", [SAVED_NS, -SAVED_NS])
def test_where_too_few_blocks_follow_others_or_pauses_cost_all_count_as_they_are(saved_ns):
    cost = link_of(3e5, 105.0).all_reduce.cost_ns
    first = [Sample(size, cost(size) - saved_ns, back_to_back=False) for size in FIRST]
    following = [Sample(size, cost(size), back_to_back=True) for size in (FOLLOWING[:2] if saved_ns > 0 else FOLLOWING)]
    assert network_cost.as_back_to_back(following + first) == following + first


def test_a_network_that_costs_something_else_for_large_blocks_saves_nothing():
    """Small ones follow each other, at 0.15 ns per byte; large ones come after pauses, and take 0.02."""
    small = [Sample(size << 10, 2e4 + 0.15 * (size << 10), back_to_back=True) for size in (32, 64, 128, 256)] * 3
    large = [Sample(size << 20, 5e4 + 0.02 * (size << 20), back_to_back=False) for size in (1, 2, 8, 25)] * 3
    link = network_cost.fit_link(small + large, 0.0)
    for size in (1 << 20, 4 << 20, 25 << 20):
        assert link.all_reduce.cost_ns(size) == pytest.approx(5e4 + 0.02 * size, rel=0.05)


def test_what_blocks_have_saved_before_counts_where_a_plan_does_not_tell():
    """A plan of few blocks, of which only two follow others."""
    link = link_of(3e5, 105.0)
    steps = [[*step[:2], *step[len(FOLLOWING) :]] for step in with_pauses(link)]
    assert network_cost.corrected_link(link, steps, known_saving_ns=SAVED_NS) is None
    assert network_cost.cost_spread(steps[0], link, SAVED_NS) == pytest.approx((1.0, 1.0))
    assert network_cost.corrected_link(link, steps) is not None, "as if the network were faster"


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_taken_for_what_blocks_save(seed):
    """Three sizes that are much alike follow others; nothing is saved, and all times scatter by 5 %."""
    draw = random.Random(seed)
    link = link_of(3e5, 105.0)

    def found(size, back_to_back):
        return Sample(size, link.all_reduce.cost_ns(size) * draw.gauss(1, 0.05), back_to_back)

    samples = [found(size, True) for size in (90_000, 100_000, 110_000) for _ in range(5)]
    samples += [found(size, False) for size in (30_000, 80_000, 120_000, 140_000, 300_000) for _ in range(5)]
    assert (network_cost.idle_saving_ns(samples) or 0.0) < 0.05 * link.all_reduce.cost_ns(100_000)


def test_blocks_that_share_the_network_tell_only_all_together():
    link = link_of(1e5, 25.0)
    found = [[Sample(2_000_000, 1.3 * 4e7)]] * 4
    corrected = network_cost.corrected_link(link, found, shared_ns=4e7)
    for size in (50_000, 5_000_000):
        assert corrected.all_reduce.cost_ns(size) == pytest.approx(1.3 * link.all_reduce.cost_ns(size))
    assert network_cost.corrected_link(link, found, shared_ns=1.32 * 4e7) is None
