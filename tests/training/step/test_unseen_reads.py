"""Parameters that forward reads without a call that could be seen: as C++ extensions do, for which the module that owns
them waits, and as CUDA graphs do, which are known."""

import contextlib
import types

import pytest
from torch.utils.checkpoint import checkpoint

from gradcast.training.measure.unseen_reads import UnseenRead, agreed_reads
from gradcast.training.step import pending
from gradcast.training.step.unseen_waits import UnseenWaits
from training import compare
from training.attached import attach, heard, planning
from training.inside import session_of
from training.models import ReadsMemory, at_address
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn


class Extension(nn.Module):
    """Its weight is an argument of an ``autograd.Function``, which reads the memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.memory = at_address(self.weight)

    def forward(self, value):
        return ReadsMemory.apply(value, self.weight, self.memory)


@torch.jit.script
def in_cpp(value, weight, bias):
    return torch.nn.functional.linear(value, weight, bias)


class InCpp(nn.Module):
    """Only C++ reads its parameters, and records several nodes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.biases = nn.ParameterList([torch.randn(16)])

    def forward(self, value):
        return in_cpp(value, self.weight, self.biases[0]).tanh()


class Look(nn.Module):
    """Calls ``look`` inside forward."""

    def __init__(self):
        super().__init__()
        self.look = lambda: None

    def forward(self, value):
        self.look()
        return value


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Look(), Extension(), nn.Tanh(), nn.Linear(16, 16), Look(), InCpp(), Extension())
        self.of_the_loss = nn.Parameter(torch.ones(16))

    def forward(self, value):
        return self.layers(value)


MODULES = {f"layers.{name}": f"layers.{name[0]}" for name in ("1.weight", "5.weight", "5.biases.0", "6.weight")}


class Hidden(nn.Module):
    """Autograd's graph ends in front of this module."""

    def __init__(self):
        super().__init__()
        self.extension = Extension()

    def forward(self, value):
        return checkpoint(self.extension, value, use_reentrant=True)


class Irregular(nn.Module):
    """Unseen reads that the module owning the weight cannot wait for, and a module called twice, which can."""

    def __init__(self, hidden):
        super().__init__()
        self.own, self.memory = nn.Parameter(torch.randn(16, 16) / 4), None
        self.twice, self.tied, self.other, self.lent = (Extension() for _ in range(4))
        self.other.weight, self.other.memory = self.tied.weight, self.tied.memory
        self.hidden = Hidden() if hidden else nn.Linear(16, 16)
        self.script = torch.jit.script(nn.Linear(16, 16, bias=False))
        self.of_the_loss = nn.Parameter(torch.ones(16))

    def forward(self, value):
        if self.memory is None:
            self.memory = at_address(self.own)
        value = ReadsMemory.apply(self.hidden(self.script(self.twice(value))).tanh(), self.own, self.memory)
        value = self.tied(value) + self.twice(value).tanh()
        return ReadsMemory.apply(self.other(value), self.lent.weight, self.lent.memory)


def steps(rank, numbers, model, bare, sgd, before_backward=lambda: None):
    for number in numbers:
        torch.manual_seed(10 * number + rank.index)
        sgd.zero_grad()
        # What belongs to the loss is read after forward, and that is seen.
        loss = (model(torch.randn(8, 16)).square() * bare.of_the_loss).sum()
        before_backward()
        loss.backward()
        sgd.step()


def made(kind, *arguments):
    torch.manual_seed(0)
    model = kind(*arguments)
    return model, torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def attached(model, sgd, mode, **options):
    return attach(model, sgd, mode, **{"plan": planning("p3", slice_elements=150)} | options)


def step_held_back(rank, number, model, sgd):
    """A step whose gradients exist on rank 1 once rank 0 is in its next forward pass. Returns what is wrong there."""
    if rank.index == 1:
        steps(rank, [number], model, model, sgd, lambda: rank.wait_for("in forward"))
        return []
    steps(rank, [number], model, model, sgd)
    found = []

    def look():
        found.extend(name for name in MODULES if not pending.is_pending(model.get_parameter(name)))
        rank.signal("in forward")
        model.layers[0].look = lambda: None

    model.layers[0].look = look
    return found


@on_ranks(2)
def test_each_module_waits_for_what_it_reads_unseen(rank, mode):
    (bare, their_sgd), (first, first_sgd), (second, second_sgd) = made(Model), made(Model), made(Model)
    steps(rank, range(16), nn.parallel.DistributedDataParallel(bare), bare, their_sgd)
    with heard() as lines:
        handle = attached(first, first_sgd, mode)
        steps(rank, range(8), first, first, first_sgd)
        handle.flush()
        needs_ns = {tensor.name: tensor.need_ns for tensor in handle.profile.tensors}
        state = handle.state_dict()
        found = []
        if mode == "overlap":
            found = step_held_back(rank, 8, first, first_sgd)
        steps(rank, range(8 if mode == "hook" else 9, 10), first, first, first_sgd)
        hooks = [len(each._forward_pre_hooks) for each in first.layers]
        handle.detach()
        # Another program goes on, without a warm-up.
        second.load_state_dict(first.state_dict())
        second_sgd.load_state_dict(first_sgd.state_dict())
        handle = attached(second, second_sgd, mode)
        handle.load_state_dict(state)
        steps(rank, range(10, 16), second, second, second_sgd)
        handle.detach()
    assert found == [], "updated before forward had begun"
    assert state["unseen_modules"] == MODULES
    assert sorted(state["unseen_reads"]) == sorted(MODULES)
    order = ["layers.1.weight", "layers.3.weight", "layers.5.weight", "layers.6.weight"]
    assert sorted(order, key=needs_ns.get) == order
    assert 0 < needs_ns["layers.5.weight"] == needs_ns["layers.5.biases.0"]
    assert hooks == ([0, 1, 0, 0, 0, 1, 1] if mode == "overlap" else [0] * 7)
    assert all(not each._forward_pre_hooks and not each._forward_hooks for each in first.modules())
    assert not any("does not see" in line for line in lines)
    return compare.modules(second, bare)


