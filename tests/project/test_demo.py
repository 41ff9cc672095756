"""What the demo makes of what it measured: the table, the verdict on the parameters, and the lanes of one step."""

import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import gradcast
from conftest import ROOT


@pytest.fixture(scope="module")
def demo():
    """The modules of benchmarks/demo."""
    from benchmarks.demo import __main__ as main
    from benchmarks.demo import lanes, picture, results, training

    return SimpleNamespace(lanes=lanes, main=main, picture=picture, results=results, training=training)


def measured(difference=0.0, ddp_ms=200.0):
    """A warm-up, whose times are not to count, and a round, of three steps each."""
    times = {"ddp": ddp_ms, "ddp:0.5": 195.0, "hook": 180.0, "overlap": 150.0, "alone": 100.0}
    rounds = [
        {
            "steps_ms": {mode: [factor * (ms + offset) for offset in (-4, 0, 9)] for mode, ms in times.items()},
            "differences": {"ddp:0.5": 0.0, "hook": 0.0, "overlap": difference if factor == 10 else 0.0},
        }
        for factor in (10, 1)
    ]
    return {"rounds": rounds, "accuracy": dict.fromkeys(times, 0.97)}


def test_the_table_has_medians_of_what_is_timed(demo):
    table = {row.mode: row for row in demo.results.rows(measured())}
    times = [(row.step_ms, row.exposed_ms) for row in table.values()]
    assert times == [(200, 100), (195, 95), (180, 80), (150, 50), (100, 0)]
    assert table["ddp"].low_ms < 200 < table["ddp"].high_ms
    assert table["ddp"].difference is None
    assert table["alone"].accuracy is None, "its ranks drift apart"


@pytest.mark.parametrize(
    ("difference", "equal", "sentence"),
    [
        (0.0, True, "bit for bit"),
        (1e-7, True, "up to rounding"),
        (math.nan, False, "overlap mode are NOT those of DDP"),
    ],
)
def test_parameters_that_differ_are_found_in_any_round(demo, difference, equal, sentence):
    table = demo.results.rows(measured(difference))
    assert [row.mode for row in demo.results.disagreeing(table)] == ([] if equal else ["overlap"])
    assert sentence in demo.results.report(table, 3, "a link of 1 Mbit/s")


@pytest.mark.parametrize(
    ("ddp_ms", "sentence"),
    [
        (180.0, "1.20 times as fast as with the better DDP, and nine of ten steps lie apart"),
        (152.0, "too noisy to tell"),
    ],
)
def test_it_compares_with_the_better_ddp_and_says_when_steps_cannot_tell(demo, ddp_ms, sentence):
    text = demo.results.report(demo.results.rows(measured(ddp_ms=ddp_ms)), 3, "a link of 1 Mbit/s")
    assert sentence in text


def test_a_layer_takes_its_time_and_gives_its_own_gradients(demo):
    settings = demo.training.Settings(blocks=1, width=4, forward_ms=5, backward_ms=10)
    model = demo.training.Digits(settings).module()
    assert sum(4 * parameter.numel() for parameter in model.parameters()) == settings.gradient_bytes
    images = torch.ones(2, 1, 8, 8)
    start = time.monotonic()
    model(images).sum().backward()
    assert time.monotonic() - start >= settings.compute_ms / 1e3, "it waits at least so long"
    paced = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.eval()(images).sum().backward()  # waits for nothing
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(paced, model.parameters(), strict=True))


# --- Lanes ---

MS = 1_000_000


def ddp_step(start_ms):
    """100 ms, the forward of which comes first; two buckets, of which the second one is waited for."""
    stamps = {"forward_ns": 0, "backward_ns": 20, "update_ns": 95, "end_ns": 98}
    buckets = [[25, 40, 1000], [60, 94, 3000]]
    return {
        **{name: (start_ms + ms) * MS for name, ms in stamps.items()},
        "buckets": [[(start_ms + a) * MS, (start_ms + b) * MS, size] for a, b, size in buckets],
    }


def fields(lanes):
    compute = [(span.kind, span.start_ms, span.end_ms) for span in lanes.compute]
    return compute, [(block.start_ms, block.end_ms, block.size_bytes) for block in lanes.link], lanes.end_ms


