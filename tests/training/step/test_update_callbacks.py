"""Functions that get each parameter once per step when its update has run, and averages that are kept that way.

The averages are compared with those of a plain loop, which updates them after each step, bit for bit.
"""

import contextlib
import copy
import functools
import itertools

import pytest

from training import compare, optimizers
from training.attached import attach, not_refused, planning
from training.needs import torch
from training.pair import Pair, Training
from training.pool import on_ranks
from training.test_disabled import disabling

nn = torch.nn
AveragedModel = torch.optim.swa_utils.AveragedModel


def scaled_sum(average, value, _):
    """Not exact for equal values, so frozen parameters show whether they are averaged, too."""
    return 0.7 * average + 0.3 * value


AVERAGES = {
    "ema": {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.7)},
    "swa": {},
    "one_by_one": {"avg_fn": scaled_sum},
    "with_buffers": {"avg_fn": scaled_sum, "use_buffers": True},
}
# Blocks of few elements arrive one by one.
SMALL_BLOCKS = {"plan": planning("p3", slice_elements=150)}


class WithFrozen(nn.Sequential):
    """A frozen layer, and buffers that follow the data."""

    def __init__(self):
        super().__init__(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)
        )
        self[0].requires_grad_(False)


def averages(pair, kind):
    """An average of DDP's module, which the caller updates, one of gradcast's, and the latter's registration."""
    theirs, ours = (AveragedModel(module, **AVERAGES[kind]) for module in pair.modules)
    return theirs, ours, pair.handle.keep_average(ours)


def train_averaged(pair, theirs, steps):
    for _ in range(steps):
        pair.step()
        theirs.update_parameters(pair.modules[0])


@pytest.mark.parametrize("kind", AVERAGES)
@on_ranks(2)
def test_an_average_has_the_bits_of_the_plain_loop(rank, kind):
    """It is read in the warm-up, and while a step is pending, whose buffers forward will change."""
    pair = Pair(rank, WithFrozen, **SMALL_BLOCKS)
    theirs, ours, _ = averages(pair, kind)
    found = []
    for _ in range(3):
        train_averaged(pair, theirs, 2)
        found += compare.modules(ours, theirs)
    pair.pending_step()
    theirs.update_parameters(pair.modules[0])
    found += compare.modules(copy.deepcopy(ours), theirs)
    return found + pair.differences()


@on_ranks(2)
def test_parts_arrive_while_forward_runs(rank):
    """The calls of a step: several, together each parameter once, none of which waits for a later one."""
    pair = Pair(rank, optimizer="adamw plain", **SMALL_BLOCKS)
    calls = []
    own = {name: torch.zeros_like(p) for name, p in pair.ours.module.named_parameters()}

    def sums(names, parameters):
        calls.append(names)
        assert not torch.is_grad_enabled()
        torch._foreach_add_([own[name] for name in names], parameters)

    pair.handle.on_update(sums, owned=own)
    expected = {name: torch.zeros_like(each) for name, each in own.items()}

    def add_expected():
        for name, parameter in pair.modules[0].named_parameters():
            expected[name] += parameter.detach()

    found = []
    for _ in range(9):
        calls.clear()
        pair.pending_step()
        add_expected()
        first = len(calls)
        own["8.bias"].sum()  # the last one that forward needs
        own["0.weight"].sum()
        pair.handle.flush()
        found += [] if sorted(itertools.chain(*calls)) == sorted(own) else [f"called for {calls}"]
    found += [] if first == 0 else [f"{first} calls although nothing had arrived"]
    # Forward, not a flush, makes the updates run.
    in_parts = 0
    for _ in range(8):
        calls.clear()
        pair.step()
        add_expected()
        in_parts += len(calls) > 1
    found += [] if in_parts or rank.index else ["all parameters came at once in every step"]
    found += compare.trees(own, expected)
    return found + pair.differences()


