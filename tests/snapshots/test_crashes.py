"""kill -9 at random moments: what is left loads, with the bits of an undisturbed training; no sample occurs twice."""

import json
import subprocess
import sys

import pytest

from training.needs import torch  # noqa: F401
from training.pool import environment

KINDS = ["overlap", "hook", "local", "own folders"]


def crashed(folder, kills, seed, kind):
    command = [sys.executable, "-m", "snapshots.crashes", str(folder), str(kills), str(seed), kind]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["kills"] == kills
    assert found["other_bits"] == []
    assert found["other_losses"] == 0
    assert found["repeated"] == []
    assert found["went_back"] == 0
    assert found["loaded"] > kills / 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_kills(tmp_path, kind):
    crashed(tmp_path, 4, 11, kind)


@pytest.mark.long
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("kind", KINDS)
def test_200_kills(tmp_path, kind):
    found = crashed(tmp_path, 200, 5, kind)
    assert found["finished"] > 5
