"""A rank that is gone: the others get an error within the group's timeout, which names block, parameters and ranks."""

import re

import pytest

from training import needs  # noqa: F401
from training.launch import launch, require_network_error

# TIMEOUT_S of programs.py, and what noticing, raising and a busy machine may take on top.
WAITED_S_MAX = 5.0 + 10.0


def check_survivors(ends, gone):
    """Their sentences say which block, which parameters, and which ranks it may be about."""
    world_size = len(ends)
    assert ends[gone].code is not None, f"rank {gone} hangs\n{ends[gone].errors}"
    assert not ends[gone].left_behind
    for rank in {*range(world_size)} - {gone}:
        told = require_network_error(ends[rank])
        assert told["waited_s"] < WAITED_S_MAX
        message = told["message"]
        assert re.search(r"\d\.(weight|bias)", message), message
        assert re.search(rf"rank {rank}\b", message), message
        assert re.search(rf"(ranks 0 to {world_size - 1}|{world_size} ranks|of {world_size})", message), message


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_an_exception_in_the_middle_of_backward(mode, world_size):
    ends = launch(world_size, "fails_in_backward", mode, "1")
    assert ends[1].code == 1, ends[1].errors
    assert "the user's own error in backward" in ends[1].errors
    assert ends[1].told[-1]["message"] == "the user's own error in backward"
    check_survivors(ends, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "killed", "moment"),
    [("overlap", 1, "backward"), ("overlap", 0, "forward"), ("hook", 1, "forward"), ("hook", 0, "backward")],
)
def test_a_killed_rank(mode, killed, moment):
    ends = launch(3, "is_killed", mode, str(killed), moment)
    assert ends[killed].code == -9
    check_survivors(ends, killed)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_an_interrupted_rank_stops_waiting(mode):
    ends = launch(2, "is_interrupted", mode, "0")
    assert ends[0].code not in (0, None), ends[0].errors
    assert ends[0].told[-1]["error"] == "KeyboardInterrupt", ends[0].told
    assert all(end.code is not None and not end.left_behind for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.long)])
def test_a_survivor_that_catches_the_error_can_leave_well(mode):
    ends = launch(2, "catches_and_leaves", mode, "1")
    assert ends[1].code == 3
    assert ends[0].code == 0, ends[0].errors
    error, last = ends[0].told[-2:]
    assert error["code"] == "communication", error
    assert last == {"finite": True, "ordinary": True}
    assert not ends[0].left_behind