def trained_averaged(rank, kind, steps=7):
    mode, wrap = "hook" if "hook" in kind else "overlap", kind == "hook of ddp"
    with disabling if kind.startswith("disabled") else contextlib.nullcontext():
        training = Training(rank.index, "convnet", "adam foreach", mode, wrap=wrap)
        module, handle = training.module, training.handle
        kept, plain = (AveragedModel(module, **AVERAGES["with_buffers"]) for _ in range(2))
        handle.keep_average(kept)
        counts = {name: 0 for name, _ in module.named_parameters()}
        counting = handle.on_update(lambda names, _: [counts.update({n: counts[n] + 1}) for n in names])
        for _ in range(steps):
            training.step()
            plain.update_parameters(module)
        found = compare.modules(kept, plain)
        found += [] if set(counts.values()) == {steps} else [f"calls: {counts}"]
        counting.remove()
        counting.remove()
        handle.detach()
    training.forward = module
    training.step()
    found += [] if set(counts.values()) == {steps} else [f"calls after remove(): {counts}"]
    return found + compare.modules(kept, plain)  # it does not change after detach()


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        *((2, kind) for kind in ("overlap", "hook", "hook of ddp", "disabled overlap", "disabled hook")),
        *((1, kind) for kind in ("overlap", "disabled overlap")),
    ],
)
def test_every_mode_calls_once_per_step(ranks, world_size, kind):
    assert ranks.run(world_size, trained_averaged, kind) == [[]] * world_size


@pytest.mark.parametrize("kind", ["overlap", "hook"])
@on_ranks(2)
def test_a_step_that_calls_its_base_class_counts_once(rank, kind):
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)  # torch hooks the step of a class that has an object
    optimizer = optimizers.OwnStep(module.parameters())
    handle = attach(module, optimizer, kind)
    seen = []
    handle.on_update(
        lambda names, parameters: seen.append({n: p.clone() for n, p in zip(names, parameters, strict=True)})
    )
    found = []
    for number in range(6):
        optimizer.zero_grad()
        module(torch.full((2, 4), rank.index + 1.0)).sum().backward()
        optimizer.step()
        handle.flush()
        shown = {name: value for part in seen for name, value in part.items()}
        found += compare.trees(shown, {n: p.detach() for n, p in module.named_parameters()}, f"step {number}")
        found += [] if sum(map(len, seen)) == 2 else [f"{seen}"]
        seen.clear()
    handle.detach()
    return found


@on_ranks(2)
def test_two_optimizers(rank):
    """Each has its own parts."""
    torch.manual_seed(0)
    module = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())])
    both = optimizers.two_halves(module, torch.optim.Adam)
    handle = attach(module, both, **SMALL_BLOCKS)
    kept, plain = (AveragedModel(module) for _ in range(2))
    handle.keep_average(kept)
    for number in range(9):
        torch.manual_seed(10 * number + rank.index)
        for optimizer in both:
            optimizer.zero_grad()
        module(torch.randn(4, 12)).square().sum().backward()
        for optimizer in both:
            optimizer.step()
        plain.update_parameters(module)
    found = compare.modules(kept, plain)
    handle.detach()
    return found


@on_ranks(2)
def test_a_function_that_reads_other_parameters_waits(rank):
    pair = Pair(rank, **SMALL_BLOCKS)
    module = pair.ours.module
    norms, average = [], AveragedModel(module)

    def norm(names, parameters):
        norms.append(float(sum(p.norm() for p in module.parameters())))

    pair.handle.on_update(norm)
    pair.handle.keep_average(average)
    found = []
    for _ in range(7):
        pair.pending_step()
        last = next(iter(average.module.parameters())).clone()
        assert torch.isfinite(last).all()
        expected = float(sum(p.norm() for p in pair.modules[0].parameters()))
        found += [] if norms[-1] == expected else [f"{norms[-1]} instead of {expected}"]
    return found + pair.differences()


@on_ranks(2)
def test_an_exception_names_parameters_and_step(rank):
    """Training goes on, other functions are called, and the failed one is called again for later steps."""
    pair = Pair(rank, **SMALL_BLOCKS)
    fails, calls, kept = [False], [], []

    def function(names, parameters):
        calls.extend(names)
        if fails[0]:
            raise KeyError("my own mistake")

    pair.handle.on_update(function)
    pair.handle.on_update(lambda names, _: kept.extend(names))
    fails[0] = True
    found = not_refused(functools.partial(failing_step, pair), "on_update()", "in step 1", "my own mistake")
    fails[0] = False
    pair.train(5)
    pair.handle.flush()
    fails[0] = True
    pair.pending_step()
    read = functools.partial(torch.sum, pair.ours.module[0].weight)
    found += not_refused(read, "on_update()", "0.weight", "in step 7", "KeyError", "can go on")
    fails[0] = False
    pair.train(2)
    pair.handle.flush()
    names = sorted(9 * [name for name, _ in pair.ours.module.named_parameters()])
    found += [] if sorted(calls) == sorted(kept) == names else [f"{len(calls)} and {len(kept)} calls of {len(names)}"]
    return found + pair.differences()


