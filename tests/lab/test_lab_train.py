"""``gradcast dev lab train``: every variant trains the same model, and what was measured is put together rightly. No
test judges a time.

What makes hosts needs root and Linux, and is skipped elsewhere.
"""

import dataclasses
import json
import subprocess
import sys

import pytest

import gradcast
from conftest import lab_network, link_of
from gradcast.comparison import ddp_baseline
from gradcast.host_traffic import RING, Hosts, exchange_form, leaving_share
from gradcast.lab import LabError, predictions, variants
from gradcast.lab.cores import BusyCores
from gradcast.lab.report import describe_network, report
from gradcast.lab.results import table_of
from gradcast.lab.settings import Settings
from lab.small_profile import small_profile

torch = pytest.importorskip("torch")


# --- Variants and predictions ---


def test_names_are_known_and_come_once_and_have_a_meaning():
    assert variants.names_of("ddp:8,overlap,ddp:8") == ["alone", "ddp", "ddp:8", "overlap"]
    assert variants.names_of("ddp-sweep")[2:] == [f"ddp:{cap}" for cap in (1, 4, 8, 25, 50, 100)]
    every = variants.names_of("all,ddp-near")
    assert {"hook", "overlap", "ddp-mgwfbp", "ddp-near", "overlap:p3", "ddp:25"} <= set(every)
    assert variants.variant("ddp:0.5").caps_mib == (0.5,)
    assert [variants.variant(name).adapt for name in ("overlap", "overlap-fixed")] == [True, False]
    wires = [variants.variant(name).wire for name in ("overlap-bf16", "hook-fp16", "hook-fixed", "overlap")]
    assert wires == ["bf16", "fp16", "fp32", "fp32"]
    policy = variants.variant("hook:prophet")
    assert (policy.mode, policy.policy, policy.adapt) == ("hook", "prophet", False)


@pytest.fixture
def measured():
    return gradcast.load_profile("resnet50", 0.2).replace(link=link_of(100e3, 4))


def test_ddps_caps_are_those_around_the_best(measured):
    caps = predictions.near_best_caps_mib(measured)
    assert 2 <= len(caps) <= 3
    times = {
        cap: predictions.ddp_plan(measured, variants.variant(f"ddp:{cap}")).predicted_ns for cap in (1, 4, 8, 25, 50)
    }
    assert min(times, key=times.get) in caps


def test_a_plan_of_mgwfbp_is_one_of_ddps_buckets(measured):
    """The caps, filled as DDP fills them: the buckets are the plan's blocks."""
    caps = [round(cap * 2**20) for cap in predictions.mgwfbp_caps_mib(measured)]
    plan = gradcast.make_plan(measured, measured.link, policy="mgwfbp", mode="hook", in_flight=2)
    buckets, filled = [], 0
    for tensor in sorted(measured.tensors, key=lambda tensor: tensor.ready_ns):
        filled += tensor.bytes
        if filled >= caps[min(len(buckets), len(caps) - 1)]:
            buckets.append(filled)
            filled = 0
    assert [*buckets, *([filled] if filled else [])] == [block.size_bytes for block in plan.blocks]


def test_ddp_counts_the_parameters_alone(measured):
    sizes = {tensor.name: tensor.bytes - 4 for tensor in measured.tensors[1:]}
    counted = ddp_baseline.as_ddp_sends(measured, sizes)
    assert {tensor.name: tensor.bytes for tensor in counted.tensors} == sizes


# --- The table ---


