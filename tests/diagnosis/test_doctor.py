"""The doctor around a user's script: it leaves no trace in the training, finds what is wrong, and explains why it
cannot.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import training.needs  # noqa: F401, skips where there is no torch
from gradcast.lab import LabError
from gradcast.lab.workers import run_workers
from training.pool import environment

SCRIPT = Path(__file__).resolve().parents[1] / "doctor" / "train.py"
TIMEOUT_S = 180
QUICK = ["--no-network", "--no-trial", "--duration", "1s", "--steps", "8"]


@pytest.fixture(autouse=True)
def _this_job(monkeypatch, native_part, dumps_folder):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def train(tmp_path, *arguments, doctor=None):
    """Trains on two ranks and returns the digest of the final state. ``doctor`` has the options of the doctor, or
    None to train without it.
    """
    state = tmp_path / f"state{doctor is None}"
    before = [] if doctor is None else ["-m", "gradcast", "doctor", *doctor, "-o", str(tmp_path / "run")]
    with open(tmp_path / f"said{doctor is None}", "w") as said:
        run_workers([*before, str(SCRIPT), *arguments, "--state", str(state)], 2, timeout_s=TIMEOUT_S, output=said)
    return state.read_text()


def result_in(tmp_path):
    return json.loads((tmp_path / "run" / "doctor.json").read_text())


def require_sums(result):
    parts = sum(part["ms"] for part in result["parts"])
    assert parts == pytest.approx(result["step"]["ms"], abs=1e-6)
    for rank in result["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["step_ms"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_training_ends_in_the_very_state_in_which_it_would_have(tmp_path, workers):
    arguments = ["--layer-ms", "0.5", "--workers", workers, "--read-ms", "2"]
    options = ["--duration", "1s", "--steps", "8"]  # everything: the network and gradcast, too
    assert train(tmp_path, *arguments, doctor=options) == train(tmp_path, *arguments)
    result = result_in(tmp_path)
    require_sums(result)
    assert result["world_size"] == 2
    assert result["nodes"] == [[0, 1]]
    assert result["script"] == str(SCRIPT)
    assert result["not_tried"] is None
    assert {action["key"] for action in result["actions"]} >= {"overlap", "bucket", "wire", "accumulate", "loader"}
    assert result["floor_ms"] <= result["step"]["ms"] + 1
    assert [each["rank"] for each in result["timeline"]] == [0, 1]
    assert all(each["blocks"] and each["spans"] for each in result["timeline"])
    assert result["network"]["pairs"] == [] or result["network"]["pairs"][0]["tcp_gbit_per_s"] > 0
    said = (tmp_path / "saidFalse").read_text()
    assert "what would help" in said or "None of these actions will help" in said


@pytest.mark.slow
def test_what_was_put_in_is_found_and_named(tmp_path):
    train(tmp_path, "--layer-ms", "1", "--slow-rank", "1", "--slow-ms", "120", doctor=QUICK)
    result = result_in(tmp_path)
    require_sums(result)
    assert result["view_rank"] == 0
    assert result["verdict"]["kind"] == "straggler"
    slow = result["straggler"]
    assert slow["rank"] == 1
    assert slow["stage"] in ("forward", "backward")
    assert slow["layer"].startswith("3.") or slow["layer"] == "3"
    best = result["actions"][0]
    assert best["key"] == "straggler"
    assert best["speedup"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--read-ms", "60"], "data_storage"), (["--prepare-ms", "60", "--workers", "1"], "data_cpu")],
)
def test_slow_data_is_told_apart(tmp_path, arguments, part):
    train(tmp_path, "--layer-ms", "0.5", *arguments, doctor=QUICK)
    result = result_in(tmp_path)
    require_sums(result)
    parts = {each["key"]: each["ms"] for each in result["parts"]}
    other = {"data_storage": "data_cpu", "data_cpu": "data_storage"}[part]
    assert parts[part] > 3 * parts[other]
    # On busy cores traffic, or waiting for the other rank, may take even longer.
    others = max(parts["waiting"], parts["interconnect"] + parts["network"])
    assert (result["verdict"]["kind"] == "data-bound") == (parts[part] + parts[other] > others)


@pytest.mark.slow
def test_python_between_operations_is_told_apart_from_what_they_compute(tmp_path):
    train(tmp_path, "--layer-ms", "0.5", "--python-ms", "160", doctor=QUICK)
    result = result_in(tmp_path)
    require_sums(result)
    parts = {each["key"]: each["ms"] for each in result["parts"]}
    assert parts["launch"] >= 155
    # Operations may wait for a core, but not for Python.
    assert parts["forward"] < parts["launch"] / 2
    (action,) = (each for each in result["actions"] if each["key"] == "launch")
    assert action["predicted_ms"] == pytest.approx(result["step"]["ms"] - parts["launch"], rel=0.2)


def diagnosed(program, tmp_path, *options, ranks=2):
    """Runs a script under the doctor, with one process per rank. Returns the exit code of rank 0 and all output."""
    path = tmp_path / "script.py"
    path.write_text(program)
    command = [sys.executable, "-m", "gradcast", "doctor", *options, "-o", str(tmp_path / "run"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.returncode, done.stderr


TRAINS = """
import os, sys, torch, torch.distributed as dist
for name, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0").items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
for step in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    ddp(torch.ones(2, 4)).sum().backward()
    sgd.step()
