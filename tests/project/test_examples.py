"""The examples train, and every way of sending the gradients gives the same losses."""

import importlib.util
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from conftest import ROOT
from gradcast.lab import LabError, run_workers

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

from gradcast.snapshots.store import complete_steps  # noqa: E402, needs torch
from training.launch import launch, require_ended_well  # noqa: E402, needs torch

WAIT_S = 120
NEEDED = {
    "digits.py": ["sklearn"],
    "char_gpt.py": [],
    "hsdp_gpt.py": [],
    "lightning_digits.py": ["sklearn", "lightning"],
    "trainer_gpt.py": ["transformers", "accelerate"],
}


def without_times(output: str) -> list[str]:
    """The lines, without how long a step took."""
    return [re.sub(r", [\d.]+ ms per step", "", line) for line in output.splitlines()]


def printed(worker_count, *arguments) -> list[str]:
    """The lines of rank 0."""
    with tempfile.TemporaryFile("w+") as output:
        script = str(ROOT / "examples" / arguments[0])
        run_workers([script, *arguments[1:]], worker_count, timeout_s=WAIT_S, output=output)
        output.seek(0)
        return without_times(output.read())


def forked(worker_count, script, *arguments) -> list[str]:
    """The lines of rank 0."""
    for package in NEEDED[script]:
        if importlib.util.find_spec(package) is None:  # importing one takes seconds
            pytest.skip(f"{script} needs {package}, which is not installed")
    if script == "lightning_digits.py":  # reads more of torchrun's variables than launch() sets
        return printed(worker_count, script, *arguments)
    ends = launch(worker_count, *arguments, module=str(ROOT / "examples" / script), limit_s=WAIT_S)
    require_ended_well(ends)
    return without_times(ends[0].out)


@pytest.mark.parametrize(
    ("script", "length", "modes"),
    [
        ("digits.py", ["--epochs", "2"], ["hook", "overlap"]),
        ("char_gpt.py", ["--steps", "20", "--batch", "2"], ["overlap"]),
        ("hsdp_gpt.py", ["--steps", "12", "--batch", "1"], ["overlap"]),
        ("lightning_digits.py", ["--epochs", "2"], ["overlap"]),
        ("trainer_gpt.py", ["--steps", "20", "--batch", "2", "--clip", "0.5"], ["overlap"]),
        pytest.param("lightning_digits.py", ["--epochs", "2"], ["hook"], marks=pytest.mark.long),
        pytest.param("trainer_gpt.py", ["--steps", "20", "--batch", "2"], ["hook", "overlap"], marks=pytest.mark.long),
    ],
)
def test_all_ways_of_training_give_the_same_losses(script, length, modes):
    processes = 4 if script == "hsdp_gpt.py" else 2  # two replicas of two shards
    stock = forked(processes, script, "--gradcast", "off", *length)
    assert stock
    assert all("loss" in line for line in stock)
    for mode in modes:
        assert forked(processes, script, "--gradcast", mode, *length) == stock


@pytest.mark.parametrize(
    ("script", "length"),
    [
        ("digits.py", ["--epochs", "1"]),
        pytest.param("lightning_digits.py", ["--epochs", "1"], marks=pytest.mark.long),
        pytest.param("trainer_gpt.py", ["--steps", "20", "--batch", "2", "--clip", "0.5"], marks=pytest.mark.long),
    ],
)
def test_one_process_is_enough(script, length):
    assert len(forked(1, script, "--gradcast", "overlap", *length)) == 1


def kill_one_once_it_has_saved(folder: Path) -> None:
    """Kills a child of this process that was given ``folder``, as soon as a whole snapshot is in it."""
    while not complete_steps(folder):
        time.sleep(0.01)
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            if str(folder) in Path("/proc", child, "cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
                return


def test_a_killed_training_that_resumes_ends_as_one_that_was_not_interrupted(tmp_path):
    pytest.importorskip("sklearn")
    script, length, epochs = "resume_digits.py", ["--epochs", "20"], 20
    whole = printed(2, script, "--folder", str(tmp_path / "whole"), *length)
    assert len(whole) == epochs
    killed = tmp_path / "killed"
    threading.Thread(target=kill_one_once_it_has_saved, args=[killed], daemon=True).start()
    with pytest.raises(LabError):
        printed(2, script, "--folder", str(killed), *length)
    resumed, *again = printed(2, script, "--folder", str(killed), *length)
    assert re.fullmatch(rf"goes on after step \d+, in epoch {epochs + 1 - len(again)}", resumed)
    assert again == whole[-len(again) :]


def test_a_slow_process_gets_less_of_each_batch():
    lines = [line for line in printed(2, "balanced_shares.py", "--slowness", "3") if line.startswith("step")]
    shares = [tuple(map(int, re.search(r"shares (\d+), (\d+)", line).groups())) for line in lines]
    assert len(shares) == 6
    assert all(sum(each) == 96 for each in shares)
    fast, slow = shares[-1]
    assert slow < fast
