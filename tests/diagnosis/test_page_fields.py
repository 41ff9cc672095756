"""The report reads exactly the fields of doctor.json that the doctor writes."""

import dataclasses
import io
import json
import sys

import pytest

from diagnosis import doctor_runs
from gradcast.diagnosis.analyze.step_breakdown import RankSteps
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.report import run_comparison
from gradcast.diagnosis.report import text as text_report
from gradcast.diagnosis.report.html import headline, heat_map, step_time
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.diagnosis.trace.clocks import Clock
from gradcast.errors import Error

STEPS = 9
FORWARD_MS, EXCHANGE_MS, SLOW_MS = 30.0, 50.0, 40.0
SLOW_RANK = 2
WAITED_MS = 1.0  # at the end of backward


def rank_steps(rank):
    """Rank 2 is slow in forward. If buffers are broadcast before forward, the others wait for them inside it."""

    def constant(**times):
        return {name: [ms] * STEPS for name, ms in times.items()}

    own = {"forward": FORWARD_MS + SLOW_MS * (rank == SLOW_RANK), "backward": 60.0, "update": 5.0}
    alone_ms = sum(own.values())
    slowest = own | {"forward": FORWARD_MS + SLOW_MS}
    step_ms = sum(slowest.values()) + 5.0 + EXCHANGE_MS
    sending_ms = {"alone": 0.0, "node": 20.0, "cluster": EXCHANGE_MS}
    return RankSteps(
        rank=rank,
        node=rank // 2,
        host=f"host{rank // 2}",
        normal=constant(**slowest, step=step_ms, loop=5.0, loader=0.0, exposed=WAITED_MS),
        probes={kind: constant(**own, step=alone_ms + ms) for kind, ms in sending_ms.items()},
        computing=constant(**own | {"forward": own["forward"] - 4.0}),
        layers_ms={"layer1": own["forward"]},
    )


def result(*, buffers=False, tried=True, untold=None, gradients_used=False, connections=1):
    """The fields of doctor.json for four ranks."""
    pytest.importorskip("torch", reason="this needs torch, which is not installed: pip install torch")
    from gradcast.diagnosis.analyze import result
    from gradcast.diagnosis.probe.trial import FollowedStep, Trial, plan_versions

    now = doctor_runs.scene()
    profile, recorded = doctor_runs.with_link(now), doctor_runs.rank_traces()
    trial = Trial(
        profile=json.loads(profile.to_json()),
        plan=json.loads(now.plan.to_json()),
        versions=plan_versions([FollowedStep(6 + step, 7, now.plan, 400.0, 395e6) for step in range(STEPS)]),
    )
    ranks = [
        doctor_runs.measured(
            rank_steps(rank),
            options={"find_unused_parameters": [100.0] * STEPS},
            trial=dataclasses.replace(trial, trace=dataclasses.replace(trace, clock=Clock())) if tried else None,
            clocks=[each.clock for each in recorded],
            network=doctor_runs.doctor()["network"] | {"connections": connections},
            launch_unknown=untold,
        )
        for rank, trace in enumerate(recorded)
    ]
    setup = doctor_runs.setup(
        parameter_bytes={tensor.name: tensor.bytes for tensor in profile.tensors},
        find_unused_parameters=True,
        broadcast_buffers=buffers,
        gradients_used=gradients_used,
    )
    return json.loads(json.dumps(result.build(ranks, setup)))


def shape(value):
    """Every key at every level; for a list, the keys of its elements."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [each for number, each in enumerate(map(shape, value)) if each not in list(map(shape, value[:number]))]
    return None


def test_the_examples_have_the_fields_that_the_doctor_writes():
    written, drawn = shape(result()), shape(doctor_runs.doctor())
    assert written.keys() == drawn.keys()
    for key in written:
        assert written[key] == drawn[key], key


def test_the_bare_example_has_what_the_doctor_leaves_empty():
    written, drawn = result(tried=False), doctor_runs.bare()
    assert written.keys() == drawn.keys()
    trial = {"profile", "plan", "prediction", "predicted_timeline", "timeline", "bandwidth", "plan_versions", "scaling"}
    assert {key: written[key] for key in trial} == {key: drawn[key] for key in trial}


def test_where_launching_is_not_told_apart_it_is_no_part_and_the_page_says_why():
    told, untold = result(), result(untold="the profiler is <busy>")
    lacks = {part["key"] for part in told["parts"]} - {part["key"] for part in untold["parts"]}
    assert lacks == {"launch"}
    assert all("launch" not in rank["parts"] for rank in untold["ranks"])
    assert {action["key"] for action in told["actions"]} - {action["key"] for action in untold["actions"]} == {"launch"}
    assert sum(part["ms"] for part in told["parts"]) == pytest.approx(told["step"]["ms"])
    assert "is included in forward, backward and update: the profiler is &lt;busy&gt;." in str(step_time.draw(untold))
    assert "are in forward" not in str(step_time.draw(told))
    text = text_report.text(untold).rstrip()
    assert text.endswith("is included in forward, backward and update: the profiler is <busy>")
    assert "whether launch overhead was measured (yes and no)" in run_comparison.compare(told, untold).settings


def test_where_the_loop_uses_all_gradients_overlap_mode_is_left_out_and_text_and_page_say_why():
    usual, used = result(), result(gradients_used=True)
    assert usual["overlap_left_out"] is None
    assert {each["key"] for each in usual["actions"]} - {each["key"] for each in used["actions"]} == {"overlap"}
    for told in (text_report.text(used), str(headline.actions(used))):
        assert "writes into the gradients between backward and step()" in told


def test_what_was_measured_between_hosts_is_not_taken_for_the_inside_of_one():
    """There are two ranks per host."""
    scaling = result()["scaling"]
    assert scaling["left_out"] == ["the costs of the network inside a node are not known"]
    assert min(point["workers"] for point in scaling["points"]) == 4


def test_connections_that_gloo_has_are_no_action():
    keys = [{each["key"] for each in result(connections=count)["actions"]} for count in (3, 4)]
    assert keys[0] - keys[1] == {"connections"}


def test_the_text_fits_a_terminal():
    """Titles and remedies are as long as sentences."""
    lines = text_report.text(result()).splitlines()
    tables = [line for line in lines if "  " in line.strip()]
    assert len(tables) > 20
    assert max(map(len, tables)) <= 120


@pytest.mark.parametrize("buffers", [True, False])
def test_what_ranks_wait_inside_of_forward_is_not_their_own_work(buffers):
    found = result(buffers=buffers, tried=False)
    waits = [each["wait_ms"][0] for each in found["normal_steps"]]
    others = WAITED_MS + SLOW_MS if buffers else WAITED_MS
    assert waits == [others, others, WAITED_MS, others]
    # In the picture the row of the slow one stands out.
    classes = [line.split('class="')[1][:2] for line in str(heat_map.draw(found)).split("<rect")[1:]]
    rows = [set(classes[rank * STEPS : (rank + 1) * STEPS]) for rank in range(4)]
    assert rows == [{"h0"}, {"h0"}, {"h4" if buffers else "h0"}, {"h0"}]


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


def test_a_terminal_that_knows_few_characters_gets_the_text_without_the_others(tmp_path, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    run = doctor_runs.doctor()
    run["actions"][0]["how"] = "num_workers=\u2026"
    Outcome(str(tmp_path), rank=0).save(run, None)
    assert b"num_workers=?" in raw.getvalue()
    assert "num_workers=\u2026" in json.loads((tmp_path / "doctor.json").read_text())["actions"][0]["how"]
