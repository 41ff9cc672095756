"""What an all-reduce costs on other numbers of workers: the formulas turned round, and what measurements leave open."""

import itertools

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from gradcast.scaling import growth
from gradcast.scaling.growth import Cluster, Growth, Network, Nodes

HOP = _core.Hop(latency_ns=100e3, bandwidth_bytes_per_s=1.25e9)
INSIDE = _core.Hop(latency_ns=5e3, bandwidth_bytes_per_s=50e9)


def grown(*known, spread=growth.SPREAD, algorithm="ring"):
    """A network with known (workers, link)."""
    return Growth(Network("n", known, algorithm), spread)


def costs(link):
    return growth.alpha_ns(link), growth.beta_ns_per_byte(link)


# --- One measurement ---


@pytest.mark.parametrize("measured", ["ring", "tree"])
@pytest.mark.parametrize("wanted", ["ring", "tree"])
@pytest.mark.parametrize("count", [2, 3, 16, 4096])
def test_a_formula_turned_round_is_the_formula(measured, wanted, count):
    formula = {"ring": _core.ring_link, "tree": _core.tree_link}
    found = grown((4, formula[measured](HOP, 4)), algorithm=measured).estimate(wanted, count).link
    assert costs(found) == pytest.approx(costs(formula[wanted](HOP, count)))


def test_hierarchical_is_the_formula():
    network = Network("n", ((16, _core.ring_link(HOP, 16)),))
    nodes = Nodes(8, growth.from_hop("inside", INSIDE))
    found = Cluster(network, nodes).estimate("hierarchical", 64).link
    wanted = _core.hierarchical_link(intra_node=INSIDE, inter_node=HOP, node_count=8, workers_per_node=8)
    assert costs(found) == pytest.approx(costs(wanted))


@pytest.mark.parametrize(
    ("known", "algorithm", "count", "spread", "low_us", "link_us", "high_us"),
    [
        # 600 us in 6 steps are 100 us each; 8 workers have 14 in a ring; or they are no steps at all.
        ({4: (600, 1.2)}, "ring", 8, 0.1, 0.9 * 600, 1400, 1.1 * 1400),
        # A tree has 6. Had the 600 us been the 4 steps of a tree, a hop would take 150 us.
        ({4: (600, 1.2)}, "tree", 8, 0.1, 0.9 * 6 * 100, 600, 1.1 * 900),
        # All is start-up, so it grows as the bytes: 2 workers send each byte once, many of them twice.
        ({2: (10_000, 0)}, "ring", 4, 0.0, 10_000, 15_000, 30_000),
        # A start-up of nothing at the nearest measurement is none elsewhere.
        ({4: (600, 1.5), 8: (0, 1.75)}, "ring", 16, 0.1, 540, 3000, 3300),
    ],
)
def test_start_up_costs_by_hand(known, algorithm, count, spread, low_us, link_us, high_us):
    links = [(each, link_of(1e3 * alpha_us, beta)) for each, (alpha_us, beta) in known.items()]
    found = grown(*links, spread=spread).estimate(algorithm, count)
    alphas_us = [growth.alpha_ns(link) / 1e3 for link in (found.low, found.link, found.high)]
    assert alphas_us == pytest.approx([low_us, link_us, high_us], rel=1e-3)


def test_a_measured_number_of_workers_keeps_its_link():
    link = link_of(600e3, 1.2)
    known = grown((4, link), spread=0.05)
    found = known.estimate("ring", 4)
    assert (found.basis, known.estimate("tree", 4).basis) == ("measured", "extrapolated")
    assert costs(found.link) == costs(link)
    assert costs(found.low) == pytest.approx((0.95 * 600e3, 0.95 * 1.2))
    assert costs(found.high) == pytest.approx((1.05 * 600e3, 1.05 * 1.2))


def test_a_given_network_is_never_measured_and_grows_as_its_formula_says():
    known = Growth(growth.from_hop("given", HOP), spread=0.1)
    assert known.estimate("ring", 2).basis == "extrapolated"
    assert costs(known.estimate("ring", 64).low)[0] == pytest.approx(0.9 * 126 * 100e3)


