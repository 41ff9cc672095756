"""Loops other than forward, backward, step: DDP's result, bit for bit on two ranks."""

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch
from training.pair import Pair
from training.twins import Twins

nn = torch.nn
functional = nn.functional
OPTIONS = {"adapt": False, "warmup_steps": 3, "policy": "fifo"}


def pair(rank, make, seed=0):
    """Two modules with the same values, rank 0's on all ranks."""
    modules = []
    for _ in range(2):
        torch.manual_seed(seed)
        modules.append(make())
    return modules


def attach(module, optimizer, mode):
    return gradcast.attach(module, optimizer if mode == "overlap" else None, options=gradcast.Options(**OPTIONS))


def average(module):
    """What a user would write who has no DDP."""
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)
        torch.distributed.all_reduce(parameter.grad)


def several_backwards(rank, mode, how):
    """Backward passes that add up before one step, each of them synchronized: one after each forward, or two of one."""
    theirs, ours = pair(rank, TASKS["plain"].make)
    adams = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (theirs, ours)]
    handle = attach(ours, adams[1], mode)
    task = TASKS["plain"]
    for number in range(8):
        for module, adam, after in ((theirs, adams[0], average), (ours, adams[1], lambda _: None)):
            adam.zero_grad()
            first, second = (task.batch(rank.index, 2 * number + part) for part in range(2))
            if how == "two forwards":
                for inputs, targets in (first, second):
                    functional.cross_entropy(module(inputs), targets).backward()
                    after(module)
            else:
                output = module(first[0])
                functional.cross_entropy(output, first[1]).backward(retain_graph=True)
                after(module)
                output.square().mean().backward()
                after(module)
            adam.step()
    handle.flush()
    return compare.modules(ours, theirs) + compare.optimizers(adams[1], adams[0])


@pytest.mark.parametrize("how", ["two forwards", "two losses of one"])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_several_backward_passes_before_a_step(ranks, mode, how):
    for found in ranks.run(2, several_backwards, mode, how):
        assert found == []


def one_backward_of_two_calls(rank, mode):
    theirs, ours = pair(rank, TASKS["plain"].make)
    ddp = nn.parallel.DistributedDataParallel(theirs)
    adams = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (theirs, ours)]
    handle = attach(ours, adams[1], mode)
    task = TASKS["plain"]
    for number in range(8):
        first, second = (task.batch(rank.index, 2 * number + part) for part in range(2))
        for forward, adam in ((ddp, adams[0]), (ours, adams[1])):
            adam.zero_grad()
            losses = [functional.cross_entropy(forward(inputs), targets) for inputs, targets in (first, second)]
            sum(losses).backward()
            adam.step()
    handle.flush()
    return compare.modules(ours, theirs) + compare.optimizers(adams[1], adams[0])


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_model_that_is_called_twice(ranks, mode):
    for found in ranks.run(2, one_backward_of_two_calls, mode):
        assert found == []


def generator():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12))


def critic():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))


def adversaries(rank, mode, freeze):
    """A GAN: the generator's backward goes through the critic, whose gradients are thrown away, or not made."""
    models = {"theirs": [], "ours": []}
    for seed, make in enumerate((generator, critic)):
        theirs, ours = pair(rank, make, seed)
        models["theirs"].append(theirs)
        models["ours"].append(ours)
    adams = {side: [torch.optim.Adam(m.parameters(), lr=1e-2) for m in both] for side, both in models.items()}
    handles = [attach(module, adam, mode) for module, adam in zip(models["ours"], adams["ours"], strict=True)]
    forwards = {
        # DDP's buffers are off, since a second forward pass would write into those that backward needs.
        "theirs": [nn.parallel.DistributedDataParallel(m, broadcast_buffers=False) for m in models["theirs"]],
        "ours": models["ours"],
    }
    generate = torch.Generator().manual_seed(rank.index)
    for _ in range(8):
        real, noise = torch.randn(4, 12, generator=generate), torch.randn(2, 4, 6, generator=generate)
        for side, (make, judge) in forwards.items():
            make_adam, judge_adam = adams[side]
            judge_adam.zero_grad()
            fake = make(noise[0]).detach()
            scores = judge(torch.cat([real, fake]))
            (functional.softplus(-scores[:4]).mean() + functional.softplus(scores[4:]).mean()).backward()
            judge_adam.step()
            make_adam.zero_grad()
            models[side][1].requires_grad_(not freeze)
            functional.softplus(-judge(make(noise[1]))).mean().backward()
            models[side][1].requires_grad_(True)
            make_adam.step()
    found = []
    for handle, one, other in zip(handles, models["ours"], models["theirs"], strict=True):
        handle.flush()
        found += compare.modules(one, other)
        handle.detach()
    return found


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_two_models_that_train_against_each_other(ranks, mode, freeze):
    for found in ranks.run(2, adversaries, mode, freeze):
        assert found == []


