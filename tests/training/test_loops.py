"""Loops other than forward, backward, step: DDP's result, bit for bit on two ranks."""

import pytest

from training import optimizers
from training.needs import torch
from training.sides import STEPS, differences, net

nn = torch.nn
functional = nn.functional


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def prepared(side, make=net, make_optimizer=adam):
    """A module, its optimizer, and what the loop calls; each parameter has a block of its own."""
    module = make()
    optimizer = make_optimizer(module)
    return module, optimizer, side.called(module, optimizer, policy="fifo")


def loss(side, called, number):
    return called(side.batch(number)).float().square().sum()


def synchronized_backward(side, module, value):
    """In place of DDP, which refuses a second pass, what a user would write who has no DDP."""
    value.backward(retain_graph=True)
    if side.name == "ddp":
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)
            torch.distributed.all_reduce(parameter.grad)


def several_backwards(side, forwards):
    """Backward passes that add up before one step, each of them synchronized: one after each forward, or two of one."""
    module = net()
    optimizer = adam(module)
    side.attach(module, optimizer, policy="fifo")
    for number in range(STEPS):
        optimizer.zero_grad()
        output = module(side.batch(2 * number))
        synchronized_backward(side, module, output.square().sum())
        if forwards == 2:
            output = module(side.batch(2 * number + 1))
        synchronized_backward(side, module, output.square().mean())
        optimizer.step()
    return side.result(module, optimizer)


def one_backward_of_two_calls(side):
    module, optimizer, called = prepared(side)
    for number in range(STEPS):
        optimizer.zero_grad()
        (loss(side, called, 2 * number) + loss(side, called, 2 * number + 1)).backward()
        optimizer.step()
    return side.result(module, optimizer)


def adversaries(side, freeze):
    """A GAN: the generator's backward goes through the critic, whose gradients are thrown away, or not made."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12))
    critic = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))
    make_adam, judge_adam = adam(generator), adam(critic)
    # DDP's buffers are off, since a second forward pass would write into those that backward needs.
    make, judge = (
        side.called(module, optimizer, ddp_options={"broadcast_buffers": False}, policy="fifo")
        for module, optimizer in ((generator, make_adam), (critic, judge_adam))
    )
    random = torch.Generator().manual_seed(side.rank)
    for _ in range(STEPS):
        real, noise = torch.randn(4, 12, generator=random), torch.randn(2, 4, 6, generator=random)
        judge_adam.zero_grad()
        fake = make(noise[0]).detach()
        scores = judge(torch.cat([real, fake]))
        (functional.softplus(-scores[:4]).mean() + functional.softplus(scores[4:]).mean()).backward()
        judge_adam.step()
        make_adam.zero_grad()
        critic.requires_grad_(not freeze)
        functional.softplus(-judge(make(noise[1]))).mean().backward()
        critic.requires_grad_(True)
        make_adam.step()
    # What the generator's backward leaves in the critic is nobody's business.
    critic.zero_grad()
    return side.result(generator, make_adam), side.result(critic, judge_adam)


def optimizers_by_turns(side):
    """Two optimizers of one model; the second one takes every other step only."""
    module, (sgd, other), called = prepared(side, make_optimizer=halves)
    for number in range(14):
        sgd.zero_grad()
        other.zero_grad()
        loss(side, called, number).backward()
        sgd.step()
        if number < 6 or number % 2:
            other.step()
    return side.result(module, sgd, other)


def halves(module):
    parameters = list(module.parameters())
    return [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.Adam(parameters[3:], lr=1e-2)]


def autocast(side, name):
    """Updates run inside of the forward pass, so inside of its autocast; they must not be cast."""
    module, optimizer, called = prepared(side, make_optimizer=lambda module: optimizers.make(name, module).optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(side, called, number)
        value.backward()
        optimizer.step()
    return side.result(module, optimizer)


def partly_frozen():
    module = net()
    module[0].requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def frozen(side):
    module, optimizer, called = prepared(side, make=partly_frozen)
    return side.trained(called, module, optimizer)


def skip_steps(side, set_to_none):
    """The loop leaves some steps out after backward, as it does for a loss that is no number."""
    module, optimizer, called = prepared(side)
    for number in range(10):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(side, called, number).backward()
        if number % 3 != 1:
            optimizer.step()
    return side.result(module, optimizer)


def step_twice(side):
    """Two steps with the same gradients."""
    module, optimizer, called = prepared(side)
    for _ in side.steps(called, optimizer):
        optimizer.step()
    return side.result(module, optimizer)


LOOPS = {
    "a backward after each of two forwards": (several_backwards, 2),
    "two backwards of one forward": (several_backwards, 1),
    "one backward of two calls": (one_backward_of_two_calls,),
    "adversaries": (adversaries, False),
    "adversaries, one frozen": (adversaries, True),
    "optimizers by turns": (optimizers_by_turns,),
    "autocast, foreach": (autocast, "adam foreach"),
    "autocast, fused": (autocast, "adamw fused"),
    "frozen parameters": (frozen,),
    "steps left out": (skip_steps, True),
    "steps left out, gradients zeroed": (skip_steps, False),
    "two steps": (step_twice,),
}


def run(rank, name, mode):
    program, *arguments = LOOPS[name]
    return differences(rank, lambda side: program(side, *arguments), mode)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_what_it_gives_with_ddp(ranks, name, mode):
    for found in ranks.run(2, run, name, mode):
        assert found == []
