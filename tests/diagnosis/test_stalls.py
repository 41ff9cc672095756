"""The step breakdown: hand-made tables, the sums of the parts, and robustness against noise."""

import dataclasses
import random
import statistics

import pytest

from gradcast.diagnosis.analyze.estimates import Estimate, estimate
from gradcast.diagnosis.analyze.step_breakdown import (
    TWO_SYNCS,
    RankSteps,
    breakdown,
    cached_wait,
    synchronized_ms,
)
from gradcast.diagnosis.runs import PARTS
from gradcast.training.measure.stage_exposure import frontier

# --- Waiting for data ---


@pytest.mark.parametrize(
    ("wait", "read", "prepare", "workers", "expected"),
    [
        (30, 20, 10, 0, 10),  # the loop does both itself
        (0, 0, 0, 0, 0),
        (50, 80, 20, 2, 10),  # a batch every 50 ms; without reading, every 10
        (5, 80, 20, 2, 0),
        (30, 0, 60, 2, 30),  # no reading: nothing changes
    ],
)
def test_what_a_loader_would_cost_with_its_data_in_memory(wait, read, prepare, workers, expected):
    assert cached_wait(wait, read, prepare, workers) == expected


# --- The frontier ---


def test_a_delay_counts_once_and_where_it_begins():
    # Rank 1 loads for 100 longer; the others see that as a longer backward pass.
    stages = frontier([[10, 50, 190], [110, 50, 90], [10, 50, 190]])
    assert [stage.exposed for stage in stages] == [110, 50, 90]
    assert stages[0].rank == 1
    assert sum(stage.exposed for stage in stages) == 250


def test_what_another_rank_makes_up_for_is_not_exposed():
    # Rank 0 loses 30 in its first stage, rank 1 20 in its second: only 10 more are seen there.
    stages = frontier([[40, 50], [10, 90]])
    assert [(stage.exposed, stage.rank) for stage in stages] == [(40, 0), (60, 1)]


def test_increments_add_up_to_the_slowest_rank():
    chance = random.Random(1)
    for _ in range(200):
        table = [[chance.randrange(1000) for _ in range(5)] for _ in range(4)]
        stages = frontier(table)
        assert sum(stage.exposed for stage in stages) == max(map(sum, table))
        assert all(stage.exposed >= 0 for stage in stages)


# --- Estimates ---


def test_an_interval_holds_what_was_drawn_from_nearly_always():
    chance = random.Random(3)
    inside = 0
    for _ in range(100):
        found = estimate(statistics.median, [chance.gauss(50, 5) for _ in range(30)])
        assert found.low <= found.value <= found.high
        inside += found.low <= 50 <= found.high
    assert inside >= 85


def test_an_estimate_of_a_difference_draws_each_sample_by_itself():
    found = estimate(lambda a, b: max(a) - min(b), [1.0, 2.0, 3.0], [10.0])
    assert (found.value, found.high) == (-7.0, -7.0)
    assert found.low < -7.0
    assert estimate(lambda a, b: max(a) - min(b), [1.0, 2.0, 3.0], [10.0]) == found, "the same in every run"


# --- The breakdown ---


def rank_steps(
    rank, *, step=200, loop=5, loader=20, forward=30, backward=60, update=5, launch=0, node=20, cluster=50,
    sent=(0, 0), sample=lambda ms: [float(ms)] * 9, **more,
):  # fmt: skip
    """``node`` and ``cluster`` are added to a step alone, and ``sent`` of both to its forward pass. ``launch`` is the
    launch overhead in forward. ``sample`` makes the samples of a time; they are constant if nothing is said.
    """
    alone = forward + backward + update
    compute = {"forward": sample(forward), "backward": sample(backward), "update": sample(update)}
    normal = {"step": step, "loop": loop, "loader": loader, "exposed": 1}
    return RankSteps(
        rank=rank,
        host=f"host{rank // 2}",
        normal={name: sample(ms) for name, ms in normal.items()},
        probes={
            "alone": {"step": sample(alone), **compute},
            "node": {"step": sample(alone + node), "forward": sample(forward + sent[0])},
            "cluster": {"step": sample(alone + cluster), "forward": sample(forward + sent[1])},
        },
        computing=compute | {"forward": sample(forward - launch)},
        **more,
    )


def values(found):
    return {part: estimate.value for part, estimate in found.parts.items()}


def test_parts_of_equal_ranks():
    found = breakdown([rank_steps(rank, step=170, batch_ms=(15.0, 5.0)) for rank in range(4)])
    assert values(found) == {
        "forward": 30, "backward": 60, "update": 5, "launch": 0, "loop": 5, "data_storage": 15, "data_cpu": 5,
        "interconnect": 20, "network": 30, "waiting": 0, "rest": 0,
    }  # fmt: skip
    assert found.straggler is None
    assert tuple(found.parts) == tuple(PARTS)
    # Without a look into workers all waiting for data is preparation.
    assert values(breakdown([rank_steps(rank) for rank in range(2)]))["data_storage"] == 0


def test_what_goes_by_between_operations_is_no_computing():
    found = values(breakdown([rank_steps(rank, step=170, launch=12) for rank in range(4)]))
    assert (found["forward"], found["launch"], found["backward"]) == (18, 12, 60)
    assert found["rest"] == 0
    # Recording an operation may make it longer than the stage usually is: not so the parts.
    found = values(breakdown([rank_steps(rank, step=170, launch=-3) for rank in range(4)]))
    assert (found["forward"], found["launch"], found["rest"]) == (30, 0, 0)


