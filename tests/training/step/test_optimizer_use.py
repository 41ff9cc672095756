"""Hands on the optimizer: a step uses the values that stood when it was called."""

import collections
import gc
import threading
import warnings
import weakref

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from training import compare
from training.attached import planning
from training.needs import torch
from training.optimizers import CountsItself, Recipe
from training.pair import DDP, Pair, differences, net
from training.pool import on_ranks


def tensor_rate(module):
    return Recipe(torch.optim.Adam(module.parameters(), lr=torch.tensor(3e-3), foreach=False))


@pytest.mark.parametrize("optimizer", ["sgd foreach", "adamw fused", tensor_rate])
@on_ranks(2)
def test_hyper_parameters_changed_after_step_are_for_the_next_step(rank, optimizer):
    """Also a learning rate that is a tensor, which is changed in place."""
    pair = Pair(rank, "plain", optimizer)
    for number in range(8):
        pair.pending_step()
        for side in pair.sides:
            for group in side.optimizer.param_groups:
                group["lr"] *= 0.5 if number % 2 else 1.5
                group["weight_decay"] = 0.1 * number
    return pair.differences()


@on_ranks(2)
def test_attributes_changed_after_step_are_for_the_next_step(rank):
    """And what the optimizer counts itself advances once per step."""
    pair = Pair(rank, "plain", lambda module: Recipe(CountsItself(module.parameters())))
    for number in range(8):
        pair.pending_step()
        for side in pair.sides:
            side.optimizer.decay = 0.1 * number
    found = pair.differences()
    ours, theirs = (side.optimizer.calls for side in pair.sides)
    return found + ([] if ours == theirs == 8 else [f"calls: {ours} and {theirs}"])


@on_ranks(2)
def test_a_state_put_in_place_after_step_is_for_the_next_step(rank):
    """As programs do that restart an optimizer."""
    pair = Pair(rank, "plain", "adam plain")
    for number in range(8):
        pair.pending_step()
        for side in pair.sides if number == 6 else ():
            side.optimizer.state = collections.defaultdict(dict)
    return pair.differences()


@on_ranks(2)
def test_a_replaced_state_is_freed(rank):
    pair = Pair(rank, "plain", "adam plain", policy="fifo")
    pair.train(5)
    pair.pending_step()
    optimizer = pair.ours.optimizer
    replaced = weakref.ref(optimizer.state)
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    return [] if replaced() is None else ["the state is kept"]


class Halfway(torch.optim.SGD):
    """Stops between two halves of an update that another thread than the main one runs, until that one has looked."""

    half_done, looked = threading.Event(), threading.Event()

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        kept = [each.clone() for each in parameters]
        for each in parameters:
            each.zero_()
        if threading.current_thread() is not threading.main_thread():
            self.half_done.set()
            self.looked.wait(0.3)  # in vain, if that waits for this
        for each, value in zip(parameters, kept, strict=True):
            each.copy_(value)
        return super().step(closure)


LOOKS = {
    "values": lambda module, optimizer: float(module[0].weight.abs().sum()),
    "module": lambda module, optimizer: module[0](torch.ones(1, 12)).tolist(),
    "state": lambda module, optimizer: float(optimizer.state[module[0].weight]["momentum_buffer"].sum()),
    "zero_grad": lambda module, optimizer: optimizer.zero_grad(),
    "zero_grad in place": lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("look", LOOKS)
@on_ranks(2)
def test_what_another_thread_updates_is_not_seen_before_it_is_complete(rank, look):
    """A thread that evaluates or saves the model reads a parameter first, and so runs its update."""
    Halfway.half_done.clear()
    Halfway.looked.clear()
    pair = Pair(rank, "plain", lambda module: Recipe(Halfway(module.parameters())), policy="fifo")
    pair.train(5)
    pair.pending_step()
    thread = threading.Thread(target=lambda: float(pair.modules[1][0].weight.sum()))
    thread.start()
    assert Halfway.half_done.wait(10)
    ours, theirs = (LOOKS[look](side.module, side.optimizer) for side in reversed(pair.sides))
    Halfway.looked.set()
    thread.join()
    return compare.trees(ours, theirs) + pair.differences()


@on_ranks(2)
def test_schedulers_do_not_warn(rank):
    """torch warns when scheduler.step() seems to come before optimizer.step(); with gradcast it must see the latter."""
    pair = Pair(rank, "plain", "adamw plain")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.train(4)
    return [str(warning.message) for warning in caught if "scheduler" in str(warning.message)]


class CallsItsBase(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def hooks_of_the_base_class(side):
    """torch calls them in the base class's step, too, once that has been used."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    module = net()
    optimizer = CallsItsBase(module.parameters(), lr=0.01, momentum=0.9)
    seen = {"pre": [], "post": [], "of all optimizers": []}

    def hook(name):
        return lambda *_: seen[name].append([p.detach().clone() for p in module.parameters()])

    optimizer.register_step_pre_hook(hook("pre"))
    optimizer.register_step_post_hook(hook("post"))
    of_all = register_optimizer_step_pre_hook(hook("of all optimizers"))
    try:
        called = side.called(module, optimizer, plan=planning("p3", slice_elements=50))
        return side.trained(called, module, optimizer), seen
    finally:
        of_all.remove()


@on_ranks(2)
def test_hooks_that_a_base_class_runs_see_a_whole_step(rank):
    return differences(rank, hooks_of_the_base_class, "overlap")


def train_beside_integers(side):
    """As a quantized layer's zero points: a parameter that is not trained and cannot be."""
    module = net()
    module[-1].register_parameter("points", torch.nn.Parameter(torch.tensor([2, 3]), requires_grad=False))
    ddp = DDP(module)
    optimizer = torch.optim.SGD(
        [module[-1].points, *(p for p in module.parameters() if p.requires_grad)], lr=0.1, momentum=0.9
    )
    side.attach(ddp, optimizer)
    return side.trained(ddp, module, optimizer)


@on_ranks(2)
def test_a_frozen_parameter_of_integers(rank):
    return differences(rank, train_beside_integers, "overlap")
