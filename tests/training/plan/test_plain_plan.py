"""The DDP baseline: DDP's buckets with the best sizes, and no more of them than that needs."""

import pytest

from gradcast import _core
from gradcast.comparison import ddp_baseline
from training.profiles import linear

pytest.importorskip("training.needs")
from gradcast.training.plan import proposals

MIB = 1 << 20
COUNT = 12  # tensors of a MiB each


def profile(beta_ns_per_byte, alpha_ns=0.0):
    """Gradients come evenly during 120 ms of backward; forward is as long."""
    tensors = [
        _core.Tensor(name=str(i), bytes=MIB, ready_ns=1e7 * (COUNT - i), need_ns=1e7 * i, update_ns=0)
        for i in range(COUNT)
    ]
    return _core.Profile(
        name="even", forward_ns=1.2e8, backward_ns=1.2e8, tensors=tensors, world_size=2,
        link=linear(alpha_ns, beta_ns_per_byte),
    )  # fmt: skip


def baseline_and_predictions(given):
    """The baseline plan, and what each number of buckets of one size takes, one after the other."""
    predicted = {}
    for cap in (1, 4, 8, 25):
        plan = ddp_baseline.plan(given, ddp_baseline.same_caps(cap), in_flight=1)
        predicted[len(plan.blocks)] = plan.predicted_ns
    return proposals.baseline_plan(given), predicted


def one_by_one_ns(given, plan):
    blocks = [_core.Block(ranges=block.ranges) for block in plan.blocks]
    return _core.play(given, given.link, _core.Plan(blocks=blocks, mode="hook", in_flight=1)).iteration_ns


@pytest.mark.parametrize("beta_ns_per_byte", [0.01, 0.1])
def test_of_buckets_that_are_as_good_the_fewest(beta_ns_per_byte):
    given = profile(beta_ns_per_byte)
    plan, predicted = baseline_and_predictions(given)
    best_ns = min(predicted.values())
    good = [blocks for blocks, ns in predicted.items() if ns <= 1.002 * best_ns]
    assert len(plan.blocks) == min(good) < max(good)
    assert plan.in_flight == ddp_baseline.IN_FLIGHT, "nobody waits for one bucket before the next one is sent"
    assert one_by_one_ns(given, plan) <= 1.002 * best_ns


def test_small_buckets_where_they_are_better():
    given = profile(8.0)
    plan, predicted = baseline_and_predictions(given)
    assert len(plan.blocks) == COUNT
    assert one_by_one_ns(given, plan) == pytest.approx(predicted[COUNT])
    assert predicted[COUNT] < 0.99 * min(ns for blocks, ns in predicted.items() if blocks < COUNT)


def test_large_ones_where_starting_is_expensive():
    plan, _ = baseline_and_predictions(profile(0.1, alpha_ns=5e7))
    assert len(plan.blocks) == 1


def test_a_small_first_bucket_where_the_network_must_begin_early():
    given = profile(25.0)
    plan, predicted = baseline_and_predictions(given)
    first, *others = [block.size_bytes for block in plan.blocks]
    assert first == MIB, "every other first bucket begins later, and all that follows"
    assert len(plan.blocks) < COUNT
    assert max(others) > MIB
    assert one_by_one_ns(given, plan) <= 1.002 * min(predicted.values())


def test_a_start_up_cost_is_not_hidden_behind_another_bucket():
    given = profile(9.4, alpha_ns=8e6)
    hidden = {cap: ddp_baseline.plan(given, ddp_baseline.same_caps(cap)) for cap in (1, 4)}
    assert hidden[1].predicted_ns < 0.99 * hidden[4].predicted_ns, "two in flight: play would take the small ones"
    plan, predicted = baseline_and_predictions(given)
    assert predicted[COUNT] > 1.05 * predicted[len(hidden[4].blocks)]
    assert len(plan.blocks) < COUNT
    assert one_by_one_ns(given, plan) <= 1.002 * min(predicted.values())
