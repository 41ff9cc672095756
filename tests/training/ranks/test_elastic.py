"""torchrun starts a group again whose worker was killed; it goes on from the checkpoint with its plan and profile."""

import json

import pytest

from training import needs  # noqa: F401
from training.launch import torchrun


def run(folder, mode, killed_step):
    """What rank 0 tells at the end."""
    folder.mkdir()
    return json.loads(torchrun("-m", "training.programs", "restarts", mode, str(folder), str(killed_step)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.long)])
def test_a_killed_worker_goes_on_from_the_checkpoint(tmp_path, mode):
    undisturbed = run(tmp_path / "undisturbed", mode, -1)
    restarted = run(tmp_path / "restarted", mode, 9)
    assert (undisturbed["life"], undisturbed["first"]) == (0, 0)
    assert restarted["life"] == 1
    assert restarted["first"] in (6, 8), "from the last checkpoint that was complete"
    assert restarted["policy"] == "fifo", "the checkpoint's plan is in force before the first step"
    assert restarted["digest"] == undisturbed["digest"]
