"""The closing sentence says what limits the training, and that scheduling cannot help where it cannot."""

import gradcast
from gradcast import _core
from gradcast.comparison.compare import compare
from gradcast.comparison.verdict import verdict


def sentence(profile, bandwidth_gbit_per_s, policies=("forecast", "ddp"), workers=8, **options):
    hop = _core.Hop(latency_ns=50e3, bandwidth_bytes_per_s=bandwidth_gbit_per_s * 1e9 / 8)
    return verdict(compare(profile, _core.ring_link(hop, workers), policies, **options))


def resnet50():
    return gradcast.load_profile("resnet50", 0.5)


def test_where_the_network_is_the_limit():
    text = sentence(resnet50(), 5)
    assert text.startswith("The network is the limit: no schedule can go below ")
    assert "forecast reaches" in text
    assert "DDP" in text
    assert text.endswith("Scheduling saves at most 24 % of DDP's time.")


def test_where_the_network_is_so_slow_that_only_fewer_bytes_help():
    text = sentence(resnet50(), 1)
    assert "times as long as compute: fewer bytes or a faster network would save more." in text


def test_where_compute_is_the_limit():
    text = sentence(resnet50(), 10)
    assert text.startswith("Compute is the limit: it takes 222 ms alone, and all traffic can hide behind it;")
    assert text.endswith("Scheduling saves at most 6.5 % of DDP's time.")


def test_where_scheduling_cannot_help():
    assert "Scheduling cannot help here: DDP is within" in sentence(resnet50(), 400)
    assert "Scheduling cannot help here: DDP is within" in sentence(resnet50(), 10, workers=1)


def test_where_the_wire_is_busy_from_beginning_to_end():
    """One tensor, ready last and needed first: nothing can be hidden, so nothing can be scheduled."""
    tensor = gradcast.Tensor(name="all", bytes=100_000_000, ready_ns=1e6, need_ns=0)
    profile = gradcast.Profile(name="one", forward_ns=1e6, backward_ns=1e6, tensors=[tensor])
    # Two halves of an all-reduce cost what a whole one costs in this formula, so no kind of operation helps either.
    text = sentence(profile, 1)
    assert "The network is the limit" in text
    assert "Scheduling cannot help here" in text
    assert "Fewer bytes" in text


def test_hook_mode_has_a_sentence_of_its_own_bound():
    text = sentence(resnet50(), 5, mode="hook")
    assert text.startswith("The network is the limit")
    assert "with all-reduces alone" not in text
    assert text.endswith("In overlap mode a schedule could come down to 289 ms.")


def test_the_best_shown_may_be_ddp_itself():
    text = sentence(resnet50(), 5, policies=("ddp", "fifo"))
    assert "DDP 381 ms is the best of these" in text


def test_a_policy_that_fails_is_named_not_dropped():
    """p3 with its small slices is refused for a tensor of a terabyte; the others still have their rows."""
    tensor = gradcast.Tensor(name="huge", bytes=2**52, ready_ns=1e6, need_ns=0)
    profile = gradcast.Profile(name="huge", forward_ns=1e6, backward_ns=1e6, tensors=[tensor])
    link = gradcast.LinkModel(all_reduce=[gradcast.LinkPiece(alpha_ns=1, beta_ns_per_byte=0)])
    comparison = compare(profile, link, ["p3", "ddp"])
    assert [row.policy for row in comparison.rows] == ["ddp"]
    assert "slice_elements" in comparison.skipped["p3"]