"""


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("raise SystemExit(7)", 7, "without a DistributedDataParallel module"),
        (TRAINS, 0, "there is one worker"),
        pytest.param("print('nothing')", 0, "without a DistributedDataParallel module", marks=pytest.mark.slow),
        pytest.param("import sys; sys.exit('too bad')", 1, "too bad", marks=pytest.mark.slow),
        pytest.param(TRAINS.replace("sgd.step()", "pass"), 0, "before an optimizer", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_diagnosed_is_said_and_the_exit_code_stays(tmp_path, program, code, words):
    found, said = diagnosed(program, tmp_path)
    assert found == code
    assert words in said
    assert "defect of gradcast" not in said
    assert "no diagnosis" in said


@pytest.mark.slow
def test_an_error_of_the_script_is_shown_from_its_own_first_line_on(tmp_path):
    found, said = diagnosed("def broken():\n    raise ValueError('mine')\nbroken()", tmp_path)
    assert found == 1
    assert "ValueError: mine" in said
    assert "no diagnosis" in said
    assert "script.py" in said
    assert "runpy" not in said
    assert "diagnosis/script.py" not in said


def test_a_script_that_is_not_there():
    done = subprocess.run(
        [sys.executable, "-m", "gradcast", "doctor", "nowhere.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "the script nowhere.py does not exist" in done.stderr


@pytest.mark.slow
def test_its_own_options_reach_the_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "gradcast", "doctor", "--steps", "9", "-o", str(tmp_path / "run"), str(path)]
    arguments = ["--lr", "-1", "--steps=3", "--", "-5us"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_after_a_diagnosis_all_ranks_end_or_none(tmp_path, fails):
    path, run = tmp_path / "script.py", tmp_path / "run"
    path.write_text(f"{TRAINS}\nopen({str(tmp_path / 'ended')!r} + str(dist.get_rank()), 'w')")
    if fails:  # on rank 0 alone: what is to be replaced is no file
        (run / "trace.json.gz").mkdir(parents=True)
    arguments = ["-m", "gradcast", "doctor", *QUICK, "--stop", "-o", str(run), str(path), "20"]
    with open(tmp_path / "errors", "w") as errors:
        run_workers(arguments, 2, timeout_s=TIMEOUT_S, errors=errors)
    ended = sorted(each.name for each in tmp_path.glob("ended*"))
    assert ended == (["ended0", "ended1"] if fails else [])
    assert ("no diagnosis: IsADirectoryError" in (tmp_path / "errors").read_text()) == fails
    assert (run / "doctor.json").exists()


@pytest.mark.slow
def test_three_steps_are_too_few(tmp_path):
    path = tmp_path / "script.py"
    arguments = ["-m", "gradcast", "doctor", "-o", str(tmp_path / "run"), str(path)]
    # What a rank says is kept only when it fails, and rank 0 says it.
    path.write_text(TRAINS + "\nif dist.get_rank() == 0: raise SystemExit(3)")
    with pytest.raises(LabError, match=r"exit code 3(.|\n)*ended after [12] of the 25 steps"):
        run_workers(arguments, 2, timeout_s=TIMEOUT_S)


@pytest.mark.slow
def test_beside_a_profiler_of_the_script_launching_is_not_told_apart(tmp_path):
    path = tmp_path / "script.py"
    arguments = ["-m", "gradcast", "doctor", *QUICK, "-o", str(tmp_path / "run"), str(path), "15"]
    begin = "profiler = torch.profiler.profile()\nif dist.get_rank() == 0: profiler.start()\n"
    profiled = TRAINS.replace("for step", f"{begin}for step")
    end = "\nif dist.get_rank() == 0:\n  profiler.stop()\n  assert profiler.events()\ndist.destroy_process_group()"
    path.write_text(profiled + end)
    with open(tmp_path / "said", "w") as said:
        run_workers(arguments, 2, timeout_s=TIMEOUT_S, output=said)
    result = result_in(tmp_path)
    require_sums(result)
    assert "launch" not in [part["key"] for part in result["parts"]]
    assert "launch" not in [action["key"] for action in result["actions"]]
    assert "forward, backward and update: torch's profiler cannot record" in (tmp_path / "said").read_text()
