"""However a program leaves, it ends soon: with finished parameters or a clear error, and nothing is left behind."""

import pytest

from training import needs  # noqa: F401
from training.launch import launch, require_ended_well


def digests(ends):
    return [told["digest"] for end in ends for told in end.told if "digest" in told]


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
def test_falling_off_the_end(mode):
    ends = launch(2, "falls_off_the_end", "ours", mode)
    require_ended_well(ends)
    assert all(end.told == [{"done": True}] for end in ends)
    assert all("Traceback" not in end.errors for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        # A handler at exit reads finished parameters.
        pytest.param(("reads_at_exit", "first"), marks=pytest.mark.long),
        ("reads_at_exit", "last"),
        # Parameters are read after the group is destroyed.
        ("destroys_group", "overlap"),
        pytest.param(("destroys_group", "hook"), marks=pytest.mark.long),
        # Data comes from forked processes.
        ("loads_data_in_processes",),
    ],
    ids=" ".join,
)
def test_parameters_at_the_end_are_those_of_ddp(program):
    name, *arguments = program
    theirs, ours = (launch(2, name, side, *arguments) for side in ("theirs", "ours"))
    require_ended_well(theirs)
    require_ended_well(ours)
    assert digests(ours) == digests(theirs)
    assert len(digests(ours)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["leaves", "destroys"])
def test_the_threads_of_lasting_groups_end_before_python(way):
    """One that needs Python afterwards ends the program with SIGABRT."""
    ends = launch(2, "leaves_groups_open", way)
    require_ended_well(ends)
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
    require_ended_well(ends, code)
    if how == "raise":
        assert all("the user's own error" in end.errors for end in ends)
