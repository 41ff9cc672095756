"""A measured profile for more or fewer workers: the link changes as growth.py says, and nothing else."""

import pytest

from gradcast import LinkModel, LinkPiece, Profile, Tensor
from gradcast.comparison.measured_exchange import MeasuredExchange, exchange_of, with_exchange
from gradcast.host_traffic import FLAT, RING, TWO_LEVEL, Hosts, leaving_share
from gradcast.scaling.other_workers import for_workers, why_not


def on(count, ranks_per_host=1, form=RING, wire="fp32", backend="gloo"):
    return MeasuredExchange(Hosts.even(count, ranks_per_host), form, wire, backend)


def uneven(*host_of):
    return MeasuredExchange(Hosts(host_of), RING, "fp32")


def profile_of(exchange):
    small = LinkPiece(alpha_ns=50_000, beta_ns_per_byte=1.5, up_to_bytes=1 << 20)
    pieces = [small, LinkPiece(alpha_ns=600_000, beta_ns_per_byte=1.0)]
    tensors = [Tensor(name="a", bytes=4000, buffer=0, element_bytes=4, ready_ns=10, need_ns=0, update_ns=1)]
    profile = Profile(
        name="measured",
        forward_ns=20,
        backward_ns=30,
        tensors=tensors,
        world_size=len(exchange.hosts.host_of),
        link=LinkModel(all_reduce=pieces),
    )
    return with_exchange(profile, exchange)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (on(8), on(6)),
        (on(6), on(8)),
        (on(4, 2, TWO_LEVEL), on(3, 2, TWO_LEVEL)),
        (on(4, 2, FLAT, "bf16"), on(8, 2, FLAT, "bf16")),
    ],
)
def test_bytes_cost_as_many_as_leave_a_host_and_start_up_grows_with_the_steps(before, now):
    assert why_not(profile_of(before), now) is None
    old, new = profile_of(before), for_workers(profile_of(before), now)
    share = leaving_share(now.hosts, now.form, now.wire) / leaving_share(before.hosts, before.form, before.wire)
    counts = [len(each.hosts.host_of) if each.form == RING else each.hosts.count for each in (before, now)]
    hops = (counts[1] - 1) / (counts[0] - 1)
    was, became = (each.link.all_reduce.pieces for each in (old, new))
    assert [each.beta_ns_per_byte for each in became] == pytest.approx([share * each.beta_ns_per_byte for each in was])
    assert became[0].alpha_ns == pytest.approx(hops * was[0].alpha_ns)
    assert new.world_size == len(now.hosts.host_of)
    assert exchange_of(new) == now
    assert (new.tensors, new.forward_ns) == (old.tensors, old.forward_ns)
    back = for_workers(new, before)
    assert back.link.all_reduce.cost_ns(1 << 22) == pytest.approx(old.link.all_reduce.cost_ns(1 << 22), rel=0.05)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (on(1, 4), on(2, 4), "without a network"),
        (on(2), on(1), "without a network"),
        (on(4), on(2, 2, TWO_LEVEL), "it was measured on 4 hosts of 1 rank, this training is on 2 hosts of 2 ranks"),
        (on(4), on(3, backend="nccl"), "4 hosts of 1 rank, this training is on 3 hosts of 1 rank, over nccl"),
        (on(4), on(3, 1, FLAT, "int8"), "this training is on 3 hosts of 1 rank, int8 on the wire"),
        (
            MeasuredExchange(Hosts((0, 0, 1)), RING, "fp32"),
            MeasuredExchange(Hosts((0, 1, 1, 2)), RING, "fp32"),
            "hosts",
        ),
    ],
)
def test_what_the_profile_says_nothing_about(before, now, words):
    assert words in why_not(profile_of(before), now)


def test_a_profile_that_does_not_say_its_hosts():
    assert "on which hosts" in why_not(profile_of(on(2)).replace(extra={}), on(3))
