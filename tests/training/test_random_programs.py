"""A fixed set of random training programs against DDP; and that they find the defects that gradcast once had."""

import itertools

import pytest

from fuzz_training import loops, old_defects
from fuzz_training.campaign import campaign, programs, tried

_TRIES = 25
_ONE_TURN = len(loops.FEATURES)  # so many programs in a row have all features
_DEFECT_LIMIT_S = 15.0  # some make ranks wait for each other in vain


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("first", "count"), [(0, _ONE_TURN), pytest.param(_ONE_TURN, 140, marks=pytest.mark.slow)])
def test_random_programs_are_equal_or_refused(ranks, capsys, first, count):
    found = campaign(ranks, programs(first, count))
    with capsys.disabled():
        print(f"\n{found.table()}")
    smallest = "\n\n".join(f"{outcome.text[:1500]}\n{program.body()}" for program, outcome in found.failures)
    assert not found.failures, smallest
    assert found.states["refused"] <= 0.05 * found.valid
    assert found.features == loops.BY_NAME.keys(), "of these, no program is valid"
    assert found.followed >= 0.75 * found.states["equal"]
    assert found.valid >= 0.95 * count


@pytest.mark.slow
@pytest.mark.parametrize("name", old_defects.DEFECTS)
def test_a_defect_that_is_put_back_is_found(ranks, name):
    """And the program that finds it is right without the defect."""
    for program in itertools.islice(old_defects.DEFECTS[name].programs(), _TRIES):
        if tried(ranks, program, old_defects.run, name, limit_s=_DEFECT_LIMIT_S).state == "failed":
            assert tried(ranks, program).state != "failed"
            return
    pytest.fail(f"{_TRIES} programs have not found it")
