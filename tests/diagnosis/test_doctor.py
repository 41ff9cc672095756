"""The doctor around a user's script: it leaves no trace in the training, finds what is wrong, and explains why it
cannot.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import training.needs  # noqa: F401, skips where there is no torch
from gradcast.lab import LabError
from gradcast.lab.workers import run_workers
from training.pool import environment

SCRIPT = Path(__file__).resolve().parents[1] / "doctor" / "train.py"
DOCTOR = ["-m", "gradcast", "doctor"]
TIMEOUT_S = 180
ALL = ["--duration", "1s", "--steps", "8"]
QUICK = ["--no-network", "--no-trial", *ALL]


@pytest.fixture(autouse=True)
def _this_job(monkeypatch, native_part, dumps_folder):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def checked_result(folder):
    """The fields of doctor.json, whose parts add up to the step on every rank."""
    result = json.loads((folder / "doctor.json").read_text())
    assert sum(part["ms"] for part in result["parts"]) == pytest.approx(result["step"]["ms"], abs=1e-6)
    for rank in result["ranks"]:
        assert sum(rank["parts"].values()) == pytest.approx(rank["step_ms"], abs=1e-6)
    return result


def train(tmp_path, *arguments, before=()):
    """Trains on two ranks. Returns the digest of the final state, and what was printed."""
    with open(tmp_path / "said", "w") as said:
        command = [*before, str(SCRIPT), "--steps", "20", *arguments, "--state", str(tmp_path / "state")]
        run_workers(command, 2, timeout_s=TIMEOUT_S, output=said)
    return (tmp_path / "state").read_text(), (tmp_path / "said").read_text()


@pytest.fixture(scope="module")
def state_without_doctor(tmp_path_factory):
    """How long parts of a step take changes nothing in the final state."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        return train(tmp_path_factory.mktemp("alone"), "--layer-ms", "0.5")[0]


def told_apart(result, part, other):
    parts = {each["key"]: each["ms"] for each in result["parts"]}
    assert parts[part] > 3 * parts[other]
    # On busy cores traffic, or waiting for the other rank, may take even longer.
    others = max(parts["waiting"], parts["interconnect"] + parts["network"])
    assert (result["verdict"]["kind"] == "data-bound") == (parts[part] + parts[other] > others)


def storage_and_all_else(result, said):
    told_apart(result, "data_storage", "data_cpu")
    assert (result["world_size"], result["nodes"], result["script"]) == (2, [[0, 1]], str(SCRIPT))
    assert result["not_tried"] is None
    assert {action["key"] for action in result["actions"]} >= {"overlap", "bucket", "accumulate", "loader"}
    assert result["floor_ms"] <= result["step"]["ms"] + 1
    assert [each["rank"] for each in result["timeline"]] == [0, 1]
    assert all(each["blocks"] and each["spans"] for each in result["timeline"])
    assert result["network"]["pairs"][0]["tcp_gbit_per_s"] > 0
    assert "what would help" in said or "None of these actions will help" in said


def preparation(result, said):
    told_apart(result, "data_cpu", "data_storage")


def slow_rank(result, said):
    slow, best = result["straggler"], result["actions"][0]
    assert (result["view_rank"], result["verdict"]["kind"], slow["rank"]) == (0, "straggler", 1)
    assert slow["stage"] in ("forward", "backward")
    assert slow["layer"].split(".")[0] == "3"
    assert best["key"] == "straggler"
    assert best["speedup"] > 1.5


def python_between_operations(result, said):
    parts = {each["key"]: each["ms"] for each in result["parts"]}
    assert parts["launch"] >= 155
    # Operations may wait for a core, but not for Python.
    assert parts["forward"] < parts["launch"] / 2
    (action,) = (each for each in result["actions"] if each["key"] == "launch")
    assert action["predicted_ms"] == pytest.approx(result["step"]["ms"] - parts["launch"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "options", "require"),
    [
        (["--layer-ms", "0.5", "--read-ms", "60"], ALL, storage_and_all_else),
        (["--layer-ms", "0.5", "--prepare-ms", "60", "--workers", "1"], QUICK, preparation),
        (["--layer-ms", "1", "--slow-rank", "1", "--slow-ms", "120"], QUICK, slow_rank),
        (["--layer-ms", "0.5", "--python-ms", "160"], QUICK, python_between_operations),
    ],
)
def test_what_was_put_in_is_found_and_the_training_ends_in_the_very_state_in_which_it_would_have(
    tmp_path, state_without_doctor, arguments, options, require
):
    run = tmp_path / "run"
    state, said = train(tmp_path, *arguments, before=[*DOCTOR, *options, "-o", str(run)])
    assert state == state_without_doctor
    require(checked_result(run), said)