def bent(end_bytes, alpha_ns, beta_ns_per_byte, alpha_after_ns, beta_after, pack_ns_per_byte=0):
    first = _core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte, up_to_bytes=end_bytes)
    last = _core.LinkPiece(alpha_ns=alpha_after_ns, beta_ns_per_byte=beta_after)
    return _core.LinkModel(all_reduce=[first, last], pack_ns_per_byte=pack_ns_per_byte)


def pieces(link):
    return [(piece.up_to_bytes, piece.alpha_ns, piece.beta_ns_per_byte) for piece in link.all_reduce.pieces]


def test_breakpoints_are_kept():
    found = grown((4, bent(10_000, 100e3, 3, 120e3, 1.5))).estimate("ring", 16).link
    first, last = pieces(found)
    assert first == (10_000, pytest.approx(500e3), pytest.approx(3.75))
    assert last == (None, pytest.approx(600e3), pytest.approx(1.875))


def test_the_nearest_measurement_lends_its_breakpoints_and_of_two_as_near_the_larger():
    known = [(count, bent(1000 * count, *[1e5, growth.byte_share(count)] * 2)) for count in (2, 8)]
    ends = {count: pieces(grown(*known).estimate("ring", count).link)[0][0] for count in (3, 4, 64)}
    assert ends == {3: 2_000, 4: 8_000, 64: 8_000}


def test_blocks_of_one_size_and_of_several_are_not_put_together():
    with pytest.raises(gradcast.Error, match="no cost per byte on 2 workers") as caught:
        grown((2, link_of(10e6, 0)), (8, link_of(700e3, 1.75)))
    assert len(str(caught.value).splitlines()) == 1


def test_hierarchical_keeps_the_breakpoints_and_the_packing_of_both():
    inside = Network("inside", ((4, bent(1_000, 1e3, 1, 2e3, 1, 0.25)),))
    between = Network("n", ((8, bent(9_000, 1e6, 1, 2e6, 1)),))
    found = Cluster(between, Nodes(4, inside)).estimate("hierarchical", 32).link
    # 8 nodes take the 14 steps of the 8 workers.
    alphas = [(end, pytest.approx(alpha_ns)) for end, alpha_ns, _ in pieces(found)]
    assert alphas == [(1_000, 1e6 + 1e3), (9_000, 1e6 + 2e3), (None, 2e6 + 2e3)]
    assert found.pack_ns_per_byte == 0.25


# --- Several measurements ---


def test_several_measurements_tell_steps_from_the_rest():
    known = tuple((count, link_of(300e3 + 2 * (count - 1) * 50e3, growth.byte_share(count))) for count in (2, 4, 8))
    found = growth.fit_start_up("ring", [(count, growth.alpha_ns(link)) for count, link in known])
    assert (found.fixed_ns, found.hop_ns) == pytest.approx((300e3, 50e3))
    estimate = grown(*known, spread=0.02).estimate("ring", 64)
    assert costs(estimate.link) == pytest.approx((300e3 + 126 * 50e3, growth.byte_share(64)))
    # That nothing grows, or all as a tree's steps, is ruled out now.
    assert 0.95 * (300e3 + 126 * 50e3) < costs(estimate.low)[0] < 0.98 * (300e3 + 126 * 50e3)
    # Measurements that may be off by 10 % still allow a tree, but not that nothing grows.
    low_ns = costs(grown(*known, spread=0.1).estimate("ring", 64).low)[0]
    assert 0.9 * 1000e3 < low_ns < 0.8 * (300e3 + 126 * 50e3)


def test_the_band_of_two_measurements_by_hand():
    """400 us in 2 steps, 800 us in 6: 100 us a step. Either may be off by a tenth, and the slope by three of them."""
    known = ((2, link_of(400e3, 1.0)), (8, link_of(800e3, 1.75)))
    found = grown(*known, spread=0.1, algorithm="tree").estimate("tree", 64)
    assert growth.alpha_ns(found.link) == pytest.approx(400e3 + 10 * 100e3)
    assert growth.alpha_ns(found.low) == pytest.approx(440e3 + 10 * 70e3)
    assert growth.alpha_ns(found.high) == pytest.approx(360e3 + 10 * 130e3)