def failing_step(pair):
    """The first step, in which gradcast waits: its side raises behind a complete step."""
    error = None
    for _, side in pair.rounds(1):
        side.optimizer.zero_grad()
        side.loss().backward()
        try:
            side.optimizer.step()
        except Exception as raised:
            error = raised
    raise error


@on_ranks(2)
def test_functions_come_and_go_between_step_and_forward(rank):
    """Due updates run first: the new function begins with the next step, the removed one has ended this one."""
    pair = Pair(rank, **SMALL_BLOCKS)
    pair.train(5)
    first, second = [], []
    registration = pair.handle.on_update(lambda names, _: first.extend(names))
    pair.pending_step()
    pair.handle.on_update(lambda names, _: second.extend(names))
    found = [] if (len(first), len(second)) == (10, 0) else [f"{len(first)} and {len(second)} calls"]
    pair.pending_step()
    registration.remove()
    pair.step()
    pair.handle.flush()
    found += [] if (len(first), len(second)) == (20, 20) else [f"{len(first)} and {len(second)} calls, then"]
    return found + pair.differences()


@on_ranks(2)
def test_a_function_removes_itself(rank):
    """In hook mode inside torch's hooks after step(), of which another module has some, too."""
    models = [nn.Linear(4, 4) for _ in range(2)]
    handles = [attach(model, None, "hook") for model in models]
    each_sgd = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen = []

    def once(names, _):
        seen.append(names)
        registration.remove()

    registration = handles[0].on_update(once)
    handles[1].on_update(lambda names, _: seen.append(names))
    for _ in range(2):
        for model, optimizer in zip(models, each_sgd, strict=True):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    for handle in handles:
        handle.detach()
    return None if len(seen) == 3 else f"{len(seen)} calls"


@on_ranks(2)
def test_an_average_stays_when_the_parameters_change(rank, mode):
    pair = Pair(rank, mode=mode)
    for module in pair.modules:
        module[0].requires_grad_(False)
    pair.theirs.wrap()
    theirs, ours, _ = averages(pair, "one_by_one")
    train_averaged(pair, theirs, 5)
    for module in pair.modules:
        module[0].requires_grad_(True)
    pair.theirs.wrap()
    train_averaged(pair, theirs, 6)
    return compare.modules(ours, theirs) + pair.differences()


@on_ranks(2)
def test_the_count_comes_from_the_checkpoint(rank):
    pair = Pair(rank)
    theirs, ours, _ = averages(pair, "swa")
    train_averaged(pair, theirs, 5)
    saved = copy.deepcopy(ours.state_dict())
    saved["n_averaged"] += 40
    for each in (theirs, ours):
        each.load_state_dict(saved)
    train_averaged(pair, theirs, 3)
    return compare.modules(ours, theirs) + pair.differences()


@on_ranks(2)
def test_what_cannot_be_waited_for_is_refused(rank):
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    handle = attach(module, torch.optim.SGD(module.parameters(), lr=0.1))
    own = functools.partial(handle.on_update, print)
    found = not_refused(lambda: own(owned={"wieght": torch.ones(4, 4)}), "wieght", "named_parameters")
    found += not_refused(lambda: own(owned=module), "weight", "is a parameter of the module")
    shared = torch.ones(4)
    found += not_refused(lambda: own(owned={"bias": [shared, shared]}), "given twice")
    found += not_refused(lambda: handle.keep_average(AveragedModel(nn.Linear(4, 3))), "AveragedModel(module)")
    found += not_refused(lambda: handle.on_update(3), "on_update() got 3")
    handle.detach()
    return found + not_refused(own, "detached")
