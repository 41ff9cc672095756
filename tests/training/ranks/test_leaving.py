"""However a program leaves, it ends soon: with finished parameters or a clear error, and nothing is left behind."""

import pytest

from training import needs  # noqa: F401
from training.launch import launch


def ended_well(ends, code=0):
    """No rank hung, crashed or left a process; C++ had no reason to speak."""
    for rank, end in enumerate(ends):
        assert end.code == code, f"rank {rank} ended with {end.code}\n{end.errors}"
        assert not end.left_behind
        for sign in ("terminate called", "Fatal Python error", "Segmentation fault", "leaked"):
            assert sign not in end.errors, end.errors


def digests(ends):
    return [told["digest"] for end in ends for told in end.told if "digest" in told]


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
def test_falling_off_the_end(mode):
    ends = launch(2, "falls_off_the_end", "ours", mode)
    ended_well(ends)
    assert all(end.told == [{"done": True}] for end in ends)
    assert all("Traceback" not in end.errors for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize("registered", ["first", "last"])
def test_a_handler_at_exit_reads_finished_parameters(registered):
    theirs, ours = (launch(2, "reads_at_exit", side, registered) for side in ("theirs", "ours"))
    ended_well(theirs)
    ended_well(ours)
    assert digests(ours) == digests(theirs)
    assert len(digests(ours)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_parameters_after_the_group_is_destroyed(mode):
    theirs, ours = (launch(2, "destroys_group", side, mode) for side in ("theirs", "ours"))
    ended_well(theirs)
    ended_well(ours)
    assert digests(ours) == digests(theirs)
    assert len(digests(ours)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["leaves", "destroys"])
def test_the_threads_of_lasting_groups_end_before_python(way):
    """One that needs Python afterwards ends the program with SIGABRT."""
    ends = launch(2, "leaves_groups_open", way)
    ended_well(ends)
    for end in ends:
        assert "Traceback" not in end.errors, end.errors
        assert [told["sum"] for told in end.told if "sum" in told] == [3, 3]
        used, left = (told["threads"] for told in end.told if "threads" in told)
        of_one_group = used // 3  # the program's own and two others
        assert of_one_group > 0
        assert left == (0 if way == "destroys" else of_one_group)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("sys.exit", 7), ("os._exit", 7), ("raise", 1)])
def test_leaving_with_a_code_of_the_programs_own(how, code):
    ends = launch(2, "exits", "ours", how)
    ended_well(ends, code)
    if how == "raise":
        assert all("the user's own error" in end.errors for end in ends)


@pytest.mark.slow
def test_data_from_forked_processes():
    theirs, ours = (launch(2, "loads_data_in_processes", side) for side in ("theirs", "ours"))
    ended_well(theirs)
    ended_well(ours)
    assert digests(ours) == digests(theirs)
    assert len(digests(ours)) == 2
