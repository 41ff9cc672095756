"""Starts the runners of PyTorch's tests: one process each for DDP alone, hook mode and overlap mode."""

import json
import os
import signal
import subprocess
import sys

import pytest

from training.pool import environment


class Runner:
    """``python -m peers.suite MODE``: answers the name of a test with what came of it."""

    def __init__(self, mode: str, log) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "peers.suite", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(),
            start_new_session=True,
        )

    def run(self, name: str) -> dict:
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the runner has ended; its log tells why"
        return json.loads(answer)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=30)


@pytest.fixture(scope="session")
def runners(tmp_path_factory):
    """run(mode, name). A runner begins with the first test in its mode."""
    folder = tmp_path_factory.mktemp("peers")
    started: dict[str, Runner] = {}

    def run(mode: str, name: str) -> dict:
        if mode not in started:
            with open(folder / f"{mode}.log", "w") as log:
                started[mode] = Runner(mode, log)
        return started[mode].run(name)

    yield run
    for runner in started.values():
        runner.close()
