"""What the doctor's analysis says of the measurements of all ranks, and how its result becomes text and files."""

import io
import json
import sys

import pytest

from diagnosis import doctor_runs
from gradcast.diagnosis.analyze import result
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.report import html as html_report
from gradcast.diagnosis.report import run_comparison
from gradcast.diagnosis.report import text as text_report
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.errors import Error


def test_where_launching_is_not_told_apart_it_is_no_part_and_the_page_says_why():
    told, untold = doctor_runs.doctor(), doctor_runs.doctor(untold="the profiler is <busy>")
    lacks = {part["key"] for part in told["parts"]} - {part["key"] for part in untold["parts"]}
    assert lacks == {"launch"}
    assert all("launch" not in rank["parts"] for rank in untold["ranks"])
    assert {action["key"] for action in told["actions"]} - {action["key"] for action in untold["actions"]} == {"launch"}
    assert sum(part["ms"] for part in told["parts"]) == pytest.approx(told["step"]["ms"])
    words = "is included in forward, backward and update: the profiler is "
    assert f"{words}&lt;busy&gt;." in html_report.build(untold)
    assert words not in html_report.build(told)
    assert text_report.text(untold).rstrip().endswith(f"{words}<busy>")
    assert "whether launch overhead was measured (yes and no)" in run_comparison.compare(told, untold).settings


def test_where_the_loop_uses_all_gradients_overlap_mode_is_left_out_and_text_and_page_say_why():
    usual, used = doctor_runs.doctor(), doctor_runs.doctor(used=True)
    assert usual["overlap_left_out"] is None
    assert {each["key"] for each in usual["actions"]} - {each["key"] for each in used["actions"]} == {"overlap"}
    for told in (text_report.text(used), html_report.build(used)):
        assert "writes into the gradients between backward and step()" in told


def test_what_was_measured_between_hosts_is_not_taken_for_the_inside_of_one():
    """There are two ranks per host."""
    scaling = doctor_runs.doctor()["scaling"]
    assert scaling["left_out"] == ["the costs of the network inside a node are not known"]
    assert min(point["workers"] for point in scaling["points"]) == 4


def test_connections_that_gloo_has_are_no_action():
    network = doctor_runs.doctor()["network"]
    assert result.gain_of_streams(network | {"connections": 3}) > 1
    assert result.gain_of_streams(network | {"connections": 4}) is None


def test_the_text_fits_a_terminal():
    """Titles and remedies are as long as sentences."""
    tables = [line for line in text_report.text(doctor_runs.doctor()).splitlines() if "  " in line.strip()]
    assert len(tables) > 20
    assert max(map(len, tables)) <= 120


def test_what_ranks_wait_inside_of_forward_is_not_their_own_work():
    """Whether they wait there, for buffers of a rank that is slow in forward, or at the end of backward."""
    for buffers in (True, False):
        steps = doctor_runs.doctor(slow="forward", buffers=buffers)["normal_steps"]
        first, _, slow, last = (each["wait_ms"][0] for each in steps)
        assert [first - slow, last - slow] == pytest.approx([doctor_runs.SLOW_MS] * 2, abs=4)


# --- Plans ---


def test_each_version_of_the_plan_is_told():
    trial = pytest.importorskip("gradcast.diagnosis.probe.trial", exc_type=ImportError)
    now = doctor_runs.scene()
    times = {7: [900.0, 900.0, 410.0, 412.0, 414.0], 8: [400.0, 100.0, 300.0, 200.0, 302.0]}
    plans = {7: now.ddp, 8: now.plan}
    numbered = [(version, ms) for version, each in times.items() for ms in each]
    # The first two steps with a plan are expected to take what the warm-up says, the others what its own steps say.
    steps = [
        trial.FollowedStep(6 + place, version, plans[version], ms, 1e6 * (50 * version + (place % 5 > 1)))
        for place, (version, ms) in enumerate(numbered)
    ]
    found = trial.plan_versions(steps)
    assert [(each["version"], each["from_step"], each["policy"]) for each in found] == [
        (7, 6, "ddp"), (8, 11, now.plan.policy),
    ]  # fmt: skip
    assert [each["measured_ms"] for each in found] == [412.0, 300.0], "without the first two of each"
    assert [each["predicted_ms"] for each in found] == [351.0, 401.0]
    assert trial.plan_versions(steps[:1])[0]["measured_ms"] == 900.0
    assert found[0].keys() == doctor_runs.doctor()["plan_versions"][0].keys()


# --- The folder ---


def test_a_folder_has_no_trace_of_an_earlier_run(tmp_path, capsys):
    outcome, run = Outcome(str(tmp_path), rank=0), doctor_runs.doctor()
    outcome.save(run, merged_trace.merge(doctor_runs.rank_traces(2, 3)))
    assert "opens in Perfetto" in capsys.readouterr().out
    assert (tmp_path / "trace.json.gz").exists()
    outcome.save(run, None)
    assert "Perfetto" not in capsys.readouterr().out.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


def test_a_result_that_cannot_be_written_is_told_before_the_training_begins(tmp_path):
    (tmp_path / "doctor.json").mkdir()
    with pytest.raises(Error, match=r"doctor\.json: it is a folder"):
        Outcome(str(tmp_path), rank=0)


def test_what_was_found_is_told_also_where_it_cannot_be_written(tmp_path, capsys):
    outcome = Outcome(str(tmp_path / "run"), rank=0)
    (tmp_path / "run").rmdir()
    with pytest.raises(Error, match="result cannot be written"):
        outcome.save(doctor_runs.doctor(), None)
    assert "what would help" in capsys.readouterr().out


def test_a_terminal_that_knows_few_characters_gets_escapes(tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    run = doctor_runs.doctor()
    run["actions"][0]["how"] = "num_workers=\u2026 \x1b[31m"
    Outcome(str(tmp_path), rank=0).save(run, None)
    assert rb"num_workers=\u2026 \u001b[31m" in raw.getvalue()
    assert "num_workers=\u2026 \x1b" in json.loads((tmp_path / "doctor.json").read_text())["actions"][0]["how"]
