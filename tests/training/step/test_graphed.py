"""What is read without a call that could be seen, as a CUDA graph reads; loops whose default device is another one."""

import pytest

import gradcast
from training import compare
from training.needs import torch
from training.step.test_unseen_reads import ReadsMemory

nn = torch.nn


def graphed(module):
    """As torch.cuda.make_graphed_callables leaves a module."""
    memory = torch.from_numpy(module.weight.detach().numpy())

    def new_fwd(value):
        return ReadsMemory.apply(value, module.weight, memory)

    new_fwd.__module__ = torch.cuda.make_graphed_callables.__module__
    module.forward = new_fwd
    return module


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(16, 16, bias=False), nn.Tanh())])


def train_graphed(rank, mode):
    theirs = nn.parallel.DistributedDataParallel(layers())
    ours = layers()
    for number in (0, 4):
        graphed(ours[number])
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (theirs, ours)]
    options = gradcast.Options(adapt=False, warmup_steps=3, policy="p3", policy_parameters={"slice_elements": 150})
    handle = gradcast.attach(ours, sgds[1] if mode == "overlap" else None, options=options)
    for number in range(12):
        torch.manual_seed(10 * number + rank.index)
        batch = torch.randn(8, 16)
        for module, sgd in zip((theirs, ours), sgds, strict=True):
            sgd.zero_grad()
            module(batch).square().sum().backward()
            sgd.step()
    unseen = handle.state_dict()["unseen_reads"]
    handle.detach()
    return compare.modules(ours, theirs.module), unseen


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_graphed_modules_read_what_has_been_updated(ranks, mode):
    """Each module's read is known: nothing has to be waited for before forward begins."""
    assert ranks.run(2, train_graphed, mode) == [([], [])] * 2


def train_with_default_device(rank):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sgd = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    batch = torch.ones(4, 8)
    before = [each.detach().clone() for each in module.parameters()]
    with torch.device("meta"):
        handle = gradcast.attach(module, sgd, options=gradcast.Options(warmup_steps=3))
        for _ in range(6):
            sgd.zero_grad()
            module(batch).square().sum().backward()
            sgd.step()
        handle.flush()
        handle.detach()
    return [bool((one != other).any()) for one, other in zip(module.parameters(), before, strict=True)]


def test_the_loops_default_device_is_not_gradcasts(ranks):
    assert ranks.run(2, train_with_default_device) == [[True] * 4] * 2