def optimizers_by_turns(rank):
    """Two optimizers of one model; the second one takes every other step only."""
    theirs, ours = pair(rank, TASKS["plain"].make)
    ddp = nn.parallel.DistributedDataParallel(theirs)
    both = []
    for module in (theirs, ours):
        parameters = list(module.parameters())
        both.append([torch.optim.SGD(parameters[:4], lr=0.1), torch.optim.Adam(parameters[4:], lr=1e-2)])
    handle = gradcast.attach(ours, both[1], options=gradcast.Options(**OPTIONS))
    task = TASKS["plain"]
    for number in range(14):
        inputs, targets = task.batch(rank.index, number)
        for forward, (sgd, adam) in ((ddp, both[0]), (ours, both[1])):
            sgd.zero_grad()
            adam.zero_grad()
            functional.cross_entropy(forward(inputs), targets).backward()
            sgd.step()
            if number < 6 or number % 2:
                adam.step()
    handle.flush()
    return compare.modules(ours, theirs)


def test_optimizers_that_step_by_turns(ranks):
    for found in ranks.run(2, optimizers_by_turns):
        assert found == []


def autocast(rank, optimizer):
    def forward(module, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(inputs)

    trained = Pair(rank, TASKS["plain"].make, optimizer=optimizer)
    trained.train(8, forward)
    return trained.differences()


@pytest.mark.parametrize("optimizer", ["adam foreach", "adamw fused"])
def test_autocast(ranks, optimizer):
    """Updates run inside of the forward pass, so inside of its autocast; they must not be cast."""
    for found in ranks.run(2, autocast, optimizer):
        assert found == []


def frozen(rank, mode):
    def make():
        module = TASKS["plain"].make()
        module[0].requires_grad_(False)
        module[4].bias.requires_grad_(False)
        return module

    trained = Pair(rank, make, mode)
    trained.train(8)
    return trained.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_frozen_parameters(ranks, mode):
    for found in ranks.run(2, frozen, mode):
        assert found == []


def skip_steps(rank, mode, set_to_none):
    """The loop leaves some steps out after backward, as it does for a loss that is no number."""
    twins = Twins(rank, "plain", "adam plain", mode=mode)
    for number in range(10):
        for _, optimizer, forward in twins.each():
            optimizer.zero_grad(set_to_none=set_to_none)
            twins.task.loss(forward, twins.task.batch(rank.index, number)).backward()
            if number % 3 != 1:
                optimizer.step()
        twins._after_step()
    found = twins.differences()
    twins.handle.detach()
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_steps_that_are_left_out(ranks, mode, set_to_none):
    for found in ranks.run(2, skip_steps, mode, set_to_none):
        assert found == []


def step_twice(rank):
    """Two steps with the same gradients."""
    twins = Twins(rank, "plain", "sgd foreach")
    for number in range(8):
        for _, optimizer, forward in twins.each():
            optimizer.zero_grad()
            twins.task.loss(forward, twins.task.batch(rank.index, number)).backward()
            optimizer.step()
            optimizer.step()
        twins._after_step()
    found = twins.differences()
    twins.handle.detach()
    return found


def test_two_steps_with_the_same_gradients(ranks):
    for found in ranks.run(2, step_twice):
        assert found == []
