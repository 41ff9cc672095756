"""Other numbers of workers: the formulas turned round, the band, the knee, and the command that shows them."""

import itertools
import json

import pytest

import gradcast
from gradcast import _core
from gradcast.cli.simulate_scaling import sentence
from gradcast.scaling import estimate as scaling
from gradcast.scaling import growth
from gradcast.scaling.growth import Cluster, Growth, Network, Nodes

PNG = b"\x89PNG\r\n"
HOP = _core.Hop(latency_ns=100e3, bandwidth_bytes_per_s=1.25e9)
INSIDE = _core.Hop(latency_ns=5e3, bandwidth_bytes_per_s=50e9)


def line(alpha_ns, beta_ns_per_byte):
    return _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte)])


def grown(*known, spread=growth.SPREAD, algorithm="ring"):
    """A network with known (workers, link)."""
    return Growth(Network("n", known, algorithm), spread)


def costs(link):
    return growth.alpha_ns(link), growth.beta_ns_per_byte(link)


def small(world_size=4, link=None, *, backward_ns=6e6, parts=1):
    """1 MB of gradients that come at the end of backward and are needed at once: a step is compute and the traffic."""
    tensors = [
        gradcast.Tensor(name=str(part), bytes=1_000_000 // parts, ready_ns=backward_ns, need_ns=0)
        for part in range(parts)
    ]
    return gradcast.Profile(
        name="small", forward_ns=3e6, backward_ns=backward_ns, tensors=tensors, world_size=world_size, link=link
    )


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
    links = [(each, line(1e3 * alpha_us, beta)) for each, (alpha_us, beta) in known.items()]
    found = grown(*links, spread=spread).estimate(algorithm, count)
    alphas_us = [growth.alpha_ns(link) / 1e3 for link in (found.low, found.link, found.high)]
    assert alphas_us == pytest.approx([low_us, link_us, high_us], rel=1e-3)


def test_a_measured_number_of_workers_keeps_its_link():
    link = line(600e3, 1.2)
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
        grown((2, line(10e6, 0)), (8, line(700e3, 1.75)))
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
    known = tuple((count, line(300e3 + 2 * (count - 1) * 50e3, growth.byte_share(count))) for count in (2, 4, 8))
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
    known = ((2, line(400e3, 1.0)), (8, line(800e3, 1.75)))
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
            for corners in (every, growth._corners(known, 0.15))
        ]
        assert (min(found[0]), max(found[0])) == pytest.approx((min(found[1]), max(found[1])))


def test_a_way_to_grow_that_fits_better_than_the_rings_is_allowed():
    """Nearly a tree's steps, of 100 us: off by less than the ring's fit, by more than the spread."""
    known = ((4, line(400e3, 1.5)), (8, line(600e3, 1.75)), (16, line(820e3, 1.875)))
    found = grown(*known, spread=0.0).estimate("ring", 1024)
    assert 1500e3 < growth.alpha_ns(found.low) < 2000e3
    assert growth.alpha_ns(found.link) > 10_000e3


def test_measurements_that_disagree_widen_the_band():
    """Wires of 1 and 2 ns per byte: the mean is a third away from either."""
    known = ((2, line(100e3, growth.byte_share(2))), (4, line(300e3, 2 * growth.byte_share(4))))
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
    profile, options = small(4, line(600e3, 1.2)), scaling.Options(measured_algorithm="nccl")
    with pytest.raises(gradcast.Error, match="cannot be measured with nccl; write ring or tree"):
        scaling.band(profile, options)


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
    assert words in Cluster(Network("n", ((known, line(1e5, 1)),)), nodes).why_not(algorithm, count)


# --- The band ---


