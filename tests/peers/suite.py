"""Runs PyTorch's own DDP tests on the CPU, alone or with gradcast in DDP's place.

    python -m peers.suite list        their names, one a line
    python -m peers.suite MODE        reads names, one a line; answers each with a line of JSON

MODE: plain, hook or overlap. Torch is imported once: the ranks of a test are forked.
"""

import contextlib
import inspect
import json
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed

from gradcast.training.compat import extension
from peers import everywhere
from peers.on_cpu import distributed_test as tests

LIMIT_S = 45
# Dozens of trainings.
LIMITS_S = {"test_ddp_uneven_inputs": 120}
# Questions to DDP about its own work, which gradcast does instead: answered, so that the rest of the test can run.
ANSWERED = {
    "test_ddp_uneven_inputs": lambda ddp: {"join_uneven_inputs": 1},
    "test_different_graph_across_ranks": lambda ddp: {"has_rebuilt_buckets": int(ddp.static_graph)},
}
BASE = tests.DistributedTest._DistTestBase


class Suite(tests.TestDistBackend, BASE):
    def setUp(self) -> None:
        super().setUp()
        answers = ANSWERED.get(self._testMethodName)
        if answers is not None:
            asked = DistributedDataParallel._get_ddp_logging_data
            DistributedDataParallel._get_ddp_logging_data = lambda ddp: asked(ddp) | answers(ddp)
            self.addCleanup(setattr, DistributedDataParallel, "_get_ddp_logging_data", asked)
        # In torch's own run each rank is started anew, which takes seconds.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def names() -> list[str]:
    """Every test that has DDP in its name, or makes a DDP module itself or in a method that it calls."""
    found = []
    for name in dir(BASE):
        if name.startswith("test_") and (
            re.search("ddp|DistributedDataParallel", name, re.IGNORECASE) or _makes_ddp(name, set())
        ):
            found.append(name)
    return found


def _makes_ddp(name: str, seen: set[str]) -> bool:
    seen.add(name)
    source = _source(name)
    called = set(re.findall(r"self\.(_\w+)\(", source)) - seen
    return "DistributedDataParallel(" in source or any(_makes_ddp(each, seen) for each in called)


def _source(name: str) -> str:
    function = inspect.unwrap(getattr(BASE, name, lambda: None))
    try:
        text = inspect.getsource(function)
    except OSError:
        return ""
    # A parametrized test: its source is that of the method it was made of.
    made_of = name if f"def {name}" in text or "<lambda>" in text else re.sub(r"_[A-Za-z]+_(True|False).*", "", name)
    return text if made_of == name or not hasattr(BASE, made_of) else inspect.getsource(getattr(BASE, made_of))


def ranks_of(name: str) -> int:
    return 4 if re.search(r"world_size\(4\)|skip_if_lt_x_gpu\(4\)", _source(name)) else 2


def run(name: str) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = str(ranks_of(name))
    started_s = time.monotonic()
    result = unittest.TestResult()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[everywhere.NOTES_VARIABLE] = f"{folder}/rank"
        suite = Suite(name)
        with contextlib.redirect_stdout(sys.stderr):
            suite.run(result)
        texts = [path.read_text() for path in sorted(Path(folder).iterdir())]
    for process in torch.multiprocessing.active_children():
        process.kill()
        process.join()
    problems = [text for _, text in [*result.errors, *result.failures]]
    skips = [text for _, text in result.skipped]
    return {
        "outcome": "failed" if problems else "skipped" if skips else "passed",
        "text": "\n".join(problems or skips),
        "seconds": round(time.monotonic() - started_s, 2),
        # Rank 0's count: refusals are the same on all ranks.
        "notes": [json.loads(line) for line in (texts[0].splitlines() if texts else [])],
    }


def main(mode: str) -> None:
    if mode == "list":
        print("\n".join(names()))
        return
    if mode != "plain":
        everywhere.install(mode)
        extension.load()
    common_distributed.get_timeout = lambda test: LIMITS_S.get(test.split(".")[-1], LIMIT_S)
    tests.default_pg_timeout = LIMIT_S
    Suite.setUpClass()
    # What the ranks print goes with the log, answers alone to the reader.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(line.strip())), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
