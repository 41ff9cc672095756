"""``handle.on_step``: each step of this rank once, with what it did."""

import itertools

from training.attached import Attached, not_refused
from training.needs import torch
from training.pool import on_ranks
from training.test_disabled import disabling

nn = torch.nn
STEPS = 6


def watched(**options):
    """A training, and the steps that its stream has given."""
    torch.manual_seed(0)
    training, seen = Attached(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), **options), []
    return training, seen, training.handle.on_step(seen.append)


def train(training, steps=STEPS):
    for _ in range(steps):
        training.step(torch.ones(3, 4))


@on_ranks(2)
def test_each_step_comes_once_when_the_next_one_has_ended(rank, mode):
    training, seen, registration = watched(mode=mode)
    train(training)
    assert [each.number for each in seen] == list(range(STEPS - 1))
    assert all(one.start_ns + one.step_ns == other.start_ns for one, other in itertools.pairwise(seen))
    assert seen[-1].plan is training.handle.plan
    assert seen[0].plan is not seen[-1].plan, "that of the warm-up"
    for each in seen:
        assert 0 < each.backward_ns < each.step_ns
        assert each.wait_ns < each.step_ns
        assert 0 < each.link_ns < each.step_ns
    assert (seen[-1].update_calls > 0) == (mode == "overlap")
    registration.remove()
    train(training, 1)
    assert len(seen) == STEPS - 1
    training.handle.detach()
    return []


@on_ranks(2)
def test_without_a_plan_the_length_of_a_step_is_known(rank, mode):
    with disabling:
        training, seen, _ = watched(mode=mode)
        train(training)
    training.handle.detach()
    assert [each.number for each in seen] == list(range(STEPS))
    assert all(one.start_ns + one.step_ns == other.start_ns for one, other in itertools.pairwise(seen))
    assert all(each.step_ns > 0 and each.plan is each.link_ns is each.wait_ns is None for each in seen)
    return []


def test_what_cannot_be_called_is_refused():
    training, *_ = watched()
    assert not not_refused(lambda: training.handle.on_step(3), "on_step() got 3; a function of a step")
    training.handle.detach()
    assert not not_refused(lambda: training.handle.on_step(print), "detached")