def test_steps_of_a_band_by_hand():
    """9 ms of compute and an operation of 1 MB: 0.6 + 1.2 ms on 4 workers, 1.4 + 1.4 ms on 8."""
    found = scaling.band(small(4, line(600e3, 1.2)), scaling.Options(workers=(8,), algorithms=("ring",)))
    four, eight = found.points
    assert (four.workers, four.basis, four.step_ns) == (4, "measured", pytest.approx(10.8e6))
    assert (eight.workers, eight.basis, eight.step_ns) == (8, "extrapolated", pytest.approx(11.8e6))
    assert eight.efficiency == pytest.approx(9 / 11.8)
    assert eight.throughput == pytest.approx(8 * 9 / 11.8)
    assert eight.low_ns == pytest.approx(9e6 + 0.9 * (0.6e6 + 1.4e6))
    assert eight.high_ns == pytest.approx(9e6 + 1.1 * (1.4e6 + 1.4e6))
    assert eight.bound_ns == pytest.approx(11.8e6)
    assert eight.ddp_ns >= eight.step_ns


def test_the_band_holds_its_middle_and_steps_only_grow():
    profile = gradcast.load_profile("resnet50", 0.5)
    nodes = Nodes(4, growth.published("nvlink-v100"))
    found = scaling.band(profile, scaling.Options(networks=(growth.published("10gbe"),), nodes=nodes))
    assert set(found.curves()) == {("10gbe", name) for name in growth.ALGORITHMS}
    for points in found.curves().values():
        assert [point.workers for point in points] == sorted(scaling.WORKERS)
        assert all(point.low_ns <= point.step_ns <= point.high_ns for point in points)
        assert all(0 < point.efficiency <= 1 for point in points)
        assert all(point.step_ns >= point.bound_ns * (1 - 1e-9) for point in points)
        between = [point.step_ns for point in points if point.workers > 64]
        assert between == sorted(between)


def test_compute_is_that_of_the_nearest_profile():
    slow, fast = small(8, line(0, 0), backward_ns=9e6), small(2, line(0, 0))
    found = scaling.band([slow, fast], scaling.Options(workers=(2, 64), algorithms=("ring",)))
    steps = {point.workers: point.step_ns for point in found.points}
    assert steps == {2: pytest.approx(9e6), 8: pytest.approx(12e6), 64: pytest.approx(12e6)}
    assert found.points[-1].efficiency == pytest.approx(0.75)
    # As far from either: the one on more workers.
    found = scaling.band([slow, fast], scaling.Options(workers=(4,), algorithms=("ring",)))
    assert {point.workers: point.step_ns for point in found.points}[4] == pytest.approx(12e6)


@pytest.mark.parametrize(
    ("steps", "knee"),
    [
        ([(2, 10), (4, 10), (8, 10)], None),
        ([(2, 10), (4, 10), (8, 14), (16, 30)], 4),  # 2 x 10/14 is below 1.5 already
        ([(2, 10), (4, 10), (8, 13), (16, 30)], 8),
        ([(2, 10), (4, 15), (8, 16), (16, 30)], 8),  # the first doubling does not pay, the second does
        ([(2, 10), (4, 30), (8, 90)], 2),
        ([(4, 10), (6, 12), (8, 16)], 4),  # half as many again: 1.27 times the throughput would pay, 1.25 do not
        ([(4, 10)], None),
    ],
)
def test_the_knee_is_the_last_number_that_pays(steps, knee):
    assert scaling.knee(steps) == knee


def test_what_does_not_pay_before_the_knee():
    assert scaling.unpaid([(1, 9), (2, 20), (4, 22), (8, 24), (16, 60), (32, 130)]) == ((1, 2),)
    assert scaling.unpaid([(1, 10), (2, 15), (4, 15), (8, 22), (16, 23)]) == ((1, 2), (4, 8))
    assert scaling.unpaid([(1, 10), (2, 30), (4, 90)]) == ()


def test_the_knee_is_counted_from_one_worker():
    """9 ms of compute: two workers take 40 ms, four 80 ms."""
    found = scaling.band(small(2, line(31e6, 0)), scaling.Options(workers=(2, 4), algorithms=("tree",), spread=0.0))
    assert (found.knee, found.worth_trying) == (1, ())
    assert "the knee is at one worker; no doubling" in sentence(found)


