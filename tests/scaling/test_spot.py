"""Trainings on machines that may be revoked, against the exact mean."""

import dataclasses
import math
import statistics

import pytest

from gradcast.scaling import spot
from gradcast.scaling.spot import Spot

HOUR = 3600


def terms(**changes):
    """One revocation in five hours; checkpoints of half a minute every half an hour."""
    usual = {"revocations_per_hour": 0.2, "checkpoint_interval_s": 1800, "checkpoint_cost_s": 30, "restart_s": 300}
    return Spot(**{"price_per_hour": 1, **usual, **changes})


TERMS = terms()


def test_checkpoints_and_the_mean_of_one_part_by_hand():
    assert [spot.undisturbed_s(work_s, TERMS) for work_s in (1800, 1801, 7200)] == [1800, 1831, 7200 + 3 * 30]
    # One revocation in an hour, a part of an hour, restarts at once: e - 1 hours.
    hourly = terms(revocations_per_hour=1, checkpoint_interval_s=HOUR, checkpoint_cost_s=0, restart_s=0)
    assert spot.expected_s(HOUR, 1, hourly) == pytest.approx((math.e - 1) * HOUR)
    # Half the part on twice the machines is the same in half the time; a restart of an hour costs another factor e.
    assert spot.expected_s(HOUR / 2, 2, hourly) == pytest.approx((math.e - 1) * HOUR / 2)
    slow = dataclasses.replace(hourly, restart_s=HOUR)
    assert spot.expected_s(HOUR, 1, slow) == pytest.approx(math.e * (math.e - 1) * HOUR)


@pytest.mark.parametrize(
    ("work_h", "machine_count", "changes"),
    [
        (10, 8, {}),
        (3.3, 4, {"restart_s": 1800}),
        (5, 2, {"checkpoint_interval_s": 4 * HOUR}),
        (0.2, 16, {"checkpoint_cost_s": 0}),
        (5, 3, {"restart_s": 0}),
    ],
)
def test_simulated_trainings_agree_with_the_exact_mean(work_h, machine_count, changes):
    times = spot.simulate_s(work_h * HOUR, machine_count, terms(**changes), run_count=4000, seed=7)
    error = statistics.stdev(times) / math.sqrt(len(times))
    exact_s = spot.expected_s(work_h * HOUR, machine_count, terms(**changes))
    assert statistics.mean(times) == pytest.approx(exact_s, abs=4 * error)
    # Without the restart time and what is lost, the means are further apart than that.
    assert statistics.mean(times) - spot.undisturbed_s(work_h * HOUR, terms(**changes)) > 4 * error


def test_machines_that_age_last_a_short_training():
    """Shape 5: a machine lives about as long as the mean, five hours, and a training of one hour sees no revocation."""
    counts = {}
    for shape in (1.0, 5.0):
        times = spot.simulate_s(HOUR, 1, terms(shape=shape), run_count=500, seed=3)
        counts[shape] = times.count(spot.undisturbed_s(HOUR, TERMS))
    assert counts[1.0] < 450 < 490 < counts[5.0]
    # Nor are 64 of them given up by the mean of exponential lifetimes.
    assert spot.expected_s(HOUR, 64, TERMS) > spot.ABANDONED_FACTOR * HOUR
    times = spot.simulate_s(HOUR, 64, terms(shape=5.0), run_count=300, seed=1)
    assert spot.mean_s(times, HOUR, TERMS) / HOUR == pytest.approx(1.02, abs=0.02)
    # Those that settle are given up once it shows, which takes a few runs and not all of them.
    assert spot.simulate_s(2 * HOUR, 1000, terms(shape=0.9), run_count=10**6, seed=1)[0] == math.inf


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
def test_lifetimes_have_the_mean_that_is_asked_for_whatever_their_shape(shape):
    """A training without checkpoints to lose: revoked once per mean lifetime, and each time it stands still."""
    hourly = Spot(1, 1.0, checkpoint_interval_s=1.0, checkpoint_cost_s=0, restart_s=36, shape=shape)
    times = spot.simulate_s(400 * HOUR, 1, hourly, run_count=50, seed=1)
    assert (statistics.mean(times) / HOUR - 400) * HOUR / 36 == pytest.approx(400, rel=0.1)


