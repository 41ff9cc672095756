"""The closing sentence says what limits the training, and that scheduling cannot help where it cannot."""

import pytest

import gradcast
from gradcast import _core
from gradcast.comparison.compare import compare
from gradcast.comparison.verdict import verdict


def sentence(profile, bandwidth_gbit_per_s, policies=("forecast", "ddp"), workers=8, **options):
    hop = _core.Hop(latency_ns=50e3, bandwidth_bytes_per_s=bandwidth_gbit_per_s * 1e9 / 8)
    return verdict(compare(profile, _core.ring_link(hop, workers), policies, **options))


NETWORK = "The network is the limit: no schedule can go below "
COMPUTE = "Compute is the limit: it takes 222 ms alone, and all traffic can hide behind it;"
HOPELESS = "Scheduling cannot help here: DDP is within"
FEWER_BYTES = "times as long as compute: fewer bytes or a faster network would save more."


@pytest.mark.parametrize(
    ("gbit_per_s", "options", "parts"),
    [
        (5, {}, [NETWORK, "forecast reaches", "DDP", "Scheduling saves at most 24 % of DDP's time."]),
        (1, {}, [NETWORK, FEWER_BYTES]),
        (10, {}, [COMPUTE, "Scheduling saves at most 6.5 % of DDP's time."]),
        (400, {}, ["Compute is the limit", HOPELESS]),
        (10, {"workers": 1}, ["Compute is the limit", HOPELESS]),
        # Hook mode has a sentence of its own bound.
        (5, {"mode": "hook"}, [NETWORK, "In overlap mode a schedule could come down to 289 ms."]),
        # The best shown may be DDP itself.
        (5, {"policies": ("ddp", "fifo")}, [NETWORK, "DDP 381 ms is the best of these"]),
    ],
)
def test_what_limits_a_training_and_what_scheduling_gains(gbit_per_s, options, parts):
    text = sentence(gradcast.load_profile("resnet50", 0.5), gbit_per_s, **options)
    assert text.startswith(parts[0])
    assert [part for part in parts if part not in text] == []
    # Only the bound over all kinds of operation is compared with that of all-reduces.
    assert "with all-reduces alone" not in text or options.get("mode") != "hook"


def test_where_the_wire_is_busy_from_beginning_to_end():
    """One tensor, ready last and needed first: nothing can be hidden, so nothing can be scheduled."""
    tensor = gradcast.Tensor(name="all", bytes=100_000_000, ready_ns=1e6, need_ns=0)
    profile = gradcast.Profile(name="one", forward_ns=1e6, backward_ns=1e6, tensors=[tensor])
    # Two halves of an all-reduce cost what a whole one costs in this formula, so no kind of operation helps either.
    text = sentence(profile, 1)
    assert "The network is the limit" in text
    assert "Scheduling cannot help here" in text
    assert "Fewer bytes" in text


def test_a_policy_that_fails_is_named_not_dropped():
    """p3 with its small slices is refused for a tensor of a terabyte; the others still have their rows."""
    tensor = gradcast.Tensor(name="huge", bytes=2**52, ready_ns=1e6, need_ns=0)
    profile = gradcast.Profile(name="huge", forward_ns=1e6, backward_ns=1e6, tensors=[tensor])
    link = gradcast.LinkModel(all_reduce=[gradcast.LinkPiece(alpha_ns=1, beta_ns_per_byte=0)])
    comparison = compare(profile, link, ["p3", "ddp"])
    assert [row.policy for row in comparison.rows] == ["ddp"]
    assert "slice_elements" in comparison.skipped["p3"]