def test_the_knee_is_of_the_algorithm_that_was_measured():
    options = scaling.Options(workers=(2, 8), measured_algorithm="tree")
    assert next(iter(scaling.band(small(4, line(600e3, 1.2)), options).curves())) == ("measured", "tree")


def test_worth_trying_ends_at_the_knee_and_where_samples_are_dear():
    def points(efficiencies):
        return [
            scaling.Point(workers, "n", "ring", 1e6 / share, 1e6 / share, 1e6 / share, share, "measured", 1e6, 1e6)
            for workers, share in efficiencies
        ]

    assert scaling.worth_trying(points([(2, 1.0), (4, 0.9), (8, 0.5), (16, 0.2)]), 4) == (2, 4)
    # Two workers that do less than one are not worth it; in the end a sample takes twice what it did.
    assert scaling.worth_trying(points([(2, 0.45), (4, 0.40), (8, 0.35), (16, 0.27), (32, 0.21)]), None) == (4, 8, 16)


def test_the_knee_has_a_range():
    found = scaling.band(small(4, line(600e3, 1.2)), scaling.Options(algorithms=("ring",)))
    assert found.knee is not None
    assert found.knee_low <= found.knee
    # If nothing of the start-up grows, any number of workers pays.
    assert found.knee_high is None


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ([small(4)], "has no link"),
        ([small(1, line(1, 1))], "was measured on one worker"),
        ([small(4, line(1, 1)), small(4, line(1, 1))], "two profiles were measured on 4 workers"),
        ([small(4, line(1, 1)), gradcast.load_profile("vgg16")], "not of one model"),
        ([small(4, line(1, 1)), small(8, line(1, 1), parts=2)], "not of one model"),
        ([], "no profile"),
    ],
)
def test_profiles_that_say_too_little(profiles, words):
    with pytest.raises(gradcast.Error, match=words):
        scaling.band(profiles)


def test_json_is_what_the_doctor_writes():
    found = scaling.band(small(4, line(600e3, 1.2)), scaling.Options(workers=(4, 8), algorithms=("ring",)))
    fields = scaling.as_json(found)
    assert json.loads(json.dumps(fields)) == fields
    assert set(fields) == {"points", "knee_workers", "worth_trying", "left_out"}
    assert fields["points"][0] == {
        "workers": 4, "network": "measured", "algorithm": "ring", "step_ms": pytest.approx(10.8),
        "low_ms": pytest.approx(9 + 0.9 * 1.8), "high_ms": pytest.approx(9 + 1.1 * 1.8),
        "efficiency": pytest.approx(9 / 10.8), "basis": "measured",
    }  # fmt: skip


# --- The command ---


@pytest.fixture
def paths(tmp_path):
    """Profiles on 2 and on 8 workers of one network."""
    found = []
    for count in (2, 8):
        link = line(300e3 + 2 * (count - 1) * 50e3, growth.byte_share(count))
        path = tmp_path / f"on{count}.json"
        path.write_text(small(count, link).to_json())
        found.append(path)
    return found


def test_the_command_shows_what_is_measured_fitted_and_extrapolated(run, paths, tmp_path):
    picture = tmp_path / "scaling.png"
    result = run("simulate", *paths, "--scaling", "--workers", "2,4,8,16", "--algorithm", "ring", "--plot", picture)
    assert result.code == 0
    words = [line.split() for line in result.out.splitlines()]
    bases = {cells[0]: cells[-1] for cells in words if cells and cells[0].isdigit()}
    assert bases == {"2": "measured", "4": "fitted", "8": "measured", "16": "extrapolated"}
    assert "Worth trying: 2, 4, 8, 16." in result.out
    assert picture.read_bytes().startswith(PNG)