def diagnosed(program, tmp_path, *arguments):
    """Runs a script of one process under the doctor."""
    path = tmp_path / "script.py"
    path.write_text(program)
    command = [sys.executable, *DOCTOR, "--steps", "9", "-o", str(tmp_path / "run"), str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


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


SHARDS = TRAINS.replace(
    "ddp = torch.nn.parallel.DistributedDataParallel",
    """
from torch.distributed import device_mesh, fsdp
mesh = device_mesh.init_device_mesh("cpu", (1,))
ddp = (lambda module: fsdp.fully_shard(module, mesh=mesh))""",
)


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        (SHARDS, 0, "trains a module that FSDP shards"),
        ("raise SystemExit(7)", 7, "without a DistributedDataParallel module"),
        (TRAINS, 0, "there is one worker"),
        pytest.param("import sys; sys.exit('too bad')", 1, "too bad", marks=pytest.mark.slow),
        pytest.param(TRAINS.replace("sgd.step()", "pass"), 0, "before an optimizer", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_diagnosed_is_said_and_the_exit_code_stays(tmp_path, program, code, words):
    done = diagnosed(program, tmp_path)
    assert done.returncode == code
    assert words in done.stderr
    assert "defect of gradcast" not in done.stderr
    assert "no diagnosis" in done.stderr


@pytest.mark.slow
def test_its_own_options_reach_the_script_and_its_error_is_shown_from_its_own_first_line_on(tmp_path):
    program = "import sys\nprint(sys.argv[1:])\ndef broken():\n    raise ValueError('mine')\nbroken()"
    arguments = ["--lr", "-1", "--steps=3", "--", "-5us"]
    done = diagnosed(program, tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stdout.strip() == str(arguments)
    for words in ("ValueError: mine", "no diagnosis", "script.py"):
        assert words in done.stderr
    for words in ("runpy", "diagnosis/script.py"):
        assert words not in done.stderr


def test_a_script_that_is_not_there(run):
    done = run("doctor", "nowhere.py")
    assert done.code == 2
    assert "the script nowhere.py does not exist" in done.err


def run_on_two(tmp_path, program, *options, arguments=()):
    """Runs a script on two ranks under the doctor. Returns what was printed, and the errors."""
    path = tmp_path / "script.py"
    path.write_text(program)
    command = [*DOCTOR, *options, "-o", str(tmp_path / "run"), str(path), *arguments]
    with open(tmp_path / "said", "w") as said, open(tmp_path / "errors", "w") as errors:
        run_workers(command, 2, timeout_s=TIMEOUT_S, output=said, errors=errors)
    return (tmp_path / "said").read_text(), (tmp_path / "errors").read_text()


def ends(tmp_path):
    return f"\nopen({str(tmp_path / 'ended')!r} + str(dist.get_rank()), 'w')"


@pytest.mark.slow
def test_after_a_diagnosis_all_ranks_end(tmp_path):
    _, errors = run_on_two(tmp_path, TRAINS + ends(tmp_path), *QUICK, "--stop", arguments=["20"])
    assert not list(tmp_path.glob("ended*"))
    assert "no diagnosis" not in errors
    checked_result(tmp_path / "run")


@pytest.mark.slow
def test_where_the_result_cannot_be_saved_no_rank_ends_and_beside_a_profiler_launching_is_not_told_apart(tmp_path):
    (tmp_path / "run" / "trace.json.gz").mkdir(parents=True)  # on rank 0 alone: what is to be replaced is no file
    begin = "profiler = torch.profiler.profile()\nif dist.get_rank() == 0: profiler.start()\n"
    end = "\nif dist.get_rank() == 0:\n  profiler.stop()\n  assert profiler.events()\ndist.destroy_process_group()"
    program = TRAINS.replace("for step", f"{begin}for step") + ends(tmp_path) + end
    said, errors = run_on_two(tmp_path, program, *QUICK, "--stop", arguments=["20"])
    assert sorted(each.name for each in tmp_path.glob("ended*")) == ["ended0", "ended1"]
    assert "no diagnosis: IsADirectoryError" in errors
    result = checked_result(tmp_path / "run")
    assert "launch" not in [part["key"] for part in result["parts"]]
    assert "launch" not in [action["key"] for action in result["actions"]]
    assert "forward, backward and update: torch's profiler cannot record" in said


@pytest.mark.slow
def test_three_steps_are_too_few(tmp_path):
    with pytest.raises(LabError, match="exit code 3"):
        run_on_two(tmp_path, TRAINS + "\nif dist.get_rank() == 0: raise SystemExit(3)")
    assert re.search("ended after [12] of the 25 steps", (tmp_path / "errors").read_text())
