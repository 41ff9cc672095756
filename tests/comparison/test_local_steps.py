"""The schedule of local steps: every element is taken and applied once a round, and bytes are flat over it."""

import itertools
import json
import random

import pytest

import gradcast
from conftest import link_of
from gradcast.comparison import local_rounds
from gradcast.local_steps import CUT_ELEMENTS, STREAMED_BYTES_MIN, cut, make_schedule, predicted_step_ns

SIZES = [(50_000, 4), (3, 4), (0, 4), (1, 8), (700_000, 4), (128, 2), (90_001, 8)]


def covered(fragments, sizes):
    """Every element once, in order."""
    slices = [each for fragment in fragments for each in fragment]
    found = [(each.parameter, element) for each in slices for element in (each.lo, each.hi)]
    assert found == sorted(found)
    for index, (elements, _) in enumerate(sizes):
        own = [each for each in slices if each.parameter == index]
        assert sum(each.hi - each.lo for each in own) == elements
        assert all(one.hi == other.lo for one, other in itertools.pairwise(own))
        assert all(each.lo % CUT_ELEMENTS == 0 for each in own)


@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_fragments_are_about_equal(count):
    fragments = cut(SIZES, count)
    covered(fragments, SIZES)
    assert len(fragments) == count
    sizes = [sum((each.hi - each.lo) * SIZES[each.parameter][1] for each in fragment) for fragment in fragments]
    assert max(sizes) - min(sizes) <= 2 * CUT_ELEMENTS * 8


def test_any_sizes_are_cut():
    chance = random.Random(5)
    for _ in range(300):
        sizes = [(chance.choice([0, 1, 5, 129, 4000]), chance.choice([4, 8])) for _ in range(chance.randrange(1, 9))]
        sizes.append((1, 4))
        count = chance.randrange(1, 40)
        fragments = cut(sizes, count)
        covered(fragments, sizes)
        assert 1 <= len(fragments) <= count
        assert all(fragments)


@pytest.mark.parametrize("every", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("overlap", [None, 0, 1, 2, 9, 49])
def test_every_fragment_is_taken_once_a_round_and_applied_before_it_is_taken_again(every, overlap):
    if overlap is not None and overlap >= every:
        return
    schedule = make_schedule(SIZES, every, overlap)
    assert schedule.overlap < every
    state = dict.fromkeys(range(len(schedule.fragments)), "applied")
    taken_at = {}
    for step in range(1, 5 * every + 1):
        for fragment in schedule.applied(step):
            assert state[fragment] == "taken"
            assert step - taken_at[fragment] == schedule.overlap
            state[fragment] = "applied"
        taken = schedule.taken(step)
        for fragment in taken:
            assert state[fragment] == "applied"
            assert step - taken_at.get(fragment, step - every) == every
            assert step >= every
            taken_at[fragment] = step
            state[fragment] = "applied" if schedule.overlap == 0 else "taken"
        if schedule.overlap == 0:
            assert taken == (list(state) if step % every == 0 else [])
    assert len(taken_at) == len(state)


def test_fragments_are_as_many_as_steps_unless_they_get_tiny():
    assert len(make_schedule([(10**6, 4)], 20, None).fragments) == 20
    assert len(make_schedule([(10**6, 4)], 200, None).fragments) == 4 * 10**6 // STREAMED_BYTES_MIN
    assert len(make_schedule([(100, 4)], 20, None).fragments) == 1
    assert len(make_schedule([(10**8, 4)], 20, 0).fragments) == 15


def test_the_default_overlap_leaves_a_fragment_until_the_next_and_one_step():
    assert make_schedule([(10**6, 4)], 20, None).overlap == 2
    assert make_schedule([(10**5, 4)], 60, None).overlap == 11
    assert make_schedule([(10**6, 4)], 1, None).overlap == 0
    assert make_schedule([(10**6, 4)], 2, None).overlap == 1


def test_the_step_to_expect():
    assert predicted_step_ns(100, 600, 10, is_streamed=True) == 100
    assert predicted_step_ns(100, 6000, 10, is_streamed=True) == 600
    assert predicted_step_ns(100, 600, 10, is_streamed=False) == 160


def profile():
    """2 ms of compute; its parameters travel in 20 ms and start-up times."""
    tensors = [gradcast.Tensor(name=name, bytes=10_000_000, ready_ns=0, need_ns=0) for name in ("a", "b")]
    return gradcast.Profile(
        name="p", forward_ns=1e6, backward_ns=1e6, tensors=tensors, world_size=4, link=link_of(1e5, 1.0)
    )


def test_a_step_of_a_profile():
    link = profile().link
    assert local_rounds.ratio(profile(), link) == pytest.approx(10.05)
    assert local_rounds.suggested_every(profile(), link) == 20
    assert local_rounds.step_ns(profile(), link, 5) == pytest.approx((20e6 + 5 * 1e5) / 5)
    assert local_rounds.step_ns(profile(), link, 8) == pytest.approx(2.6e6)
    assert local_rounds.step_ns(profile(), link, 50) == pytest.approx(2e6)
    assert local_rounds.step_ns(profile(), link, 50, is_streamed=False) == pytest.approx(2e6 + 20.1e6 / 50)


def test_simulate_predicts_them(run, refused, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(profile().to_json())
    options = ["simulate", path, "--policy", "ddp", "--sync-every", "50"]
    assert "Changes the algorithm: local steps, averaged every 50: 2.0 ms" in run(*options).out
    told = json.loads(run(*options, "--json").out)["networks"][0]["local_steps"]
    assert told["bytes_per_step"] == 400_000
    assert "arXiv 2311.08105" in told["known"]
    refused([*options, "--bandwidth", "1gbit,2gbit"], "predicted on one network")
    refused([*options, "--scaling"], "--scaling")
