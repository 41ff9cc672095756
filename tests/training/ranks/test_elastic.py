"""torchrun starts a group again whose worker was killed; it goes on from the checkpoint with its plan and profile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training import needs  # noqa: F401
from training.pool import environment

PROGRAM = Path(__file__).parents[1] / "elastic.py"
LIMIT_S = 120


def run(folder, mode, killed_step):
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with subprocess.Popen(
        [*command, str(PROGRAM), str(folder), mode, str(killed_step)],
        # Without it, torch 2.11 starts the group again on the store of its first life, where Gloo finds dead addresses
        # (a program of three lines without gradcast fails in the same way).
        env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as torchrun:
        try:
            _, errors = torchrun.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # it ends its workers, which a killed one would leave behind
            _, errors = torchrun.communicate(timeout=60)
            pytest.fail(f"torchrun did not end within {LIMIT_S} s\n{errors}")
    assert torchrun.returncode == 0, errors
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_killed_worker_goes_on_from_the_checkpoint(tmp_path, mode):
    undisturbed = run(tmp_path / "undisturbed", mode, -1)
    restarted = run(tmp_path / "restarted", mode, 9)
    assert (undisturbed["life"], undisturbed["first"]) == (0, 0)
    assert restarted["life"] == 1
    assert restarted["first"] in (6, 8), "from the last checkpoint that was complete"
    assert restarted["policy"] == "fifo", "the checkpoint's plan is in force before the first step"
    assert restarted["digest"] == undisturbed["digest"]
