"""Step time and efficiency with other numbers of workers: the band, the knee, and the command that shows them."""

import json

import pytest

import gradcast
from conftest import link_of
from gradcast.cli.simulate_scaling import sentence
from gradcast.scaling import estimate as scaling
from gradcast.scaling import growth
from gradcast.scaling.growth import Nodes

PNG = b"\x89PNG\r\n"


def small(world_size=4, link=None, *, backward_ns=6e6, parts=1):
    """1 MB of gradients that come at the end of backward and are needed at once: a step is compute and the traffic."""
    tensors = [
        gradcast.Tensor(name=str(part), bytes=1_000_000 // parts, ready_ns=backward_ns, need_ns=0)
        for part in range(parts)
    ]
    return gradcast.Profile(
        name="small", forward_ns=3e6, backward_ns=backward_ns, tensors=tensors, world_size=world_size, link=link
    )


def test_steps_of_a_band_by_hand():
    """9 ms of compute and an operation of 1 MB: 0.6 + 1.2 ms on 4 workers, 1.4 + 1.4 ms on 8."""
    found = scaling.band(small(4, link_of(600e3, 1.2)), scaling.Options(workers=(8,), algorithms=("ring",)))
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
    slow, fast = small(8, link_of(0, 0), backward_ns=9e6), small(2, link_of(0, 0))
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
    found = scaling.band(small(2, link_of(31e6, 0)), scaling.Options(workers=(2, 4), algorithms=("tree",), spread=0.0))
    assert (found.knee, found.worth_trying) == (1, ())
    assert "the knee is at one worker; no doubling" in sentence(found)


def test_the_knee_is_of_the_algorithm_that_was_measured():
    options = scaling.Options(workers=(2, 8), measured_algorithm="tree")
    assert next(iter(scaling.band(small(4, link_of(600e3, 1.2)), options).curves())) == ("measured", "tree")


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
    found = scaling.band(small(4, link_of(600e3, 1.2)), scaling.Options(algorithms=("ring",)))
    assert found.knee is not None
    assert found.knee_low <= found.knee
    # If nothing of the start-up grows, any number of workers pays.
    assert found.knee_high is None


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ([small(4)], "has no link"),
        ([small(1, link_of(1, 1))], "was measured on one worker"),
        ([small(4, link_of(1, 1)), small(4, link_of(1, 1))], "two profiles were measured on 4 workers"),
        ([small(4, link_of(1, 1)), gradcast.load_profile("vgg16")], "not of one model"),
        ([small(4, link_of(1, 1)), small(8, link_of(1, 1), parts=2)], "not of one model"),
        ([], "no profile"),
    ],
)
def test_profiles_that_say_too_little(profiles, words):
    with pytest.raises(gradcast.Error, match=words):
        scaling.band(profiles)


def test_json_is_what_the_doctor_writes():
    found = scaling.band(small(4, link_of(600e3, 1.2)), scaling.Options(workers=(4, 8), algorithms=("ring",)))
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
        link = link_of(300e3 + 2 * (count - 1) * 50e3, growth.byte_share(count))
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
        ["--bandwidth", "10gbit", "--intra-network", "nvlink-v100-4", "--ranks-per-host", "8", "--workers", "8"],
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
        "simulate", "resnet50", "--scaling", "--network", "10gbe", "--bandwidth", "25gbit", "--ranks-per-host", "4",
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
        (["--bandwidth", "1gbit", "--intra-bandwidth", "1gbit"], "--intra-bandwidth needs --ranks-per-host"),
        (["--bandwidth", "1gbit", "--ranks-per-host", "4", "--intra-latency", "1us"], "needs --intra-bandwidth"),
        (["--bandwidth", "1gbit", "--algorithm", "star"], "there is no algorithm star"),
        (["--bandwidth", "1gbit", "--workers", "2,x"], "'x' is not a whole number"),
        (["--network", "pcie-4", "--ranks-per-host", "4", "--workers", "8", "--algorithm", "star,"], "star"),
        (["--bandwidth", "1gbit", "--policy", "forecast,fifo"], "--scaling predicts one policy"),
        (["--bandwidth", "1gbit", "--wire", "bf16"], "--wire does not work with --scaling"),
    ],
)
def test_wrong_options_get_one_sentence(options, words, refused):
    refused(["simulate", "--scaling", "resnet50", *options], words)
