"""The report reads exactly the fields of doctor.json that the doctor writes."""

import dataclasses
import io
import json
import sys

import pytest

from diagnosis import doctor_runs
from gradcast.diagnosis.analyze import actions
from gradcast.diagnosis.analyze.actions import Situation
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.step_breakdown import RankSteps
from gradcast.diagnosis.outcome import Outcome
from gradcast.diagnosis.probe import plan_versions
from gradcast.diagnosis.probe.plan_versions import FollowedStep
from gradcast.diagnosis.report import run_comparison
from gradcast.diagnosis.report import text as text_report
from gradcast.diagnosis.report.html import headline, heat_map, step_time
from gradcast.diagnosis.runs import PARTS
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.diagnosis.trace.clocks import Clock
from gradcast.errors import Error

STEPS = 9
FORWARD_MS, BACKWARD_MS, UPDATE_MS, LOOP_MS, EXCHANGE_MS, LAUNCH_MS = 30.0, 60.0, 5.0, 5.0, 50.0, 4.0
SLOW_RANK, SLOW_MS = 2, 40.0
WAITED_MS = 1.0  # at the end of backward


def rank_steps(rank):
    """Rank 2 is slow in forward. If buffers are broadcast before forward, the others wait for them inside it."""
    own = {"forward": FORWARD_MS + SLOW_MS * (rank == SLOW_RANK), "backward": BACKWARD_MS, "update": UPDATE_MS}
    alone_ms = sum(own.values())
    normal = {
        "step": alone_ms - own["forward"] + FORWARD_MS + SLOW_MS + LOOP_MS + EXCHANGE_MS,
        "forward": FORWARD_MS + SLOW_MS, "backward": BACKWARD_MS + EXCHANGE_MS, "update": UPDATE_MS, "loop": LOOP_MS,
        "loader": 0.0, "exposed": WAITED_MS,
    }  # fmt: skip
    probes = {
        "alone": own | {"step": alone_ms},
        "node": own | {"step": alone_ms + 20},
        "cluster": own | {"step": alone_ms + EXCHANGE_MS},
    }
    constant = lambda times: {name: [ms] * STEPS for name, ms in times.items()}  # noqa: E731
    return RankSteps(
        rank=rank,
        node=rank // 2,
        host=f"host{rank // 2}",
        normal=constant(normal),
        probes={kind: constant(times) for kind, times in probes.items()},
        computing=constant(own | {"forward": own["forward"] - LAUNCH_MS}),
        layers_ms={"layer1": own["forward"]},
    )


def result(*, buffers=False, tried=True, untold=None, gradients_used=False, connections=1):
    """The fields of doctor.json for four ranks."""
    pytest.importorskip("torch", reason="this needs torch, which is not installed: pip install torch")
    from gradcast.diagnosis.analyze import result
    from gradcast.diagnosis.observe.environment import Process
    from gradcast.diagnosis.probe.trial import Trial

    now = doctor_runs.scene()
    profile = doctor_runs.with_link(now)
    followed = [FollowedStep(6 + number, 7, now.plan, 400.0, 395e6) for number in range(STEPS)]
    recorded = doctor_runs.rank_traces()
    ranks = [
        result.RankMeasurements(
            steps=rank_steps(rank),
            options={"find_unused_parameters": [100.0] * STEPS},
            trial=Trial(
                profile=json.loads(profile.to_json()),
                plan=json.loads(now.plan.to_json()),
                versions=plan_versions.summarize(followed),
                trace=dataclasses.replace(recorded[rank], clock=Clock()),
            )
            if tried
            else None,
            clocks=[each.clock for each in recorded],
            network=doctor_runs.doctor()["network"] | {"connections": connections},
            launch_unknown=untold,
            probe_steps=32,
            process=Process({}, 1, frozenset({rank}), None, ""),
        )
        for rank in range(4)
    ]
    setup = result.TrainingSetup(
        backend="gloo", device="cpu", torch="2.11.0", model="ResNet",
        parameter_bytes={tensor.name: tensor.bytes for tensor in profile.tensors}, caps_bytes=(1 << 20, 25 << 20),
        is_fp32=True, compiled=False, find_unused_parameters=True, rebuilt=True, broadcast_buffers=buffers,
        buffer_bytes=64, warmup_steps=5, gradients_used=gradients_used,
    )  # fmt: skip
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
    untried = (
        "profile",
        "plan",
        "prediction",
        "predicted_timeline",
        "timeline",
        "bandwidth",
        "plan_versions",
        "scaling",
    )
    for key in untried:
        assert written[key] == drawn[key], key