def test_the_command_in_json(run, paths):
    result = run("simulate", *paths, "--scaling", "--workers", "4", "--json")
    fields = json.loads(result.out)
    found = scaling.band([gradcast.load_profile(str(path)) for path in paths], scaling.Options(workers=(4,)))
    assert [point["step_ms"] for point in fields["points"]] == [point.step_ns / 1e6 for point in found.points]
    for fields_of, point in zip(fields["points"], found.points, strict=True):
        assert fields_of["speedup_over_ddp"] == point.ddp_ns / point.step_ns
        assert fields_of["all_reduce_bound_ms"] == point.bound_ns / 1e6
    assert fields["knee_workers"] == found.knee
    assert "hierarchical" in next(iter(fields["skipped"]))


def test_the_command_names_the_doublings_that_do_not_pay(run):
    out = run("simulate", "--scaling", "vgg16", "--scale", "0.2", "--network", "10gbe", "--algorithm", "ring").out
    assert "no knee up to 4096 workers" in out
    assert "; from 1 to 2 and 2 to 4 workers the gain is smaller" in out


def test_the_command_says_nothing_of_a_knee_of_one_point(run):
    out = run("simulate", "--scaling", "bert_base", "--network", "10gbe-8", "--workers", "8", "--algorithm", "ring").out
    assert out.splitlines()[-1] == "10gbe-8, ring: Worth trying: 8."
    dear = run("simulate", "--scaling", "vgg16", "--scale", "0.05", "--bandwidth", "1gbit", "--algorithm", "ring").out
    assert "None is worth trying: all that are faster than one worker cost too much" in dear


@pytest.mark.parametrize(
    "network",
    [
        ["--network", "10gbe-8", "--workers", "64"],
        ["--bandwidth", "10gbit", "--intra-network", "nvlink-v100-4", "--workers-per-node", "8", "--workers", "8"],
    ],
)
def test_a_published_network_may_be_a_trees(network, run):
    def step(*options):
        arguments = ["simulate", "--scaling", "resnet50", *network, "--algorithm", "ring", "--json", *options]
        return json.loads(run(*arguments).out)["points"][-1]["step_ms"]

    # The start-up cost of fewer steps than a ring's: a step costs more.
    assert step("--measured-algorithm", "tree") > step()


def test_named_and_given_networks_side_by_side(run, tmp_path):
    picture = tmp_path / "scaling.svg"
    result = run(
        "simulate", "resnet50", "--scaling", "--network", "10gbe", "--bandwidth", "25gbit", "--workers-per-node", "4",
        "--intra-network", "nvlink-v100", "--workers", "4,16,128", "--plot", picture,
    )  # fmt: skip
    assert result.code == 0
    for name in ("10gbe, hierarchical:", "25 Gbit/s, 50 us per hop, ring:"):
        assert name in result.out
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "the profile resnet50 has no link; name a network"),
        (["--network", "carrier-pigeon"], "carrier-pigeon"),
        (["--latency", "5us"], "--latency needs --bandwidth"),
        (["--bandwidth", "1gbit", "--intra-bandwidth", "1gbit"], "--intra-bandwidth needs --workers-per-node"),
        (["--bandwidth", "1gbit", "--workers-per-node", "4", "--intra-latency", "1us"], "needs --intra-bandwidth"),
        (["--bandwidth", "1gbit", "--algorithm", "star"], "there is no algorithm star"),
        (["--bandwidth", "1gbit", "--workers", "2,x"], "'x' is not a whole number"),
        (["--network", "pcie-4", "--workers-per-node", "4", "--workers", "8", "--algorithm", "star,"], "star"),
        (["--bandwidth", "1gbit", "--policy", "forecast,fifo"], "--scaling predicts one policy"),
        (["--bandwidth", "1gbit", "--wire", "bf16"], "--wire does not work with --scaling"),
    ],
)
def test_wrong_options_get_one_sentence(options, words, refused):
    refused(["simulate", "--scaling", "resnet50", *options], words)
