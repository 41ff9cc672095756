"""The DDP baseline: DDP's buckets with the best sizes, and no more of them than that needs."""

import pytest

from conftest import link_of
from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.comparison.measured_exchange import MeasuredExchange, with_exchange
from gradcast.host_traffic import RING, Hosts

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
    assert plan.in_flight == 2, "nobody waits for one bucket before the next one is sent"
    one_size = [ddp_baseline.plan(given, ddp_baseline.same_caps(cap), at_a_time=1) for cap in (1, 4, 8, 25)]
    assert one_by_one_ns(given, plan) <= 1.002 * min(each.predicted_ns for each in one_size)


def over(backend, given):
    return with_exchange(given, MeasuredExchange(Hosts.even(2, 1), RING, "fp32", backend))


def test_nccl_carries_one_bucket_at_a_time():
    """Two in flight would hide the start-up cost of one behind the other, and DDP would look too fast."""
    given = profile(9.4, 8e6)
    by_backend = {name: proposals.baseline_plan(over(name, given)) for name in ("gloo", "nccl", "mpi")}
    assert {name: plan.in_flight for name, plan in by_backend.items()} == {"gloo": 2, "nccl": 1, "mpi": 1}
    ranges = {tuple(block.ranges for block in plan.blocks) for plan in by_backend.values()}
    assert len(ranges) == 1, "the choice of sizes is the same"
    assert by_backend["nccl"].predicted_ns == one_by_one_ns(given, by_backend["nccl"])
    assert by_backend["gloo"].predicted_ns < by_backend["nccl"].predicted_ns
