"""Alarms of given steps: the right cause, at the right step, and none where nothing is wrong."""

import dataclasses
import random

import pytest

from gradcast import documents
from gradcast.alarms import COMPUTE, DATA, LINK, WORKERS, Alarms, Observation
from gradcast.errors import Error

RANKS = 4
CHANGED_AT = 60


def steps(count, seed=1, noise=0.01, **changed):
    """Steps of 300 ms: 200 ms of passes, 10 ms of loading, 90 ms of waiting. From CHANGED_AT on, the named fields are
    as the functions of the step given make them."""
    draw = random.Random(seed)
    for number in range(count):
        vary = [1 + draw.gauss(0, noise) for _ in range(RANKS)]
        step = Observation(
            step=number,
            step_ms=300 * vary[0],
            expected_ms=290,
            compute_ms=tuple(200 * each for each in vary),
            data_ms=tuple(10 * each for each in vary),
            link_ms=150 * vary[1],
            expected_link_ms=145,
        )
        if number >= CHANGED_AT:
            step = dataclasses.replace(step, **{name: change(step) for name, change in changed.items()})
        yield step


def raised(observations, **options):
    alarms = Alarms(RANKS, **options)
    return [alarm for each in observations if (alarm := alarms.add(each))], alarms


def times(name, factor, rank=None):
    def change(step):
        values = getattr(step, name)
        if not isinstance(values, tuple):
            return values * factor
        return tuple(each * factor if rank in (None, index) else each for index, each in enumerate(values))

    return change


def longer(ms):
    return lambda step: step.step_ms + ms


def test_quiet_steps_raise_nothing():
    for seed in range(3):
        found, alarms = raised(steps(2000, seed, noise=0.05))
        assert found == alarms.all == []


@pytest.mark.parametrize(
    ("changed", "cause", "rank", "words"),
    [
        ({"compute_ms": times("compute_ms", 1.3, 2), "step_ms": longer(60)}, COMPUTE, 2, "rank 2 computes 1.30 times"),
        ({"compute_ms": times("compute_ms", 1.3), "step_ms": longer(60)}, COMPUTE, None, "most ranks compute 1.30"),
        ({"data_ms": times("data_ms", 3, 1), "step_ms": longer(20)}, DATA, 1, "ms between the passes, expected 10.0"),
        ({"link_ms": times("link_ms", 2), "step_ms": longer(120)}, LINK, None, "gives 473 of 947 Mbit/s"),
        ({"step_ms": longer(60)}, WORKERS, None, "4 workers do the work of 3.3"),
    ],
)
def test_a_change_for_the_worse_raises_its_cause(changed, cause, rank, words):
    found, alarms = raised(steps(120, **changed), link_bits=150e3 * 947)
    assert [(each.cause, each.rank) for each in found] == [(cause, rank)]
    (alarm,) = alarms.active
    assert alarm.since_step == CHANGED_AT
    assert alarm.step == CHANGED_AT + 11
    assert words in alarm.sentence
    assert alarm.sentence.startswith(f"step {alarm.step}: ")


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ((1, 2), "the link between host 1 (b) and host 2 (c) gives 473 of 947 Mbit/s since step 60; check its cables"),
        ((3,), "the link of host 3 (d) gives 473 of 947 Mbit/s since step 60; check its cables"),
        ((), "the slowest link gives 473 of 947 Mbit/s since step 60, and no link is clearly slower than the others"),
        (None, "the slowest link gives 473 of 947 Mbit/s since step 60; check with `gradcast network`"),
    ],
)
def test_an_alarm_of_a_link_names_its_hosts(hosts, words):
    (found,), alarms = raised(steps(120, link_ms=times("link_ms", 2), step_ms=longer(120)), link_bits=150e3 * 947)
    assert alarms.is_suspect(LINK)
    assert not alarms.is_suspect(DATA)
    assert found.slowdown == pytest.approx(2, rel=0.02)
    located = alarms.locate(found, hosts, "abcd")
    assert words in located.sentence
    assert alarms.active == [located]
    assert dataclasses.replace(located, hosts=None, sentence=found.sentence) == found


def test_an_alarm_is_over_when_steps_are_as_expected():
    def for_a_while(step):
        return step.step_ms + (60 if step.step < 100 else 0)

    found, alarms = raised(steps(200, step_ms=for_a_while))
    assert len(found) == 1
    assert alarms.active == []
    assert [(each.cause, each.until_step) for each in alarms.all] == [(WORKERS, 113)]


def test_one_slow_step_in_ten_raises_nothing():
    found, _ = raised(steps(600, step_ms=lambda step: step.step_ms * (5 if step.step % 10 == 0 else 1)))
    assert found == []


def test_first_steps_far_from_the_prediction_are_an_alarm():
    """The prediction is corrected by a tenth at most: steps are as usual, but not as expected."""
    found, _ = raised(dataclasses.replace(step, expected_ms=200) for step in steps(60))
    assert [alarm.cause for alarm in found] == [WORKERS]
    assert found[0].expected_ms == pytest.approx(220)
    assert raised(dataclasses.replace(step, expected_ms=280) for step in steps(600))[0] == []


def test_without_a_prediction_the_first_steps_are_what_is_expected():
    plain = [Observation(step.step, step.step_ms) for step in steps(120, step_ms=longer(60))]
    found, _ = raised(plain)
    assert [alarm.cause for alarm in found] == [WORKERS]


def test_a_change_that_the_monitor_has_found_is_not_waited_for():
    found, alarms = raised(steps(CHANGED_AT + 6, compute_ms=times("compute_ms", 1.3, 2), step_ms=longer(60)))
    assert found == []
    last = Observation(CHANGED_AT + 6, 360)
    alarm = alarms.confirm(last, [COMPUTE, DATA])
    assert (alarm.cause, alarm.rank, alarm.since_step) == (COMPUTE, 2, CHANGED_AT)
    assert alarms.confirm(last, [COMPUTE, DATA]) is None


def test_what_is_learned_anew_ends_alarms():
    found, alarms = raised(steps(120, step_ms=longer(60)))
    alarms.learn(120)
    assert alarms.active == []
    assert alarms.all == [dataclasses.replace(found[0], until_step=120)]
    assert not any(alarms.add(step) for step in steps(60))


def test_observations_are_read_from_json():
    (step,) = steps(1)
    assert Observation.read(dataclasses.asdict(step)) == step
    assert Observation.read({"step": 1, "step_ms": 300, "data_ms": None}) == Observation(1, 300)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": 1}, "step_ms is missing"),
        ({"step": 1, "step_ms": "300"}, 'step_ms is "300"; 0, or a number from'),
        ({"step": 1, "step_ms": -1}, "step_ms is -1; 0, or a number from"),
        ({"step": None, "step_ms": 1}, "step is null; a whole number"),
        ({"step": 1.5, "step_ms": 1}, "step is 1.5; a whole number"),
        ({"step": 1, "step_ms": 1, "compute_ms": 4}, "compute_ms is 4; a list is expected"),
        ({"step": 1, "step_ms": 1, "data_ms": [1, None]}, r"data_ms\[1\] is null"),
    ],
)
def test_what_is_no_observation_is_refused(fields, words):
    with pytest.raises(Error, match=words):
        documents.checked(fields, Observation.read, "run.jsonl")
