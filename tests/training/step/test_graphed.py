"""What is read without a call that could be seen, as a CUDA graph reads; loops whose default device is another one."""

from training import compare
from training.attached import Attached, attach
from training.models import ReadsMemory
from training.needs import torch
from training.pool import on_ranks

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
    return nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(16, 16, bias=False), nn.Tanh())])


def train_graphed(rank, mode):
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
    unseen = handle.state_dict()["unseen_reads"]
    handle.detach()
    return compare.modules(ours, theirs.module), unseen


def test_graphed_modules_read_what_has_been_updated(ranks, mode):
    """Each module's read is known: nothing has to be waited for before forward begins."""
    assert ranks.run(2, train_graphed, mode) == [([], [])] * 2


@on_ranks(2)
def test_the_loops_default_device_is_not_gradcasts(rank):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    batch = torch.ones(4, 8)
    before = [each.detach().clone() for each in module.parameters()]
    with torch.device("meta"):
        attached = Attached(module)
        for _ in range(6):
            attached.step(batch)
        attached.handle.detach()
    return [name for (name, p), old in zip(module.named_parameters(), before, strict=True) if torch.equal(p, old)]
