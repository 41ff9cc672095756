"""The bytes that leave a host: published formulas, and a count of every message by hand."""

import itertools

import pytest

from gradcast.host_traffic import (
    FLAT,
    RING,
    TWO_LEVEL,
    WIRE_SHARES,
    Hosts,
    leaving_share,
    saves_nothing,
    wire_cost,
)


@pytest.mark.parametrize(
    ("hosts", "ring", "bf16", "int8", "two_level"),
    [
        (Hosts.even(2, 4), 1.75, 2.0, 1.03, (1.0, 0.5, 0.26)),
        (Hosts.even(4, 8), 1.94, 6.0, 3.09, (1.5, 0.75, 0.39)),
        (Hosts.even(2, 2), 1.5, 1.0, 0.52, (1.0, 0.5, 0.26)),
        (Hosts.even(4, 1), 1.5, 0.75, 0.39, (1.5, 0.75, 0.39)),
    ],
)
def test_bytes_of_even_hosts(hosts, ring, bf16, int8, two_level):
    def near(share):
        return pytest.approx(share, abs=0.005)

    assert leaving_share(hosts, RING) == near(ring)
    assert [leaving_share(hosts, FLAT, wire) for wire in ("bf16", "fp16", "int8")] == [
        near(bf16),
        near(bf16),
        near(int8),
    ]
    assert [leaving_share(hosts, TWO_LEVEL, wire) for wire in ("fp32", "bf16", "int8")] == [near(x) for x in two_level]
    assert wire_cost(hosts, "bf16", form=TWO_LEVEL, fp32_form=TWO_LEVEL) == pytest.approx(0.5)


def counted(host_of, form, wire):
    """Every message of an all-reduce of one byte of fp32, between ranks on different hosts."""
    ranks, sent = len(host_of), [0.0] * len(host_of)
    if form == FLAT:
        messages = [(a, b, 2 * WIRE_SHARES[wire] / ranks) for a, b in itertools.permutations(range(ranks), 2)]
    else:
        messages = [(rank, (rank + 1) % ranks, 2 * (ranks - 1) / ranks) for rank in range(ranks)]
    for sender, receiver, size in messages:
        if host_of[sender] != host_of[receiver]:
            sent[host_of[sender]] += size
    return max(sent)


@pytest.mark.parametrize(
    "host_of", [(0, 0, 0, 1), (0, 1, 0, 1), (0, 1, 1, 2, 0), (0, 0, 1, 1, 2, 2), (0, 1, 2), (0, 0)]
)
def test_bytes_of_any_hosts(host_of):
    for form, wire in ((RING, "fp32"), (FLAT, "bf16"), (FLAT, "int8")):
        assert leaving_share(Hosts(host_of), form, wire) == pytest.approx(counted(host_of, form, wire))


def test_what_is_known_of_hosts():
    even, mixed = Hosts.even(2, 2), Hosts((0, 1, 0))
    assert (even.host_of, even.count, even.ranks_per_host) == ((0, 0, 1, 1), 2, 2)
    assert (mixed.count, mixed.sizes, mixed.ranks_per_host) == (2, (2, 1), None)
    assert (Hosts((0,)).describe(), mixed.describe()) == ("1 host of 1 rank", "2 hosts with 3 ranks in all")


def test_a_wire_format_that_sends_more_is_told_with_both_numbers():
    sentence = saves_nothing(Hosts.even(4, 8), "bf16", on_device=True)
    assert sentence.startswith("bf16 on the wire saves nothing on 4 hosts of 8 ranks: 6.00 times")
    assert sentence.endswith("with fp32 1.94 times")
    assert saves_nothing(Hosts.even(2, 4), "bf16", on_device=True)
    assert saves_nothing(Hosts((0, 0, 0, 0, 1, 1, 1, 2)), "bf16"), "uneven hosts exchange on one level"
    for hosts, wire in (
        (Hosts.even(4, 8), "bf16"),
        (Hosts.even(2, 2), "bf16"),
        (Hosts.even(64, 1), "fp16"),
        (Hosts.even(4, 8), "fp32"),
    ):
        assert saves_nothing(hosts, wire) is None
    assert wire_cost(Hosts.even(8, 1), "bf16") == wire_cost(Hosts.even(1, 8), "bf16", on_device=True) == 0.5
    assert wire_cost(Hosts.even(1, 8), "int8") == 1.0
    assert saves_nothing(Hosts.even(1, 8), "int8").endswith("on 1 host of 8 ranks: no gradient leaves it")
