"""torchrun starts a group again whose worker was killed; it goes on from the checkpoint with its plan and profile."""

import json
import subprocess
import sys

import pytest

from training import needs  # noqa: F401
from training.pool import environment

LIMIT_S = 120


def run(folder, mode, killed_step):
    """What rank 0 tells at the end."""
    folder.mkdir()
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    program = ["-m", "training.programs", "restarts", mode, str(folder), str(killed_step)]
    with subprocess.Popen(
        [sys.executable, "-m", *torchrun, *program],
        # Without it, torch 2.11 starts the group again on the store of its first life, where Gloo finds dead addresses
        # (a program of three lines without gradcast fails in the same way).
        env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TEST_TIMEOUT_S": "60"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its workers, which a killed one would leave behind
            _, errors = process.communicate(timeout=60)
            pytest.fail(f"torchrun did not end within {LIMIT_S} s\n{errors}")
    assert process.returncode == 0, errors
    return json.loads(out)


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