def test_lanes_of_ddp(demo):
    compute, link, end_ms = fields(demo.lanes.of_ddp([ddp_step(100 * index) for index in range(5)], 100))
    assert compute == [("backward", 0, 40), ("wait", 40, 75), ("update", 75, 78), ("forward", 80, 100)]
    assert (link, end_ms) == ([(5, 20, 1000), (40, 74, 3000)], 100)


def event(kind, step, start_ms, length_ms, **args):
    return {"ph": "X", "cat": kind, "ts": 1e3 * start_ms, "dur": 1e3 * length_ms, "args": {"step": step, **args}}


def test_lanes_of_a_timeline(demo):
    """Steps of 50, 60 and 90 ms: the one that is nearest to the usual length is drawn, and nothing of the others."""
    events = [{"ph": "M", "name": "thread_name", "args": {}}]
    for step, start_ms in enumerate((0, 50, 110, 200)):
        events.append(event("backward", step, start_ms, 20))
        events.append(event("block", step, start_ms + 10, 15, bytes=700 + step))
        events.append(event("wait", step + 1, start_ms + 22, 3))
        events.append(event("forward", step + 1, start_ms + 20, 25))
    compute, link, end_ms = fields(demo.lanes.of_timeline({"traceEvents": events}, 65))
    assert compute == [("backward", 0, 20), ("forward", 20, 45), ("wait", 22, 25)]
    assert (link, end_ms) == ([(10, 25, 701)], 60)


def test_lanes_of_a_plan_end_when_it_says(demo, profile):
    plan = gradcast.make_plan(profile, profile.link)
    lanes = demo.lanes.of_plan(profile, plan)
    assert lanes.end_ms == pytest.approx(plan.predicted_ns / 1e6)
    assert sum(block.size_bytes for block in lanes.link) == sum(tensor.bytes for tensor in profile.tensors)
    for before, after in zip(lanes.link, lanes.link[1:], strict=False):
        assert before.end_ms <= after.start_ms


def test_without_a_whole_step_there_is_a_sentence(demo):
    with pytest.raises(gradcast.Error, match="no whole step"):
        demo.lanes.of_timeline({"traceEvents": [event("backward", 0, 0, 20)]}, 20)


def test_the_picture_is_drawn(demo, profile, tmp_path):
    timeline = [event("backward", 0, 0, 20), event("block", 0, 5, 30, bytes=4000), event("backward", 1, 50, 20)]
    overlap = {
        "timeline": {"traceEvents": timeline},
        "profile": json.loads(profile.to_json()),
        "plan": json.loads(gradcast.make_plan(profile, profile.link).to_json()),
    }
    trace = [ddp_step(100 * index) for index in range(5)]
    results = {**measured(), "ddp_trace": trace, "gradcast": {"overlap": overlap}}
    path = tmp_path / "demo.png"
    demo.main.draw(str(path), demo.results.rows(results), results, "Two workers, a link of 1 Mbit/s")
    assert path.read_bytes().startswith(b"\x89PNG")


# --- The whole ---


def run_demo(*options):
    """Over loopback, which needs no root."""
    command = [sys.executable, "-m", "benchmarks.demo", "--loopback", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_the_demo_trains_in_every_mode_with_equal_parameters(tmp_path):
    """What it measures is for nobody to judge here."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = tmp_path / "demo.png"
    done = run_demo("--rounds", "1", "--steps", "8", "--json", "-o", str(path))
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    table = {row["mode"]: row for row in fields["rows"]}
    assert list(table) == ["ddp", "ddp:0.5", "hook", "overlap", "alone"]
    for mode in ("ddp:0.5", "hook", "overlap"):
        assert table[mode]["difference"] <= fields["tolerance"]
        assert table[mode]["accuracy"] == table["ddp"]["accuracy"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "No slow link" in done.stderr


@pytest.mark.parametrize("option", [["--rounds", "0"], ["--bandwidth", "fast"], ["-o", "nowhere/demo.png"]])
def test_what_cannot_be_run_is_refused_before_anything_runs(demo, option, monkeypatch, capsys):
    from benchmarks import pages

    monkeypatch.setattr(sys, "argv", ["demo", "--loopback", *option])
    monkeypatch.setattr(pages, "unwind_when_told_to_end", lambda: None)  # this process goes on
    monkeypatch.setattr(demo.main, "run_for_result", lambda *_, **__: pytest.fail("it runs"))
    assert pages.run_program(demo.main.main, "demo") == 1
    said = capsys.readouterr()
    assert said.err.startswith("demo: ")
    assert said.out == ""