def results_of(difference=0.0, overlap_ms=110.0):
    times = {"alone": 100.0, "ddp": 140.0, "ddp:8": 130.0, "overlap": overlap_ms, "overlap-bf16": 90.0}
    link = {"all_reduce": [{"up_to_bytes": None, "alpha_ns": 1e5, "beta_ns_per_byte": 100}]}
    steps_ms = {name: [ms - 2, ms, ms + 4] for name, ms in times.items()}
    sent = {name: [64_000.0, 96_060.0] for name in times}
    rounds = [{"steps_ms": steps_ms, "cores_busy": dict.fromkeys(times, 0.5), "sent_bytes": sent} for _ in range(2)]
    facts = {name: {"blocks": 3, "predicted_ms": 0.9 * ms} for name, ms in times.items()}
    facts["overlap"]["replay"] = {"replayed_ms": 105.0, "measured_ms": 100.0}
    return {
        "rounds": rounds,
        "profile": {**json.loads(small_profile().to_json()), "link": link},
        "variants": {**facts, "alone": {"blocks": None, "predicted_ms": None}},
        "differences": {"ddp:8": 0.0, "overlap": difference, "overlap-bf16": 0.1},
    }


SETTINGS = Settings("small", small_profile().to_json(), (1e9, 1e9), ("alone", "ddp", "ddp:8", "overlap"), rounds=2)


def test_rows_are_measured_against_the_best_ddp_and_the_bound():
    table = table_of(results_of(), SETTINGS)
    row = table.row("overlap")
    assert table.best_ddp.name == "ddp:8"
    assert row.ratio_to_best_ddp == pytest.approx(130 / 110)
    assert row.exposed_ms == pytest.approx(10)
    assert row.prediction_error == pytest.approx(-0.1)
    assert row.sent_bytes == [64_000, 96_060]
    assert (row.replayed_ms, row.replay_error) == (105.0, pytest.approx(0.05)), "of other steps than all"
    assert table.row("ddp").replayed_ms is table.row("ddp").replay_error is None
    assert table.bounds["overlap"].plain_ns / 1e6 <= table.bound_ms <= table.bounds["hook"].best_ns / 1e6
    assert table.bound_ms >= table.compute_ms
    assert row.ratio_to_bound == pytest.approx(110 / table.bound_ms)


@pytest.mark.parametrize(
    ("one", "reference", "start", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], [0.1, 0.1], 0.2),
        # Come down to nearly nothing: rounding that is small beside 1 is large beside what is left.
        ([0.0, 3e-7], [0.0, 2e-7], [0.0, 1.0], 1e-7),
        ([float("nan"), 1.0], [1.0, 1.0], [1.0, 1.0], float("nan")),
    ],
)
def test_a_difference_is_measured_by_what_the_tensor_is_or_was(one, reference, start, expected):
    from gradcast.lab.worker import relative_difference

    tensors = (torch.tensor(values) for values in (one, reference, start))
    assert relative_difference(*tensors).item() == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("difference", "equal", "sentence"),
    [
        (0.0, True, "all variants but overlap-bf16, which round gradients, equal ddp's bit for bit"),
        (2e-7, True, "up to the rounding"),
        (1e-5, False, "overlap are NOT those of ddp"),
        (float("nan"), False, "overlap are NOT those of ddp"),
    ],
)
def test_other_parameters_are_told(difference, equal, sentence):
    table = table_of(results_of(difference), SETTINGS)
    assert [row.name for row in table.wrong] == ([] if equal else ["overlap"])
    text = report(table, SETTINGS, 64_040)
    assert "105.0 (+5.0%)" in text, "replayed"
    assert "0.10 (1.50 x)" in text, "bytes out of the host that sends most"
    assert "gradcast's overlap takes" in text
    assert sentence in text
    assert "1.18 x" in text
    assert "stand-in" in text
    assert "busy" not in text.split("bound: no schedule")[1]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("alone", "something else runs here"), ("overlap", "With overlap the cores were busy for 95 % of the time")],
)
def test_a_crowded_machine_is_told(name, sentence):
    results = results_of()
    for entry in results["rounds"]:
        entry["cores_busy"][name] = 0.95
    assert sentence in report(table_of(results, SETTINGS), SETTINGS, 64_040)


