"""Frameworks wrap optimizers. gradcast takes the one inside, and says so where a wrapper goes past it."""

import logging

import pytest

import gradcast
from gradcast.training.compat import wrappers
from training.attached import heard, not_refused
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

nn = torch.nn


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by name, whose parts are those of another one."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Averaging(torch.optim.SGD):
    """Has an optimizer inside, but updates by itself."""

    def __init__(self, parameters, optimizer):
        super().__init__(parameters, lr=0.1)
        self.optimizer = optimizer


def sgd():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_innermost_optimizer_is_taken():
    inner = sgd()
    assert wrappers.unwrapped_optimizer(Wrapper(Wrapper(inner))) is inner
    assert wrappers.unwrapped_optimizer(inner) is inner


def test_what_updates_by_itself_is_no_wrapper():
    outer = Averaging(nn.Linear(2, 2).parameters(), sgd())
    assert wrappers.unwrapped_optimizer(outer) is outer
    empty = Wrapper(None)
    assert wrappers.unwrapped_optimizer(empty) is empty
    assert wrappers.unwrapped_optimizer("adam") == "adam"


def test_clipping_inside_is_refused_where_a_scaler_drives_the_wrapper():
    module = nn.Linear(2, 2)
    wrapper = Wrapper(torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cpu"))
    options = gradcast.Options(clip=gradcast.Clip(norm=1.0))
    assert not_refused(lambda: gradcast.attach(module, wrapper, options=options), "GradScaler") == []


@pytest.mark.parametrize("from_step", [0, 5])
@on_ranks(2)
def test_a_step_that_goes_past_gradcast_is_right_and_said_once(rank, from_step):
    """Somebody calls the step() that the optimizer had before attach. It is taken at once, and rank 0 says so."""
    with heard(logging.WARNING) as said:
        pair = Pair(rank)
        pair.train(from_step)
        original = type(pair.ours.optimizer).step
        pair.ours.optimizer.step = lambda: original(pair.ours.optimizer)
        pair.train(6)
    assert sum("bypasses gradcast" in line for line in said) == (rank.index == 0)
    return pair.differences()
