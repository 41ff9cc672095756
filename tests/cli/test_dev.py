"""The commands under ``gradcast dev``: plans and their pictures, policies, published networks, link fits."""

import json
import re

import pytest

import gradcast
from conftest import NETWORK
from gradcast import _core

PNG = b"\x89PNG\r\n"


def test_plan_writes_a_plan_that_fits_its_profile(run, profile_path, tmp_path, profile):
    options = ["--policy", "p3", "--set", "slice_elements=100000", "-o", tmp_path / "plan.json"]
    result = run("dev", "plan", profile_path, *options)
    assert result.code == 0
    assert "p3 (overlap mode)" in result.out
    text = (tmp_path / "plan.json").read_text()
    assert run("dev", "plan", profile_path, *options[:-2], "--json").out == text
    plan = gradcast.Plan.from_json(text)
    plan.check(profile)
    assert all(block.size_bytes <= 400_000 for block in plan.blocks)
    assert json.loads(text)["made_with"]["profile"] == str(profile_path)


def test_an_uncertain_link_gets_a_plan_of_its_own(run):
    arguments = ["dev", "plan", "resnet50", "--scale", "0.5", *NETWORK, "--json"]
    certain, uncertain = run(*arguments), run(*arguments, "--uncertainty", "10%")
    assert uncertain.code == 0
    best, careful = (gradcast.Plan.from_json(result.out) for result in (certain, uncertain))
    # With the costs as given it cannot be better than the best plan.
    assert careful.predicted_ns >= best.predicted_ns * (1 - 1e-6)
    text = run(*arguments[:-1], "--uncertainty", "10%").out
    worst, worst_usual = re.search(r"at worst ([\d.]+) x .* would be ([\d.]+) x", text).groups()
    assert 1 <= float(worst) <= float(worst_usual)


def test_forecast_says_whose_plan_it_took_over(run):
    sentence = "This is dear's plan: on this link model, separate halves of all-reduces end earlier"
    assert sentence in run("dev", "plan", "resnet50", "--scale", "0.5", "--bandwidth", "3gbit", "--workers", "8").out
    assert sentence not in run("dev", "plan", "resnet50", "--scale", "0.5", *NETWORK, "--mode", "hook").out


def test_one_worker_has_no_traffic(run):
    for command in ("simulate", "dev plan"):
        out = run(*command.split(), "vgg16", "--bandwidth", "10gbit", "--workers", "1").out
        assert "ring of 1 worker, 10 Gbit/s, 50 us per hop: one worker does not communicate" in out


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("in_flight", ["1", "2"])
def test_plot_of_every_kind_of_plan(mode, in_flight, run, tmp_path):
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    options = ["--mode", mode, "--in-flight", in_flight, "-o", plan]
    assert run("dev", "plan", "resnet50", "--scale", "0.5", *NETWORK, *options).code == 0
    others = ["--profile", "resnet50", "--scale", "0.5", "--bandwidth", "3gbit", "--workers", "8"]
    assert run("dev", "plot", plan, *others, "-o", picture).code == 0
    assert "<svg" in picture.read_text()


def drawn_bounds_ms(monkeypatch):
    """Where the dashed lines of the pictures are drawn from now on, and the words of the keys."""
    from gradcast.plots import lanes

    bounds, words = [], []
    draw_bound, draw_key = lanes.draw_bound, lanes.draw_key

    def note_bound(axes, bound_ns):
        bounds.append(bound_ns / 1e6)
        draw_bound(axes, bound_ns)

    def note_key(figure, axes, colours, *, plans, schedules):
        words.append(schedules)
        draw_key(figure, axes, colours, plans=plans, schedules=schedules)

    monkeypatch.setattr(lanes, "draw_bound", note_bound)
    monkeypatch.setattr(lanes, "draw_key", note_key)
    return bounds, words