WHY = {
    "own": "but the module itself",
    "tied.weight": "several modules own them",
    "script.weight": "a script owns them",
    "lent.weight": "outside of the forward of the module that owns them",
}


@pytest.mark.parametrize("case", ["irregular", "hidden", "option", "old file"])
@on_ranks(2)
def test_forward_waits_where_no_module_can(rank, case):
    hidden = case == "hidden"
    (bare, their_sgd), (ours, our_sgd) = made(Irregular, hidden), made(Irregular, hidden)
    theirs = nn.parallel.DistributedDataParallel(bare)
    options = {"unseen_reads": "before_forward"} if case == "option" else {}
    with heard() as lines:
        handle = attached(ours, our_sgd, "overlap", **options)
        for number in range(10):
            steps(rank, [number], theirs, bare, their_sgd)
            steps(rank, [number], ours, ours, our_sgd)
            if case == "old file" and number == 6:
                state = handle.state_dict()
                del state["unseen_modules"]
                handle.load_state_dict(state)
        state = handle.state_dict()
        handle.flush()
        needs_ns = {tensor.name: tensor.need_ns for tensor in handle.profile.tensors}
        names, reads = [name for name, _ in ours.named_parameters()], session_of(handle).controller.unseen_reads
        found = {names[index]: read.why for index, read in reads.items()}
        handle.detach()
    first = [*WHY, *(["hidden.extension.weight"] if hidden else [])]
    assert state["unseen_modules"] == ({"twice.weight": "twice"} if case == "irregular" else {})
    assert sorted(state["unseen_reads"]) == sorted([*first, "twice.weight"])
    assert all(needs_ns[name] == 0 for name in first)
    why = {
        "irregular": WHY,
        "hidden": dict.fromkeys(["twice.weight", "hidden.extension.weight"], "reentrant checkpointing hides"),
        "option": {"own": "options.unseen_reads says so"},
        "old file": {"twice.weight": "the checkpoint names no module"},
    }[case]
    assert all(reason in found[name] for name, reason in why.items()), found
    # The log says so if an update was due, which a slow machine may have prevented.
    said = [line for line in lines if "does not see" in line]
    for name, reason in why.items() if rank.index == 0 and said else ():
        assert sum(name in line and reason in line for line in said) == 1, said
    return compare.modules(ours, bare)


def pair():
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(16, 16), Extension(), nn.Tanh()), Extension()]
    return modules, torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.002)


@on_ranks(2)
def test_modules_of_a_list_wait_where_they_begin(rank):
    (bare, their_sgd), (ours, our_sgd) = pair(), pair()
    theirs = [nn.parallel.DistributedDataParallel(each) for each in bare]
    handle = attached(ours, our_sgd, "overlap")
    for number in range(10):
        for modules, sgd in ((theirs, their_sgd), (ours, our_sgd)):
            torch.manual_seed(10 * number + rank.index)
            sgd.zero_grad()
            modules[1](modules[0](torch.randn(8, 16))).square().sum().backward()
            sgd.step()
    assert handle.state_dict()["unseen_modules"] == {"0.1.weight": "0.1", "1.weight": "1"}
    handle.detach()
    assert not any(part._forward_pre_hooks for each in ours for part in each.modules())
    return [each for pair in zip(ours, bare, strict=True) for each in compare.modules(*pair)]


def test_what_ranks_found_differently_is_waited_for_before_forward():
    first, second, before = UnseenRead("first"), UnseenRead("second"), UnseenRead("", "why")
    differing = UnseenRead("", "not always the same module uses them")
    ranks = [{0: first, 1: first, 2: before, 3: first}, {3: second, 2: first, 1: before}, {0: first, 3: first}]
    assert agreed_reads(ranks) == {0: first, 1: before, 2: before, 3: differing}


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
    handle = attach(ours, sgds[1], mode, plan=planning("p3", slice_elements=150))
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


def test_what_is_due_is_asked_under_the_lock():
    """Another thread may still be writing an update that is due no more."""
    held = []

    @contextlib.contextmanager
    def lock():
        held.append(True)
        yield
        held.pop()

    class State:
        @property
        def is_update_due(self):
            assert held
            return False

    steps = types.SimpleNamespace(gradients=types.SimpleNamespace(states=[]))
    UnseenWaits(nn.Linear(1, 1), steps, lock, pytest.fail).complete([State()])
