"""Shares of a batch: the best whole numbers, changed only where every rank's steps show that it gains."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcast.shares import Step, best_shares, choose, even_shares, matches, part_of

EVEN = (64, 64, 64, 64)
REST_NS = 10e6


def steps_of(shares, times_ms, count=8, *, noise=0.0, fixed_ms=0.0, seed=0):
    """Steps of ranks that take these ms for a sample. ``noise``: largest relative deviation."""
    chance = random.Random(seed)
    steps = []
    for _ in range(count):
        busy_ns = [
            1e6 * (fixed_ms + time * share) * (1 + chance.uniform(-noise, noise))
            for time, share in zip(times_ms, shares, strict=True)
        ]
        steps.append(Step(tuple(map(float, shares)), tuple(busy_ns), max(busy_ns) + REST_NS))
    return steps


@given(times=st.lists(st.floats(0.01, 100), min_size=1, max_size=4), more=st.integers(0, 12))
def test_whole_shares_are_the_best_there_are(times, more):
    batch = len(times) + more
    found = best_shares(batch, times)
    assert sum(found) == batch
    assert min(found) >= 1
    every = (each for each in itertools.product(range(1, batch + 1), repeat=len(times)) if sum(each) == batch)
    best = min(max(t * n for t, n in zip(times, each, strict=True)) for each in every)
    assert max(t * n for t, n in zip(times, found, strict=True)) == pytest.approx(best)


@given(st.integers(1, 9), st.integers(0, 1000))
def test_even_shares_differ_by_one_at_most(world_size, more):
    shares = even_shares(world_size + more, world_size)
    assert sum(shares) == world_size + more
    assert max(shares) - min(shares) <= 1


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.data())
def test_a_smaller_batch_keeps_the_proportion(shares, data):
    count = data.draw(st.integers(len(shares), sum(shares)))
    part = part_of(shares, count)
    assert sum(part) == count
    assert min(part) >= 1
    assert max(part) <= max(shares)


@pytest.mark.parametrize(
    ("times_ms", "shares", "sentence"),
    [
        ((4, 4, 4, 8), (73, 73, 73, 37), "rank 3 computes 2.0 times as slowly: even shares 522 ms, balanced 306 ms"),
        (
            (1, 2.5, 1, 2.5),
            (92, 36, 92, 36),
            "rank 1 computes 2.5 times as slowly: even shares 170 ms, balanced 102 ms",
        ),
    ],
)
def test_slow_ranks_get_less(times_ms, shares, sentence):
    change = choose(steps_of(EVEN, times_ms), EVEN)
    assert sum(change.shares) == 256
    assert all(abs(found - right) <= 1 for found, right in zip(change.shares, shares, strict=True))
    assert change.sentence() == sentence
    assert choose(steps_of(change.shares, times_ms), change.shares) is None  # and that is all


def test_when_the_ranks_are_alike_again_shares_are_even_again():
    change = choose(steps_of((73, 73, 73, 37), (4, 4, 4, 4)), (73, 73, 73, 37))
    assert change.shares == EVEN
    assert change.sentence() == "the ranks compute alike: present shares 302 ms, even 266 ms"


def test_even_shares_come_back_for_a_smaller_gain_than_they_were_left_for():
    near = (65, 65, 66, 60)
    assert choose(steps_of(near, (4, 4, 4, 4)), near).shares == EVEN
    assert choose(steps_of(EVEN, (4, 4, 4, 4.1)), EVEN) is None


@pytest.mark.parametrize(("noise", "most"), [(0.0, 0), (0.02, 0), (0.08, 0), (0.2, 10)])
def test_equal_ranks_keep_even_shares(noise, most):
    found = [choose(steps_of(EVEN, (4, 4, 4, 4), noise=noise, seed=seed), EVEN) for seed in range(1000)]
    assert sum(each is not None for each in found) <= most


def test_a_fixed_part_is_found_by_a_few_changes():
    """Of a rank at half speed all is slow, also what does not depend on samples: here a quarter of its step."""
    shares, slowness = (64, 64, 64, 64), (1, 1, 1, 2)

    def busy(each):
        return [factor * (60 + 3 * share) for factor, share in zip(slowness, each, strict=True)]

    for _ in range(3):
        steps = [Step(tuple(map(float, shares)), tuple(1e6 * ms for ms in busy(shares)), 1e6 * max(busy(shares)))] * 8
        change = choose(steps, shares)
        shares = shares if change is None else change.shares
    best = min(max(busy((n, n, n, 256 - 3 * n))) for n in range(64, 85))
    assert max(busy(shares)) < 1.03 * best


def test_one_odd_step_decides_nothing():
    steps = steps_of(EVEN, (4, 4, 4, 4))
    steps[2] = steps_of(EVEN, (4, 4, 4, 40), count=1)[0]
    assert choose(steps, EVEN) is None
    steps = steps_of(EVEN, (4, 4, 4, 8))
    steps[2] = steps_of(EVEN, (4, 4, 4, 4), count=1)[0]
    assert choose(steps, EVEN) is not None


def test_where_the_network_takes_most_of_a_step_nothing_is_gained():
    steps = [Step(step.weights, step.busy_ns, 40 * step.step_ns) for step in steps_of(EVEN, (4, 4, 4, 8))]
    assert choose(steps, EVEN) is None


def test_weights_may_be_tokens_and_steps_have_several_batches():
    steps = [
        Step(tuple(500.0 * n for n in step.weights), step.busy_ns, step.step_ns)
        for step in steps_of(EVEN, (4, 4, 4, 8))
    ]
    assert choose(steps, EVEN) == choose(steps_of(EVEN, (4, 4, 4, 8)), EVEN)


def test_weights_show_which_shares_hold():
    old, new = EVEN, (73, 73, 73, 37)
    assert matches((730, 700, 750, 380), new, old)
    assert not matches((640, 700, 600, 620), new, old)
    assert not matches(old, new, old)
