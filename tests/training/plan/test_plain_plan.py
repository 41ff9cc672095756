"""The DDP baseline: DDP's buckets with the best sizes, and no more of them than that needs."""

import pytest

from conftest import link_of
from gradcast import _core
from gradcast.comparison import ddp_baseline

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
        link=link_of(alpha_ns, beta_ns_per_byte),
    )  # fmt: skip


def one_by_one_ns(given, plan):
    blocks = [_core.Block(ranges=block.ranges) for block in plan.blocks]
    return _core.play(given, given.link, _core.Plan(blocks=blocks, mode="hook", in_flight=1)).iteration_ns


@pytest.mark.parametrize(
    ("beta_ns_per_byte", "alpha_ns", "buckets_mib"),
    [
        # Of buckets that are as good, the fewest.
        (0.01, 0, [12]),
        (0.1, 0, [9, 3]),
        # Small ones where they are better, large ones where a start is expensive.
        (8.0, 0, [1] * 12),
        (0.1, 5e7, [12]),
        # A small first one where the network must begin early.
        (25.0, 0, [1, 2, 2, 2, 2, 2, 1]),
        # With two in flight, play would hide a start-up cost behind another bucket, and take the small ones.
        (9.4, 8e6, [3, 3, 3, 3]),
    ],
)
def test_the_best_sizes(beta_ns_per_byte, alpha_ns, buckets_mib):
    given = profile(beta_ns_per_byte, alpha_ns)
    plan = proposals.baseline_plan(given)
    assert [block.size_bytes / MIB for block in plan.blocks] == buckets_mib
    assert plan.in_flight == ddp_baseline.IN_FLIGHT, "nobody waits for one bucket before the next one is sent"
    one_size = [ddp_baseline.plan(given, ddp_baseline.same_caps(cap), in_flight=1) for cap in (1, 4, 8, 25)]
    assert one_by_one_ns(given, plan) <= 1.002 * min(each.predicted_ns for each in one_size)