def test_the_published_start_up_costs_are_in_the_bands_of_the_smaller_ones():
    costs_of = growth.published("10gbe").costs
    for known in (1, 2, 3):
        for count, link in costs_of[known:]:
            found = grown(*costs_of[:known]).estimate("ring", count)
            assert growth.alpha_ns(found.low) <= growth.alpha_ns(link) <= growth.alpha_ns(found.high)


def test_the_corners_of_a_fit_are_all_that_matter():
    known = [(2, 310e3), (4, 500e3), (16, 900e3), (32, 2000e3), (128, 6000e3)]
    signs = itertools.product((0.85, 1.15), repeat=len(known))
    every = [[(count, value * factor) for (count, value), factor in zip(known, each, strict=True)] for each in signs]
    for count in (3, 8, 64, 4096):
        found = [
            [growth.fit_start_up("ring", corner).at("ring", count) for corner in corners]
            for corners in (every, growth.corners(known, 0.15))
        ]
        assert (min(found[0]), max(found[0])) == pytest.approx((min(found[1]), max(found[1])))


def test_a_way_to_grow_that_fits_better_than_the_rings_is_allowed():
    """Nearly a tree's steps, of 100 us: off by less than the ring's fit, by more than the spread."""
    known = ((4, link_of(400e3, 1.5)), (8, link_of(600e3, 1.75)), (16, link_of(820e3, 1.875)))
    found = grown(*known, spread=0.0).estimate("ring", 1024)
    assert 1500e3 < growth.alpha_ns(found.low) < 2000e3
    assert growth.alpha_ns(found.link) > 10_000e3


def test_measurements_that_disagree_widen_the_band():
    """Wires of 1 and 2 ns per byte: the mean is a third away from either."""
    known = ((2, link_of(100e3, growth.byte_share(2))), (4, link_of(300e3, 2 * growth.byte_share(4))))
    found = grown(*known, spread=0.1).estimate("ring", 16)
    betas = [growth.beta_ns_per_byte(link) / growth.byte_share(16) for link in (found.low, found.link, found.high)]
    assert betas == pytest.approx([1.0, 1.5, 2.0])


@pytest.mark.parametrize(
    ("alphas", "is_fixed"),
    [((400e3, 300e3, 200e3), True), ((100e3, 100e3, 100e3), True), ((100e3, 900e3, 2500e3), False)],
)
def test_a_start_up_that_does_not_grow_has_no_steps_and_one_that_outgrows_them_is_all_steps(alphas, is_fixed):
    found = growth.fit_start_up("ring", list(zip((2, 4, 8), alphas, strict=True)))
    assert (found.hop_ns == 0, found.fixed_ns == 0) == (is_fixed, not is_fixed)
    assert not is_fixed or min(alphas) <= found.fixed_ns <= max(alphas)


def test_published_networks():
    """A family has all its numbers of workers but those that were scaled from others, which are not measured."""

    def counts(name):
        return [count for count, _ in growth.published(name).costs]

    assert [counts(name) for name in ("10gbe", "10gbe-16", "56gbib")] == [[8, 16, 32, 64], [16], [8, 16]]
    for count, basis in ((32, "extrapolated"), (16, "measured")):
        assert Growth(growth.published(f"56gbib-{count}")).estimate("ring", count).basis == basis
    with pytest.raises(gradcast.Error, match="carrier-pigeon"):
        growth.published("carrier-pigeon")


def test_only_known_algorithms_were_measured():
    with pytest.raises(gradcast.Error, match="cannot be measured with nccl; write ring or tree"):
        Network("n", ((4, link_of(600e3, 1.2)),), "nccl")


@pytest.mark.parametrize(
    ("known", "nodes", "algorithm", "count", "words"),
    [
        (4, Nodes(4), "ring", 8, "between nodes"),
        (8, Nodes(4), "ring", 4, "inside a node"),
        (8, Nodes(4), "hierarchical", 16, "inside a node"),
        (4, None, "hierarchical", 8, "nodes of several workers"),
        (8, Nodes(4, growth.from_hop("i", INSIDE)), "hierarchical", 10, "10 workers do not fill nodes of 4 workers"),
    ],
)
def test_what_cannot_be_predicted_has_a_reason(known, nodes, algorithm, count, words):
    assert words in Cluster(Network("n", ((known, link_of(1e5, 1)),)), nodes).why_not(algorithm, count)