def test_the_line_of_a_picture_is_the_bound_of_what_is_drawn(run, tmp_path, monkeypatch):
    bounds, words = drawn_bounds_ms(monkeypatch)
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    for policy in ("ddp", "dear"):
        assert run("dev", "plan", "vgg16", *NETWORK, "--policy", policy, "-o", plan).code == 0
        assert run("dev", "plot", plan, "-o", picture).code == 0
        assert run("dev", "plot", plan, "-o", picture, "--bandwidth", "50gbit", "--workers", "8").code == 0
        noted_ms = gradcast.Plan.from_json(plan.read_text()).bound_ns / 1e6
        assert bounds[-2] == pytest.approx(noted_ms)
        assert bounds[-1] < 0.5 * noted_ms
    assert words == ["schedule of all-reduces"] * 2 + ["schedule"] * 2


def test_a_plan_of_the_first_release_can_be_drawn(run, profile_path, tmp_path):
    block = {"op": "all_reduce", "buffer": 0, "ranges": [[0, 12_000_400]], "start_ns": 6_000_000, "reason": "fusion"}
    fields = {"version": 1, "policy": "ddp", "mode": "overlap", "in_flight": 1, "blocks": [block]}
    origin = {"profile": "profile.json", "scale": 1.0, "network": "ring of 4 workers"}
    plan = tmp_path / "old.json"
    plan.write_text(json.dumps({**fields, "made_with": origin}))
    assert run("dev", "plot", plan, "-o", tmp_path / "old.png").code == 0


def test_plot_finds_the_profile_beside_the_plan(run, profile_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("dev", "plan", "profile.json", "-o", "plan.json").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("dev", "plot", "../plan.json", "-o", "plan.png").code == 0
    profile_path.unlink()
    result = run("dev", "plot", "../plan.json", "-o", "plan.png")
    assert result.code == 2
    assert "../plan.json records the profile profile.json, but" in result.err
    assert "name another with --profile" in result.err


def test_policies_are_listed_with_their_parameters(run):
    out = run("dev", "policies").out
    for info in _core.policies():
        assert info.name in out
        for parameter in info.parameters:
            assert f"--set {parameter.name}=" in out
    listed = json.loads(run("dev", "policies", "--json").out)["policies"]
    assert [info["name"] for info in listed] == [info.name for info in _core.policies()]


def test_networks_are_listed(run):
    out = run("dev", "published-networks").out
    assert all(network.name in out for network in _core.networks())
    listed = json.loads(run("dev", "published-networks", "--json").out)["networks"]
    assert all(network["source"] for network in listed)


def test_link_fit_finds_the_costs_of_each_operation(run, tmp_path):
    samples = tmp_path / "samples.csv"
    lines = ["bytes,time_ns,op"]
    for size in (4096 * 4**k for k in range(9)):
        lines += [f"{size},{50_000 + 0.9 * size},all_reduce", f"{size},{30_000 + 0.6 * size},all_gather"]
    samples.write_text("\n".join(lines) + "\n")
    result = run("dev", "link", "fit", samples, "-o", tmp_path / "link.json")
    assert result.code == 0
    assert "all_reduce: 9 samples" in result.out
    link = gradcast.LinkModel.from_json((tmp_path / "link.json").read_text())
    assert link.all_reduce.pieces[0].beta_ns_per_byte == pytest.approx(0.9, rel=1e-6)
    assert link.all_gather.pieces[0].alpha_ns == pytest.approx(30_000, rel=1e-6)
    used = run("simulate", "vgg16", "--link", tmp_path / "link.json", "--policy", "forecast")
    assert "50 us + 900 us per MB" in used.out
    printed = run("dev", "link", "fit", samples, "--json").out
    assert printed == (tmp_path / "link.json").read_text()
    assert json.loads(printed)["fit"]["all_gather"]["samples"] == 9
    without = {key: value for key, value in json.loads(printed).items() if key != "version"}
    (tmp_path / "old.json").write_text(json.dumps(without))
    assert run("simulate", "vgg16", "--link", tmp_path / "old.json").code == 0