def test_busy_cores_are_those_since_the_start(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 1000 0 0 0 0 0 0\n")
    cores = BusyCores(stat)
    assert cores.share() is None
    stat.write_text("cpu  130 0 110 1050 10 0 0 0 0 0\n")
    assert cores.share() == pytest.approx(0.4)


# --- The command ---


@pytest.fixture
def small_path(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(small_profile().to_json())
    return path


NEAR = ["--hosts", "2", "--model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*NEAR, "nonet"], "there is no profile nonet"),
        ([*NEAR, "resnet50", "--rounds", "1"], "--rounds"),
        ([*NEAR, "resnet50", "--steps", "1"], "--steps"),
        ([*NEAR, "resnet50", "--compare", "ddp,horovod"], "there is no variant 'horovod'"),
        ([*NEAR, "resnet50", "--compare", "overlap:dear"], "no policy dear"),
        ([*NEAR, "resnet50", "--compare", "overlap-bf8"], "there is no variant 'overlap-bf8'"),
        ([*NEAR, "resnet50", "--ranks-per-host", "0"], "--ranks-per-host"),
        ([*NEAR, "resnet50", "--compare", "ddp:big"], "MiB"),
        ([*NEAR, "resnet50", "--compare", ","], "no variant is named"),
        ([*NEAR, "resnet50", "--bandwidth", "1gbit,fast"], "'fast' is not a bandwidth"),
        ([*NEAR, "resnet50", "--bandwidth", "1gbit,1gbit,1gbit"], "3 bandwidths for 2 hosts"),
        ([*NEAR, "resnet50", "--width", "8"], "--width only works with real models"),
        ([*NEAR, "digits", "--forward", "8ms"], "--forward only works with stand-ins"),
        (["--hosts", "1", "--model", "resnet50"], "one host has no communication"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(refused, monkeypatch, arguments, words):
    monkeypatch.setattr("gradcast.cli.dev.lab_options.obstacle", lambda: None)
    monkeypatch.setattr("gradcast.cli.dev.lab_train.train", lambda *_, **__: pytest.fail("it has run"))
    refused(["dev", "lab", "train", *arguments], words)


def test_what_the_machine_cannot_do_is_refused(run, refused, monkeypatch):
    monkeypatch.setattr("gradcast.cli.dev.lab_options.obstacle", lambda: "network namespaces need root")
    refused(["dev", "lab", "train", "--model", "resnet50"], "network namespaces need root", code=3)
    monkeypatch.setattr("gradcast.cli.dev.lab_options.obstacle", lambda: None)
    monkeypatch.setattr("gradcast.lab.train._available_bytes", lambda: 8e9)
    result = run("dev", "lab", "train", "--hosts", "8", "--model", "vgg16")
    assert result.code == 3
    assert "make --scale-size smaller" in result.err


def test_a_wrong_number_is_drawn_and_ends_the_command_with_an_error(run, monkeypatch, small_path, tmp_path):
    monkeypatch.setattr("gradcast.cli.dev.lab_options.obstacle", lambda: None)
    results = {**results_of(difference=1e-3), "torch": "0", "parameter_bytes": 1}
    monkeypatch.setattr("gradcast.cli.dev.lab_train.train", lambda *_, **__: results)
    result = run("dev", "lab", "train", "--model", small_path, "--plot", tmp_path / "lab.png")
    assert result.code == 70
    assert (tmp_path / "lab.png").read_bytes().startswith(b"\x89PNG")
    assert "overlap trained are not those of ddp" in result.err


@pytest.mark.slow
def test_all_ways_train_the_same_model(small_path, tmp_path):
    lab_network(2, 1e9).close()
    picture = tmp_path / "lab.png"
    compare = "ddp-near,ddp-mgwfbp,hook,overlap,overlap-fixed,overlap:p3"
    arguments = ["dev", "lab", "train", "--bandwidth", "300mbit", "--model", small_path, "--compare", compare]
    arguments += ["--rounds", "2", "--steps", "3", "--timeout", "2min", "--json", "--plot", picture]
    command = [sys.executable, "-m", "gradcast", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    rows = {row["name"]: row for row in fields["rows"]}
    assert {"alone", "ddp", "ddp-mgwfbp", "hook", "overlap", "overlap-fixed", "overlap:p3"} <= rows.keys()
    assert sum(name.startswith("ddp:") for name in rows) >= 2
    assert fields["stand_in"] is True
    assert fields["parameters_equal"] is True
    for row in rows.values():
        assert len(row["steps_ms"]) == 2 * 2, "the first step of a turn is not counted"
        assert row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        if row["name"] not in ("alone", "ddp"):
            assert row["difference"] == 0
    # A fixed plan is in force in each step, so that some can be replayed.
    assert rows["overlap-fixed"]["replayed_ms"] > 0
    assert rows["overlap-fixed"]["replay_error"] > -1
    assert rows["ddp"]["replayed_ms"] is rows["alone"]["replayed_ms"] is None
    bounds = fields["bounds_ms"]
    assert fields["compute_ms"] * 0.999 <= bounds["overlap"]["plain"] <= bounds["overlap"]["best"]
    assert bounds["overlap"]["best"] <= bounds["hook"]["best"] * 1.001
    assert "round 2 of 2" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_as_many_bytes_leave_a_host_of_several_ranks_as_the_formula_says(small_path):
    lab_network(2, 1e9).close()
    arguments = ["--hosts", "2", "--ranks-per-host", "2", "--model", small_path, "--scale-size", "30"]
    arguments += ["--compare", "ddp,overlap-fixed,overlap-bf16,overlap-int8", "--rounds", "2", "--steps", "3", "--json"]
    command = [sys.executable, "-m", "gradcast", "dev", "lab", "train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert (fields["hosts"], fields["ranks_per_host"]) == (2, 2)
    for row in fields["rows"][1:]:
        stats = row["details"].get("stats", {})
        wire = stats.get("wire", "fp32")
        form = RING if row["name"] == "ddp" else exchange_form(Hosts.even(2, 2), wire)
        share = leaving_share(Hosts.even(2, 2), form, wire)
        assert row["sent_bytes"] == pytest.approx([share * fields["parameter_bytes"]] * 2, rel=0.1), row["name"]
        assert stats.get("hosts") in (None, {"count": 2, "ranks_per_host": 2})


@pytest.mark.slow
def test_a_run_is_bounded_in_time(small_path):
    lab_network(2, 1e9).close()
    arguments = ["dev", "lab", "train", "--model", str(small_path), "--timeout", "500ms"]
    command = [sys.executable, "-m", "gradcast", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "did not end within 0.5 s" in done.stderr


def test_links_are_named_with_their_latency_where_they_have_one():
    assert describe_network(SETTINGS) == "2 hosts with links of 1 Gbit/s"
    late = dataclasses.replace(SETTINGS, latency_s=0.0005)
    several = dataclasses.replace(SETTINGS, ranks_per_host=4)
    assert describe_network(several) == "2 hosts of 4 ranks with links of 1 Gbit/s"
    assert describe_network(late) == "2 hosts with links of 1 Gbit/s and 500 us"


def test_a_model_that_is_not_installed_is_named(monkeypatch, tmp_path):
    from gradcast.lab import models

    monkeypatch.setattr(models, "_EXAMPLES", tmp_path)
    with pytest.raises(LabError, match="source tree"):
        models.load_example("digits")


def test_batches_of_more_images_than_there_are_are_refused():
    pytest.importorskip("sklearn")
    from gradcast.lab import models

    def settings(batch):
        return Settings(model="digits", profile=None, rates_bits_per_s=(1e9, 1e9), names=("ddp",), batch=batch)

    models.make_task(settings(718), 0)
    with pytest.raises(LabError, match=r"at most --batch 7\d\d on each rank"):
        models.make_task(settings(800), 0)
