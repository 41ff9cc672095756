"""A new plan is held against its own first steps, and made again where the network costs something else in it."""

from unittest import mock

import pytest

import gradcast
from gradcast import _core
from training.needs import torch
from training.test_adapt import Heard, make_module, run_step

WARMUP_STEPS = 3
CALIBRATION_STEPS = 5


def linear(alpha_ns, beta_ns_per_byte):
    return _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte)])


def steps_on(link, sizes, factor=1.0, disturbed=None):
    """Four steps of blocks that take ``factor`` times what the link says; the blocks of one step ten times as long."""
    cost = link.all_reduce.cost_ns
    return [[(size, (10 if step == disturbed else 1) * factor * cost(size)) for size in sizes] for step in range(4)]


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


def train(rank, mode, factor):
    from gradcast.training import link_costs

    corrected = mock.Mock(side_effect=lambda link, _: None if factor is None else link.scaled(factor, factor))
    with mock.patch.object(link_costs, "corrected", corrected):  # the process goes on with other tests
        found = train_both(rank, mode)
    assert corrected.call_count == (1 if rank.index == 0 else 0), "rank 0 decides"
    for call in corrected.call_args_list:
        assert len(call.args[1]) == CALIBRATION_STEPS - 1, "in the first step memory is allocated"
    return found


def train_both(rank, mode):
    """The versions that were followed, the plan's links, what was said, and whether the parameters are DDP's."""
    heard, seen = Heard(), []
    modules = [make_module(), make_module()]
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    options = gradcast.Options(warmup_steps=WARMUP_STEPS)
    handle = gradcast.attach(modules[0], sgds[0] if mode == "overlap" else None, options=options)
    steps = WARMUP_STEPS + CALIBRATION_STEPS + 3
    for step in range(steps):
        run_step(rank, step, modules[0], sgds[0])
        link = handle.profile and handle.profile.link.to_json()
        seen.append((handle.plan_version, link))
    handle.detach()
    ddp = torch.nn.parallel.DistributedDataParallel(modules[1])
    for step in range(steps):
        run_step(rank, step, ddp, sgds[1])
    equal = all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in modules), strict=True))
    return seen, [line for line in heard.lines if "warm-up has found" in line], equal


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_where_it_costs_more_all_ranks_plan_again_at_the_same_step(ranks, mode):
    results = ranks.run(2, train, mode, 3.0)
    for index, (seen, lines, equal) in enumerate(results):
        assert equal, "the parameters are not DDP's"
        assert seen == results[0][0]
        assert len(lines) == (1 if index == 0 else 0), "one rank speaks for all"
    versions = [version for version, _ in results[0][0]]
    before, after = WARMUP_STEPS + CALIBRATION_STEPS, WARMUP_STEPS + CALIBRATION_STEPS + 1
    assert versions[before - 1 : after + 1] == [4, 5, 5]
    costs = [_core.LinkModel.from_json(results[0][0][step][1]).all_reduce.cost_ns(1000) for step in (before - 1, after)]
    assert costs[1] == pytest.approx(3 * costs[0], rel=1e-6)
    assert "the network costs 3.00 times what the warm-up has found" in results[0][1][0]


def test_where_it_is_right_the_plan_stays(ranks):
    for seen, lines, equal in ranks.run(2, train, "overlap", None):
        assert equal
        assert lines == []
        assert {version for version, _ in seen[WARMUP_STEPS + 1 :]} == {4}
