"""Copies and pickles of an attached module are ordinary modules: they train alone and know nothing of gradcast."""

import copy
import io
import pickle
import subprocess
import sys

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch
from training.pool import environment
from training.twins import Twins


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
    found = []
    for name, part in module.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += [(name, kind, hook) for hook in getattr(part, kind).values()]
        found += [(name, "state_dict", hook) for hook in part._state_dict_hooks.values()]
        found += [(name, "state_dict_pre", hook) for hook in part._state_dict_pre_hooks.values()]
    for name, parameter in module.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found += [(name, kind, hook) for hook in (getattr(parameter, kind, None) or {}).values()]
    return found


def copy_and_train(rank, way, mode, when):
    twins = Twins(rank, "transformer", "adam plain", mode=mode)
    twins.train(4)
    if when == "pending":
        twins.pending_step()
    twin_copies = [WAYS[way](module) for module, _, _ in twins.each()]
    theirs, ours = twin_copies
    found = compare.modules(ours, theirs)
    found += [f"{n} is a {type(p)}" for n, p in ours.named_parameters() if type(p) is not torch.nn.Parameter]
    found += [
        f"{n}.grad is a {type(p.grad)}"
        for n, p in ours.named_parameters()
        if type(p.grad) not in (torch.Tensor, type(None))
    ]
    found += [f"{kind} of {name}: {hook}" for name, kind, hook in hooks_of(ours) if "gradcast" in repr(hook)]
    if ours.head.weight is not ours.embedding.weight:
        found.append("the copy's tied weights are two tensors")
    untouched = twins.handle.stats()["step"]
    train_alone(twins.task, twin_copies, rank.index)
    found += compare.modules(ours, theirs)
    if twins.handle.stats()["step"] != untouched:
        found.append("training the copy moved the original")
    twins.train(2)
    return found + twins.end()


def train_alone(task, modules, rank):
    """A few steps without any communication, different on the two ranks."""
    for module in modules:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(3 + rank):
            optimizer.zero_grad()
            task.loss(module, task.batch(rank, 100 + step)).backward()
            optimizer.step()


@pytest.mark.parametrize(("mode", "when"), [("overlap", "finished"), ("overlap", "pending"), ("hook", "finished")])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_trains_alone_and_leaves_the_original_alone(ranks, way, mode, when):
    """In hook mode a copy's gradients would wait for ranks that do not come."""
    for found in ranks.run(2, copy_and_train, way, mode, when):
        assert found == []


def pickle_pending(rank):
    twins = Twins(rank, "plain")
    twins.train(4)
    twins.pending_step()
    text = pickle.dumps(twins.ours.bare)
    expected = compare.digest(twins.theirs.module)
    twins.handle.detach()
    return text, expected


# What loads has no gradcast: importing it fails.
LOADER = """
import sys
sys.modules["gradcast"] = None
import pickle
from training import compare
print(compare.digest(pickle.load(sys.stdin.buffer)))
"""


def test_a_pickle_loads_where_gradcast_is_not_installed(ranks):
    for text, expected in ranks.run(2, pickle_pending):
        loaded = subprocess.run(
            [sys.executable, "-c", LOADER], input=text, capture_output=True, timeout=60, check=False, env=environment()
        )
        assert loaded.stdout.decode().strip() == expected, loaded.stderr.decode()


def copies_in_turn(rank):
    """A copy of a copy, and a copy that is attached itself while the original is."""
    twins = Twins(rank, "plain", "sgd plain")
    twins.train(3)
    second = copy.deepcopy(copy.deepcopy(twins.ours.bare))
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    handle = gradcast.attach(second, optimizer, options=gradcast.Options(adapt=False, warmup_steps=3))
    theirs = copy.deepcopy(twins.theirs.module)
    ddp = torch.nn.parallel.DistributedDataParallel(theirs)
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    task = TASKS["plain"]
    for step in range(5):
        for forward, optimizer_ in ((ddp, their_optimizer), (second, optimizer)):
            optimizer_.zero_grad()
            task.loss(forward, task.batch(rank.index, 50 + step)).backward()
            optimizer_.step()
        twins.step()
    handle.flush()
    found = compare.modules(second, theirs) + twins.differences()
    handle.detach()
    twins.handle.detach()
    return found


def test_a_copy_can_be_attached_beside_the_original(ranks):
    for found in ranks.run(2, copies_in_turn):
        assert found == []


class UsesOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def copy_ddp(rank, way, option):
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
    return found, type(copied.join_hook(divide_by_initial_world_size=True)) is type(ddp.join_hook())


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_ddp_module_is_stock_ddp_with_its_options(ranks, way, option):
    for found, has_own_join in ranks.run(2, copy_ddp, way, option):
        assert found == []
        assert has_own_join
