"""A program that ends right after an operation ends well, however late Gloo's threads are to drop what they worked on.

Since torch 2.11 they need the GIL for tensors that Python knows; a thread that asks for it while Python ends is ended
inside a destructor, and the program with it: SIGABRT. Here it is late for sure (ends_late.cc). And how failures end.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from training.launch import launch, require_ended_well
from training.needs import torch

pytestmark = pytest.mark.slow

LIMIT_S = 120.0
# What a close() may take on top of what it waits for, on a busy machine.
CLOSED_S_MAX = 2.0


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """The library that has Gloo's threads late, for LD_PRELOAD."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("this needs a C++ compiler, which is missing here: apt-get install g++")
    library = tmp_path_factory.mktemp("late") / "late.so"
    source = Path(__file__).parents[1] / "ends_late.cc"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl", "-pthread"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return library


@pytest.fixture
def end(late, monkeypatch):
    """Runs a program of ends_programs.py on two ranks, of which Gloo's threads of rank 0 are late."""

    def run(program, limit_s=LIMIT_S):
        monkeypatch.setenv("LD_PRELOAD", str(late))
        return launch(2, program, module="training.ends_programs", limit_s=limit_s)

    return run


def test_plain_torch_aborts(end):
    """Else the tests below would pass whatever gradcast does."""
    ends = end("plain")
    if ends[0].code == 0:
        pytest.skip(f"torch {torch.__version__} does not need the GIL to drop a tensor, so there is nothing to avoid")
    assert ends[0].code == -signal.SIGABRT, ends[0].errors
    assert "terminate called without an active exception" in ends[0].errors


@pytest.mark.parametrize("operation", ["gather", "from_first", "copy_from_first"])
def test_messages_on_a_group_that_nobody_ends(end, operation):
    require_ended_well(end(operation))


@pytest.mark.parametrize("program", ["hook", "step"])
def test_groups_of_our_own_are_ended(end, program):
    """Their threads are gone before Python ends; those of the program's own group are the program's business."""
    ends = end(program)
    require_ended_well(ends)
    for each in ends:
        before, after = (told["threads"] for told in each.told)
        assert before == 2 * after > 0


def test_a_state_of_the_hook_outlives_the_groups(end):
    require_ended_well(end("hook_is_kept"))


def test_a_collection_that_ends_the_group_does_not_hang(end):
    """Whoever waits for Gloo's threads with the GIL must not wait for one that needs it."""
    ends = end("collects", limit_s=60.0)
    require_ended_well(ends)
    for each in ends:
        assert [told["threads"] for told in each.told] == [0, 0]


def test_a_failure_of_the_only_operation_is_told_to_the_group():
    """Nothing else is in flight, but this rank will not go on: without an abort its peers wait until the timeout."""
    (ended,) = launch(1, "fails_alone", module="training.ends_groups", limit_s=LIMIT_S)
    require_ended_well([ended])
    failed, closed = ended.told
    assert "all_reduce of 4000 bytes failed on rank 0 of 2" in failed["error"]
    assert (failed["before"], failed["after"]) == (0, 1)
    assert closed == {"aborts": 1}


@pytest.mark.parametrize("stuck", [("bf16", "Group"), ("fp16", "Group"), ("fp32", "SlowToAbort")])
def test_close_does_not_wait_for_what_cannot_be_aborted(stuck):
    (ended,) = launch(1, "closes_what_is_stuck", *stuck, module="training.ends_groups", limit_s=LIMIT_S)
    require_ended_well([ended])
    (told,) = ended.told
    assert told["early"] is None
    assert told["error"] == "enough"
    assert told["closed_s"] < CLOSED_S_MAX
