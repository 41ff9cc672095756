"""Random training programs with every feature against DDP; and that they find the defects that gradcast once had."""

import itertools

import pytest

from fuzz_training import loops, old_defects
from fuzz_training.campaign import Found, campaign, programs, tried

_TRIES = 25
_FEW, _MANY = 20, 180
_ONE_TURN = len(loops.FEATURES)  # so many programs in a row have all features
_DEFECT_LIMIT_S = 15.0  # some make ranks wait for each other in vain


def most_features(found):
    """Programs of one turn, each time the one with the most features that no valid program has had."""
    left = list(programs(0, _ONE_TURN))
    for _ in range(_FEW):
        missing = loops.BY_NAME.keys() - found.features
        best = max(left, key=lambda program: len(missing & {use.name for use in program.uses}))
        left.remove(best)
        yield best


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", ["few", pytest.param("many", marks=pytest.mark.slow)])
def test_random_programs_are_equal_or_refused(ranks, capsys, which):
    found = Found()
    campaign(ranks, most_features(found) if which == "few" else programs(0, _MANY), found)
    with capsys.disabled():
        print(f"\n{found.table()}")
    smallest = "\n\n".join(f"{outcome.text[:1500]}\n{program.body()}" for program, outcome in found.failures)
    assert not found.failures, smallest
    if which == "few":
        return
    assert found.states["refused"] <= 0.05 * found.valid
    assert found.features == loops.BY_NAME.keys(), "of these, no program is valid"
    assert found.followed >= 0.75 * found.states["equal"]
    assert found.valid >= 0.95 * found.states.total()


@pytest.mark.slow
@pytest.mark.parametrize("name", old_defects.DEFECTS)
def test_a_defect_that_is_put_back_is_found(ranks, name):
    """And the program that finds it is right without the defect."""
    for program in itertools.islice(old_defects.DEFECTS[name].programs(), _TRIES):
        if tried(ranks, program, old_defects.run, name, limit_s=_DEFECT_LIMIT_S).state == "failed":
            assert tried(ranks, program).state != "failed"
            return
    pytest.fail(f"{_TRIES} programs have not found it")