def test_trainings_that_are_given_up():
    work_s = 4 * 1800  # with its checkpoints 7290 s; given up at 145,800 s
    limit_s = spot.ABANDONED_FACTOR * spot.undisturbed_s(work_s, TERMS)
    assert spot.mean_s([1000.0, 2000.0, math.inf], work_s, TERMS) == pytest.approx((3000 + limit_s) / 3)
    assert spot.mean_s([1000.0, math.inf, math.inf], work_s, TERMS) == math.inf
    # A thousand machines of which one goes every 18 seconds, and checkpoints every half an hour.
    assert spot.simulate_s(5 * HOUR, 1000, TERMS, run_count=3, seed=1) == [math.inf] * 3
    assert spot.expected_s(5 * HOUR, 10**6, TERMS) == math.inf


def test_nothing_is_revoked():
    calm = terms(revocations_per_hour=0.0)
    assert spot.simulate_s(5 * HOUR, 4, calm, run_count=3, seed=1) == [spot.undisturbed_s(5 * HOUR, calm)] * 3
    assert spot.expected_s(5 * HOUR, 4, calm) == spot.undisturbed_s(5 * HOUR, calm)


def test_quantiles():
    assert [spot.quantile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], share) for share in (0.1, 0.5, 0.9, 1.0)] == [1, 5, 9, 10]


def test_an_elastic_training_goes_on_with_the_machines_that_are_left():
    speeds = [0.01, 0.019]  # of one machine, of two
    assert spot.elastic_run(speeds, []) == (pytest.approx(1 / 0.019), pytest.approx(2 / 0.019))
    # Half is done when one leaves.
    time_s = 0.5 / 0.019 + 0.5 / 0.01
    assert spot.elastic_run(speeds, [0.5 / 0.019]) == (pytest.approx(time_s), pytest.approx(time_s + 0.5 / 0.019))
    assert spot.elastic_run(speeds, [1000.0]) == spot.elastic_run(speeds, [])
    assert spot.elastic_run(speeds, [0.0, 1000.0]) == (pytest.approx(100), pytest.approx(100))
    assert spot.elastic_run(speeds, [10.0, 20.0]) is None


def elastic(work_h, shares, run_count=4000, **changes):
    return spot.simulate_elastic(work_h * HOUR, shares, terms(**changes), run_count=run_count, seed=7)


def test_a_single_elastic_machine_is_an_ordinary_one():
    """Without a cost of checkpoints, which an elastic training pays with its speed."""
    changes = {"checkpoint_cost_s": 0}
    times = [run.time_s for run in elastic(5, [1.0], **changes)]
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert statistics.mean(times) == pytest.approx(spot.expected_s(5 * HOUR, 1, terms(**changes)), abs=4 * error)


def test_two_elastic_machines_have_the_mean_of_the_formula():
    """Machines that leave hardly ever together: the first after 5 / 2 hours in the mean, the last not at all."""
    work_h, rate, shares = 0.5, 0.2, [0.5, 1.0]
    runs = elastic(work_h, shares, checkpoint_cost_s=0)
    # Until one leaves at t < work, work - t is left for one machine, which takes twice as long; to the first order.
    lost_h = sum(
        2 * rate * math.exp(-2 * rate * t) * (work_h - t) for t in [work_h * (k + 0.5) / 1e3 for k in range(1000)]
    )
    expected_h = work_h + lost_h * work_h / 1000
    assert statistics.mean(run.time_s for run in runs) / HOUR == pytest.approx(expected_h, rel=0.03)
    # Perfectly shared work is paid once, however many do it.
    assert runs[0].machine_s == pytest.approx(2 * work_h * HOUR)
    assert runs[len(runs) * 95 // 100].machine_s == pytest.approx(2 * work_h * HOUR, rel=1e-6)


def test_elastic_trainings_that_never_end_are_abandoned():
    runs = elastic(5, [0.5, 1.0], run_count=20, revocations_per_hour=600.0)
    assert {run.time_s for run in runs} == {math.inf}