def test_where_launching_is_not_told_apart_it_is_no_part_and_the_page_says_why():
    told, untold = result(), result(untold="the profiler is <busy>")
    lacks = {part["key"] for part in told["parts"]} - {part["key"] for part in untold["parts"]}
    assert lacks == {"launch"}
    assert all("launch" not in rank["parts"] for rank in untold["ranks"])
    assert {action["key"] for action in told["actions"]} - {action["key"] for action in untold["actions"]} == {"launch"}
    assert sum(part["ms"] for part in told["parts"]) == pytest.approx(told["step"]["ms"])
    assert "is included in forward, backward and update: the profiler is &lt;busy&gt;." in str(step_time.draw(untold))
    assert "are in forward" not in str(step_time.draw(told))
    assert (
        text_report.text(untold)
        .rstrip()
        .endswith("is included in forward, backward and update: the profiler is <busy>")
    )
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
    classes = [line.split('class="')[1][:2] for line in heat_map.draw(found).split("<rect")[1:]]
    rows = [set(classes[rank * STEPS : (rank + 1) * STEPS]) for rank in range(4)]
    assert rows == [{"h0"}, {"h0"}, {"h4" if buffers else "h0"}, {"h0"}]


# --- Plans ---


def test_each_version_of_the_plan_is_told():
    now = doctor_runs.scene()
    times = {7: [900.0, 900.0, 410.0, 412.0, 414.0], 8: [400.0, 100.0, 300.0, 200.0, 302.0]}
    plans = {7: now.ddp, 8: now.plan}
    numbered = [(version, ms) for version, each in times.items() for ms in each]
    # The first two steps with a plan are expected to take what the warm-up says, the others what its own steps say.
    steps = [
        FollowedStep(6 + place, version, plans[version], ms, 1e6 * (50 * version + (place % 5 > 1)))
        for place, (version, ms) in enumerate(numbered)
    ]
    found = plan_versions.summarize(steps)
    assert [(each["version"], each["from_step"], each["policy"]) for each in found] == [
        (7, 6, "ddp"), (8, 11, now.plan.policy),
    ]  # fmt: skip
    assert [each["measured_ms"] for each in found] == [412.0, 300.0], "without the first two of each"
    assert [each["predicted_ms"] for each in found] == [351.0, 401.0]
    assert plan_versions.summarize(steps[:1])[0]["measured_ms"] == 900.0


# --- Gains ---


def test_no_gain_is_larger_than_what_the_passes_leave():
    """A step with an interval wider than itself, and an action that would remove more time than there is."""
    step = Estimate(100.0, 90.0, 400.0)
    known = {part: Estimate(0.0, 0.0, 0.0) for part in PARTS}
    known |= {"forward": Estimate(10.0, 9, 11), "backward": Estimate(30.0, 29, 31), "waiting": Estimate(70.0, 0, 500.0)}
    situation = Situation(
        step=step,
        parts=known,
        ranks=[{part: each.value for part, each in known.items()}],
        profile=None,
        caps_bytes=(1, 1),
    )
    found = {action.key: action for action in actions.actions(situation)}
    for key in ("accumulate", "straggler"):
        assert found[key].high == pytest.approx(100 / 40), key
    assert found["straggler"].predicted_ms == 40.0
    assert found["straggler"].speedup == pytest.approx(100 / 40)


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
