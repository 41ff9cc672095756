"""Which optimizers may update in parts is tried on a copy: per-parameter ones pass, those that look at all do not."""

import pytest

import gradcast
from gradcast.training.step.partial_step_check import require_splittable
from training.needs import torch
from training.optimizers import KINDS, CountsInGroup, WithHelper

nn = torch.nn
optim = torch.optim


class Normalized(optim.Optimizer):
    """A step along the gradient, of a length that is the same for all parameters together."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            p.sub_(0.1 * p.grad / length)


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        return super().step()


class ClipsHigh(optim.SGD):
    """A norm over all gradients that only large ones reach."""

    @torch.no_grad()
    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"] if p.grad is not None], 100.0)
        return super().step()


class CountsUpdates(optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += sum(p.grad is not None for group in self.param_groups for p in group["params"])
        return super().step()


def module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4))


UNSPLITTABLE = {
    "LBFGS": optim.LBFGS,
    "SparseAdam": optim.SparseAdam,
    "a norm over all": Normalized,
    "noise": Noisy,
    "a norm over all that only large gradients reach": lambda p: ClipsHigh(p, lr=0.1),
    "a count over all": CountsUpdates,
    "an object that refers to it": WithHelper,
}


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_that_update_per_parameter_pass_in_the_middle_of_training(name):
    """That they pass at the beginning, too, test_optimizer_kinds.py shows."""
    parameters = list(module().parameters())
    optimizer = KINDS[name](parameters)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
    require_splittable(optimizer)


@pytest.mark.parametrize("name", UNSPLITTABLE)
def test_others_are_refused_with_the_reason(name):
    optimizer = UNSPLITTABLE[name](list(module().parameters()))
    with pytest.raises(
        gradcast.Error, match=f"the updates of {type(optimizer).__name__} cannot run in parts"
    ) as caught:
        require_splittable(optimizer)
    assert caught.value.code == "invalid_use"
    assert "hook mode" in str(caught.value)


def test_the_check_gives_the_optimizer_no_new_settings():
    """As Optimizer.__setstate__() does, which copy.copy() calls."""
    parameters = list(module().parameters())
    optimizer = CountsInGroup(parameters[:2])
    defaults = dict(optimizer.defaults)
    require_splittable(optimizer)
    optimizer.add_param_group({"params": parameters[2:]})
    assert optimizer.defaults == defaults
    assert [sorted(group) for group in optimizer.param_groups] == [["count", "decay", "lr", "params"]] * 2


def test_the_check_leaves_everything_as_it_was():
    parameters = list(module().parameters())
    optimizer = optim.Adam(parameters)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user ran"))
    before = [p.clone() for p in parameters]
    torch.manual_seed(3)
    random = torch.get_rng_state()
    require_splittable(optimizer)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in parameters)
    assert scheduler.last_epoch == 0
