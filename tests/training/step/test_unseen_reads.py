"""Parameters that forward reads without a call that could be seen: as C++ extensions do, for which forward waits, and
as CUDA graphs do, which are known."""

import time

from training import compare
from training.attached import attach, heard
from training.models import ReadsMemory, at_address
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn


class Extension(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.memory = at_address(self.weight)

    def forward(self, value):
        return ReadsMemory.apply(value, self.weight, self.memory)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Extension(), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), Extension())
        self.of_the_loss = nn.Parameter(torch.ones(16))

    def forward(self, value):
        return self.layers(value)


UNSEEN = ["layers.0.weight", "layers.4.weight"]


def steps(rank, numbers, model, bare, sgd):
    for number in numbers:
        torch.manual_seed(10 * number + rank.index)
        sgd.zero_grad()
        # What belongs to the loss is read after forward, and that is seen.
        loss = (model(torch.randn(8, 16)).square() * bare.of_the_loss).sum()
        if rank.index == 1:
            time.sleep(0.01)  # the other rank is in its next forward pass before these gradients exist
        loss.backward()
        sgd.step()


def made():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def attached(model, sgd, mode):
    return attach(model, sgd, mode, policy="p3", policy_parameters={"slice_elements": 150})


@on_ranks(2)
def test_forward_waits_for_what_it_reads_unseen(rank, mode):
    (bare, their_sgd), (first, first_sgd), (second, second_sgd) = made(), made(), made()
    steps(rank, range(16), nn.parallel.DistributedDataParallel(bare), bare, their_sgd)
    with heard() as lines:
        handle = attached(first, first_sgd, mode)
        steps(rank, range(10), first, first, first_sgd)
        handle.flush()
        needs_ns = {tensor.name: tensor.need_ns for tensor in handle.profile.tensors}
        state = handle.state_dict()
        handle.detach()
        # Another program goes on, without a warm-up.
        second.load_state_dict(first.state_dict())
        second_sgd.load_state_dict(first_sgd.state_dict())
        handle = attached(second, second_sgd, mode)
        handle.load_state_dict(state)
        steps(rank, range(10, 16), second, second, second_sgd)
        handle.detach()
    assert state["unseen_reads"] == UNSEEN
    assert all(needs_ns[name] == 0 for name in UNSEEN)
    assert needs_ns["layers.2.weight"] > 0
    said = [line for line in lines if "does not see" in line]
    assert len(said) == (2 if mode == "overlap" and rank.index == 0 else 0), "by each handle"
    assert all(line.startswith("forward reads layers.0.weight, layers.4.weight in a way") for line in said)
    return compare.modules(second, bare)


def graphed(module):
    """As torch.cuda.make_graphed_callables leaves a module."""
    memory = torch.from_numpy(module.weight.detach().numpy())

    def new_fwd(value):
        return ReadsMemory.apply(value, module.weight, memory)

    new_fwd.__module__ = torch.cuda.make_graphed_callables.__module__
    module.forward = new_fwd
    return module


def layers():
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(16, 16, bias=False), nn.Tanh())])


@on_ranks(2)
def test_graphed_modules_read_what_has_been_updated(rank, mode):
    """Each module's read is known: nothing has to be waited for before forward begins."""
    torch.manual_seed(0)
    theirs, ours = nn.parallel.DistributedDataParallel(layers()), layers()
    ours.load_state_dict(theirs.module.state_dict())
    for number in (0, 4):
        graphed(ours[number])
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (theirs, ours)]
    handle = attach(ours, sgds[1], mode, policy="p3", policy_parameters={"slice_elements": 150})
    for number in range(12):
        torch.manual_seed(10 * number + rank.index)
        batch = torch.randn(8, 16)
        for module, sgd in zip((theirs, ours), sgds, strict=True):
            sgd.zero_grad()
            module(batch).square().sum().backward()
            sgd.step()
    assert handle.state_dict()["unseen_reads"] == []
    handle.detach()
    return compare.modules(ours, theirs.module)
