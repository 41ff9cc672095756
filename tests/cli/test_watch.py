"""`gradcast watch`: the alarms of a file of steps."""

import json

import pytest


def write(path, lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def steps(count, slower_from=10**9, ranks=4):
    return [
        {
            "step": number,
            "step_ms": 400.0 if number >= slower_from else 300.0,
            "compute_ms": [200.0] * ranks,
            "data_ms": [10.0] * (ranks - 1) + [110.0 if number >= slower_from else 10.0],
        }
        for number in range(count)
    ]


def test_a_quiet_run_has_no_alarms(run, tmp_path):
    result = run("watch", write(tmp_path / "run.jsonl", steps(200)))
    assert (result.code, result.out) == (0, "steps: 200, alarms: 0\n")


def test_alarms_are_named_and_found(run, tmp_path):
    path = write(tmp_path / "run.jsonl", [*steps(100, 60)])
    result = run("watch", path)
    assert result.code == 1
    assert "rank 3 spends 110.0 ms between the passes, expected 10.0, since step 60" in result.out
    assert "(still at the end of the run)\nsteps: 100, alarms: 1" in result.out
    found = json.loads(run("watch", path, "--json").out)
    assert (found["steps"], found["alarms"][0]["cause"], found["alarms"][0]["rank"]) == (100, "data", 3)


def test_lines_may_be_statistics(run, tmp_path):
    """Those of the warm-up know no step yet, and one step may be written twice."""
    lines = [{"step": 1, "observed": None}, *({"step": 0, "observed": step} for step in steps(100, 60) for _ in "ab")]
    assert run("watch", write(tmp_path / "run.jsonl", lines)).out.endswith("steps: 100, alarms: 1\n")


def test_the_last_snapshot_is_told(run, tmp_path):
    numbers = {"step": 1200, "age_s": 3.4, "stall_ms": 12.0, "write_ms": 800.0, "overhead": 0.021, "failed": 0}
    lines = [{"observed": step, "snapshots": None} for step in steps(3)]
    lines += [{"observed": None, "snapshots": numbers | {"error": None}}]
    path = write(tmp_path / "run.jsonl", lines)
    expected = "snapshots: the last one is of step 1,200, 3.4 s old at the end of the run; the copy took 12.0 ms, "
    assert (
        run("watch", path).out == f"{expected}the write took 800.0 ms, 2.1% of the time in all\nsteps: 3, alarms: 0\n"
    )
    assert json.loads(run("watch", path, "--json").out)["snapshots"] == lines[-1]["snapshots"]
    write(path, [{"observed": None, "snapshots": {"step": None, "failed": 2, "error": "OSError: full"}}])
    assert "snapshots: none is complete; 2 failed, the last time with: OSError: full\n" in run("watch", path).out


def test_what_is_expected_may_be_given(run, tmp_path):
    """All steps are alike, so without it nothing is wrong."""
    path = write(tmp_path / "run.jsonl", [{"step": number, "step_ms": 400} for number in range(50)])
    assert run("watch", path).code == 0
    result = run("watch", path, "--expected", "335ms", "--ranks", "8")
    assert result.code == 1
    assert "expected 335.0: 8 workers do the work of 6.7 since step 0" in result.out


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["no JSON"], "line 1 is not valid JSON: the error is at line 1, column 1"),
        ([[1]], "line 1: the document is [1]; an object is expected"),
        ([{"observed": 3}], "line 1: observed is 3; an object is expected"),
        ([*steps(3), {"step": 4}], "line 4: step_ms is missing"),
    ],
)
def test_broken_lines_are_named(refused, tmp_path, lines, words):
    path = write(tmp_path / "run.jsonl", lines)
    refused(["watch", path], str(path), words)


def test_a_missing_file(refused, tmp_path):
    refused(["watch", tmp_path / "none.jsonl"], "none.jsonl", "does not exist")
