"""Copies and pickles of an attached module are ordinary modules: they train alone and know nothing of gradcast."""

import copy
import io
import pickle
import subprocess
import sys

import pytest

import gradcast
from training import compare
from training.attached import attach
from training.models import TASKS
from training.needs import torch
from training.pair import Pair
from training.pool import environment, on_ranks


def through_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch_save": through_file,
}


def hooks_of(module):
    """Every hook of torch's own kinds that sits on the module or on its parameters."""
    kinds = [f"_{kind}_hooks" for kind in ("forward_pre", "forward", "backward", "backward_pre", "state_dict")]
    found = []
    for name, each in [*module.named_modules(), *module.named_parameters()]:
        for kind in (*kinds, "_state_dict_pre_hooks", "_post_accumulate_grad_hooks"):
            found += [(name, kind, hook) for hook in (getattr(each, kind, None) or {}).values()]
    return found


def not_ordinary(module):
    """What is left of gradcast in the module."""
    types = [(name, p, torch.nn.Parameter) for name, p in module.named_parameters()]
    types += [(f"{name}.grad", p.grad, torch.Tensor) for name, p in module.named_parameters() if p.grad is not None]
    found = [f"{name} is a {type(value)}" for name, value, ordinary in types if type(value) is not ordinary]
    return found + [f"{kind} of {name}: {hook}" for name, kind, hook in hooks_of(module) if "gradcast" in repr(hook)]


@pytest.mark.parametrize(
    ("way", "mode", "when"),
    [
        *((way, "overlap", "pending") for way in WAYS),
        ("pickle", "overlap", "finished"),
        ("deepcopy", "hook", "finished"),
    ],
)
@on_ranks(2)
def test_a_copy_trains_alone_and_leaves_the_original_alone(rank, way, mode, when):
    """In hook mode a copy's gradients would wait for ranks that do not come."""
    pair = Pair(rank, "transformer", "adam plain", mode=mode)
    pair.train(4)
    if when == "pending":
        pair.pending_step()
    theirs, ours = map(WAYS[way], pair.modules)
    found = compare.modules(ours, theirs) + not_ordinary(ours)
    if ours.head.weight is not ours.embedding.weight:
        found.append("the copy's tied weights are two tensors")
    untouched = pair.handle.stats()["step"]
    for module in (theirs, ours):  # differently on the two ranks, without any communication
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(3 + rank.index):
            optimizer.zero_grad()
            TASKS["transformer"].loss(module, pair.ours.batch(100 + step)).backward()
            optimizer.step()
    found += compare.modules(ours, theirs)
    if pair.handle.stats()["step"] != untouched:
        found.append("training the copy moved the original")
    pair.train(2)
    return found + pair.end()


# What loads has no gradcast: importing it fails.
LOADER = """
import sys
sys.modules["gradcast"] = None
import pickle
from training import compare
print(compare.digest(pickle.load(sys.stdin.buffer)))
"""


@on_ranks(2)
def test_a_pickle_loads_where_gradcast_is_not_installed(rank):
    pair = Pair(rank)
    pair.train(4)
    pair.pending_step()
    command, text = [sys.executable, "-c", LOADER], pickle.dumps(pair.ours.module)
    if rank.index:  # one process that imports torch is enough
        return
    loaded = subprocess.run(command, input=text, capture_output=True, timeout=60, check=False, env=environment())
    assert loaded.stdout.decode().strip() == compare.digest(pair.theirs.module), loaded.stderr.decode()


@on_ranks(2)
def test_a_copy_can_be_attached_beside_the_original(rank):
    """A copy of a copy, that is attached itself while the original is."""
    pair = Pair(rank, "plain", "sgd plain")
    pair.train(3)
    second = copy.deepcopy(copy.deepcopy(pair.ours.module))
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    handle = attach(second, optimizer)
    theirs = copy.deepcopy(pair.theirs.module)
    ddp = torch.nn.parallel.DistributedDataParallel(theirs)
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    task = TASKS["plain"]
    for step in range(5):
        for forward, optimizer_ in ((ddp, their_optimizer), (second, optimizer)):
            optimizer_.zero_grad()
            task.loss(forward, task.batch(rank.index, 50 + step)).backward()
            optimizer_.step()
        pair.step()
    handle.flush()
    found = compare.modules(second, theirs) + pair.end()
    handle.detach()
    return found


class UsesOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_copied_ddp_module_is_stock_ddp_with_its_options(rank, way, option):
    """The wrapper itself, which stock DDP lets one save. Three passes: the graph may be searched, or learned in the
    first pass."""
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(UsesOne(), **{option: True})
    handle = gradcast.attach(ddp)
    copied = WAYS[way](ddp)
    found = []
    for _ in range(3):
        for each in (ddp, copied):
            each.zero_grad()
            each(torch.full((2, 4), 1.0 + rank.index)).sum().backward()
        found += compare.trees(copied.module.used.weight.grad, ddp.module.used.weight.grad)
    handle.detach()
    assert type(copied.join_hook(divide_by_initial_world_size=True)) is type(ddp.join_hook())
    return found