def test_what_is_exchanged_inside_costs_at_most_what_all_exchange_does():
    found = values(breakdown([rank_steps(rank, node=70, cluster=50) for rank in range(4)]))
    assert (found["interconnect"], found["network"]) == (50, 0)
    found = values(breakdown([rank_steps(rank, node=-3, cluster=50) for rank in range(4)]))
    assert (found["interconnect"], found["network"]) == (0, 50)


def test_where_two_kinds_are_the_same_steps_nothing_is_between_them_by_chance():
    """With one rank per host, steps of the node are steps alone."""
    chance = random.Random(3)
    ranks = []
    for rank in range(2):
        usual = rank_steps(rank)
        alone = usual.probes["alone"] | {"step": [95 * chance.uniform(0.9, 1.2) for _ in range(12)]}
        cluster = {"step": [150 * chance.uniform(0.9, 1.2) for _ in range(12)]}
        ranks.append(dataclasses.replace(usual, probes={"alone": alone, "node": alone, "cluster": cluster}))
    found = breakdown(ranks)
    assert found.parts["interconnect"] == Estimate(0.0, 0.0, 0.0)
    assert found.parts["network"].low < found.parts["network"].value < found.parts["network"].high
    widths = {part: each.high - each.low for part, each in found.parts.items()}
    assert widths["rest"] == pytest.approx(widths["network"]), "no surer than what it is the rest of"


@pytest.mark.parametrize(
    ("more", "stage", "layer"),
    [
        ({"backward": 100, "layers_ms": {"a": 10.0, "b": 60.0}}, "backward", "b"),
        ({"loader": 60}, "data_cpu", None),
        ({"loader": 60, "batch_ms": (50.0, 0.0)}, "data_storage", None),
        ({"loop": 45}, "loop", None),
        ({"forward": 70, "launch": 40, "layers_ms": {"a": 50.0, "b": 20.0}}, "launch", "a"),
    ],
)
def test_a_slow_rank_is_waited_for_and_named_with_its_stage(more, stage, layer):
    usual = {"layers_ms": {"a": 10.0, "b": 20.0}}
    found = breakdown([rank_steps(rank, step=210, **(usual | (more if rank == 2 else {}))) for rank in range(4)])
    assert found.view_rank != 2
    assert (found.straggler.rank, found.straggler.stage, found.straggler.layer) == (2, stage, layer)
    assert found.straggler.ms == pytest.approx(40)
    assert values(found)["waiting"] == pytest.approx(40)
    assert values(found)["forward"] == 30, "the shown rank's own"


def test_parts_add_up_to_the_step_also_where_measurements_disagree():
    chance = random.Random(5)

    def noisy(ms):
        return [ms * chance.uniform(0.9, 1.2) for _ in range(12)]

    for _ in range(10):
        found = breakdown([rank_steps(rank, step=170, launch=5, node=5, sample=noisy) for rank in range(4)])
        assert sum(values(found).values()) == pytest.approx(found.step.value, abs=1e-9)
        for each in found.ranks:
            assert tuple(each) == tuple(PARTS)
        for part in found.parts.values():
            assert part.low <= part.value <= part.high


def test_ranks_that_meet_twice_wait_twice():
    ranks = [rank_steps(rank, step=260) for rank in range(2)]
    ranks += [rank_steps(2, step=260, loader=60), rank_steps(3, step=260, backward=105)]
    assert values(breakdown(ranks))["waiting"] == 45, "the longer one hides the other"
    assert values(breakdown(ranks, TWO_SYNCS))["waiting"] == 85
    assert breakdown(ranks, TWO_SYNCS).straggler.rank == 3
    own = [each.own_parts for each in ranks]
    assert synchronized_ms(own, TWO_SYNCS) - synchronized_ms(own, TWO_SYNCS, ("data_storage", "data_cpu")) == 60


@pytest.mark.parametrize(
    ("sent", "late", "lag", "interconnect", "network"),
    # Of rank 0 nobody has anything before it is there.
    [((4, 12), 2, 40, 16, 22), ((4, 12), 2, 6, 18, 26), ((4, 12), 0, 40, 20, 30), ((0, 35), 2, 40, 20, 0)],
)
def test_buffers_that_are_sent_while_a_rank_is_waited_for_cost_nothing(sent, late, lag, interconnect, network):
    ranks = [rank_steps(rank, loader=20 + (lag if rank == late else 0), sent=sent) for rank in range(4)]
    found = values(breakdown(ranks, TWO_SYNCS))
    assert (found["interconnect"], found["network"], found["waiting"]) == (interconnect, network, lag)
    once = values(breakdown(ranks))
    assert (once["interconnect"], once["network"]) == (20, 30), "without buffers nothing is sent before gradients"


def test_noise_is_no_straggler():
    chance = random.Random(7)
    ranks = [rank_steps(rank) for rank in range(2)]
    for rank, each in enumerate(ranks):
        # The two differ by 3 % in the median, but each by 30 % from step to step.
        each.probes["alone"]["backward"][:] = [60 * (1 + 0.03 * rank) * chance.uniform(0.7, 1.3) for _ in range(9)]
    assert breakdown(ranks).straggler is None
