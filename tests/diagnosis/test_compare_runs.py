"""`gradcast compare`: compares two runs, and tells whether they differ by more than chance."""

import json

import pytest

from diagnosis import doctor_runs
from gradcast.diagnosis.report import run_comparison


def with_step(run, low_ms, ms, high_ms):
    return run | {"step": {"ms": ms, "low_ms": low_ms, "high_ms": high_ms}}


@pytest.fixture
def before():
    return with_step(doctor_runs.doctor(), 510.0, 520.0, 530.0)


@pytest.mark.parametrize(
    ("after", "clear", "words"),
    [
        ((395, 400, 405), True, "B takes 400.0 ms per step, A 520.0: B is 1.30x faster. The intervals do not overlap."),
        ((500, 515, 535), False, "1.01x faster. The intervals overlap, so this may be chance."),
        ((600, 624, 650), True, "1.20x slower. The intervals do not overlap."),
        ((None, 400, None), None, "At least one run has no interval"),
    ],
)  # fmt: skip
def test_the_step(before, after, clear, words):
    difference = run_comparison.compare(before, with_step(before, *after))
    assert difference.step.clear is clear
    assert difference.step.difference == pytest.approx(after[1] - 520)
    assert words in run_comparison.sentence(difference)


def test_the_part_that_explains_it(before):
    after = with_step(before, 610, 620, 630)
    changed = {"backward": {"ms": 240.0, "low_ms": 239, "high_ms": 241}, "forward": {"ms": 60.0}}
    after["parts"] = [part | changed.get(part["key"], {}) for part in before["parts"]]
    difference = run_comparison.compare(before, after)
    assert "Most of it is backward: +" in run_comparison.sentence(difference)
    rows = {row.key: row for row in difference.times}
    assert rows["backward"].clear
    assert (rows["update"].clear, rows["update"].difference) == (False, 0)
    assert "interconnect" not in rows  # nothing in either


def test_an_action_that_only_one_run_knows(before):
    after = before | {"actions": [action for action in before["actions"] if action["key"] != "wire"]}
    rows = {row.key: row for row in run_comparison.compare(before, after).actions}
    assert (rows["wire"].b, rows["wire"].difference, rows["wire"].clear) == (None, None, None)
    assert rows["overlap"].difference == 0


def test_what_else_is_not_the_same(before):
    after = before | {"world_size": 8, "backend": "nccl"}
    assert run_comparison.compare(before, after).settings == [
        "the number of workers (4 and 8)",
        "the backend (gloo and nccl)",
    ]
    assert run_comparison.compare(before, before).settings == []


@pytest.fixture
def paths(tmp_path, before):
    for name, fields in (("a", before), ("b", with_step(before, 395.0, 400.0, 405.0) | {"world_size": 8})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "doctor.json").write_text(json.dumps(fields))
    return tmp_path / "a", tmp_path / "b"


def test_the_command(run, paths):
    result = run("compare", *paths)
    assert result.code == 0
    assert "The runs differ in the number of workers (4 and 8)." in result.out
    assert "step" in result.out
    row = next(line.split() for line in result.out.splitlines() if line.startswith("step "))
    assert row == ["step", "520.0", "400.0", "-120.0", "yes"]
    assert "1.30x faster" in result.out.splitlines()[-1]


def test_the_command_for_programs(run, paths):
    fields = json.loads(run("compare", paths[0] / "doctor.json", paths[1], "--json").out)
    step = fields["times_ms"][0]
    assert (step["key"], step["a"], step["b"], step["clear"]) == ("step", 520.0, 400.0, True)
    assert {row["key"] for row in fields["actions_speedup"]} >= {"int8", "wire", "overlap"}


@pytest.mark.parametrize(("limit", "code"), [("31%", 0), ("29%", 1), ("0.29", 1)])
def test_a_limit_makes_a_slower_run_a_finding(run, paths, limit, code):
    """520 ms are 30 % more than 400; a run that is faster is never one."""
    result = run("compare", paths[1], paths[0], "--fail-above", limit)
    assert result.code == code
    assert "1.30x slower" in result.out
    assert result.err == ("" if code == 0 else "gradcast: B is 30 % slower than A, more than 29 %\n")
    assert json.loads(run("compare", paths[1], paths[0], "--json").out)["slowdown"] == pytest.approx(0.3)
    assert run("compare", *paths, "--fail-above", "0%").code == 0


def test_bare_runs_can_be_compared(run, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(doctor_runs.bare()))
    result = run("compare", tmp_path / "a.json", tmp_path / "b.json")
    assert result.code == 0
    assert "this may be chance" in result.out


def test_a_run_that_is_none(run, paths, tmp_path):
    result = run("compare", paths[0], tmp_path)
    assert result.code == 2
    assert "doctor.json is missing; run `gradcast doctor` first" in result.err
    (tmp_path / "plan.json").write_text("{}")
    assert "was not written by gradcast doctor" in run("compare", paths[0], tmp_path / "plan.json").err
