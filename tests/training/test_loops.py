"""Loops other than forward, backward, step, which random programs do not make: DDP's result, bit for bit."""

import pytest

from training import optimizers
from training.models import TASKS
from training.needs import torch
from training.pair import STEPS, differences, net
from training.pool import on_ranks

nn = torch.nn
functional = nn.functional


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=1e-2)


def prepared(side, make=net, make_optimizer=adam, **ddp_options):
    """A module, its optimizer, and what the loop calls; each parameter has a block of its own."""
    module = make()
    optimizer = make_optimizer(module)
    return module, optimizer, side.called(module, optimizer, ddp_options=ddp_options, policy="fifo")


def loss(side, called, number):
    return called(side.batch(number)).float().square().sum()


def average(side, module):
    """In place of DDP, which refuses a second pass, what a user would write who has no DDP."""
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
        output.square().sum().backward(retain_graph=True)
        average(side, module)
        if forwards == 2:
            output = module(side.batch(2 * number + 1))
        output.square().mean().backward()
        average(side, module)
        optimizer.step()
    return side.result(module, optimizer)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 10), nn.Linear(6, 10)])

    def forward(self, x, part):
        return self.parts[part](x)


def parts_by_turns(side):
    """Two losses of two halves of the module, each with its own forward, before one step."""
    torch.manual_seed(0)
    module = Halves()
    optimizer = adam(module)
    side.attach(module, optimizer, policy="fifo")
    for number in range(9):
        optimizer.zero_grad()
        for part in range(2):
            module(side.batch(number), part).square().sum().backward()
        average(side, module)  # DDP wants all in one pass
        optimizer.step()
    return side.result(module, optimizer)


class Late(nn.Module):
    """Uses its last layer from some call on. The second one is large: its gradient arrives after others."""

    def __init__(self, number):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(6, size) for size in (60, 400_000, 60))
        self.left = number

    def forward(self, x):
        self.left -= 1
        return self.first(x) + self.second(x).mean() + (self.unused(x) if self.left < 0 else 0)


def first_used_late(side, number):
    """Where a parameter has no momentum yet, torch's SGD takes another kernel for all, which rounds otherwise."""
    torch.manual_seed(0)
    module = Late(number).bfloat16()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, foreach=True)
    called = side.called(module, optimizer, ddp_options={"find_unused_parameters": True}, policy="p3")
    for step in range(number + 3):
        optimizer.zero_grad()
        called(side.batch(step).bfloat16()).square().sum().backward()
        optimizer.step()
        float(module.first.weight.sum())
    return side.result(module, optimizer)


def sync_and_then_none(side):
    """A pass that stays here after one that travels: DDP adds this rank's own gradient to the average."""
    module, optimizer, called = prepared(side)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss(side, called, 2 * number).backward()
        with (side.handle or called).no_sync():
            loss(side, called, 2 * number + 1).backward()
        optimizer.step()
    return side.result(module, optimizer)


def batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def one_backward_of_two_calls(side, make, **ddp_options):
    """Each parameter's gradient comes once, though it is used twice. With batch norm DDP needs broadcast_buffers=False:
    what it sends before the second forward backward still needs."""
    module, optimizer, called = prepared(side, make, **ddp_options)
    for number in range(STEPS):
        optimizer.zero_grad()
        (loss(side, called, 2 * number) + loss(side, called, 2 * number + 1)).backward()
        optimizer.step()
    return side.result(module, optimizer)


def a_pass_left_out(side):
    """Every step calls the module twice, and uses the second result: buffers are sent before each forward pass."""
    module, optimizer, called = prepared(side, batch_norm)
    seen = []
    for number in range(6):
        optimizer.zero_grad()
        called(side.batch(number + 50))
        loss(side, called, number).backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            seen.append(module(side.batch(0)).tolist())
        module.train()
    return seen


def adversaries(side, freeze):
    """A GAN: the generator's backward goes through the critic, whose gradients are thrown away, or not made."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(first, 16), nn.Tanh(), nn.Linear(16, last)) for first, last in ((6, 12), (12, 1))]
    # DDP's buffers are off, since a second forward pass would write into those that backward needs.
    (generator, make_adam, make), (critic, judge_adam, judge) = (
        prepared(side, lambda module=module: module, broadcast_buffers=False) for module in nets
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
    module, (sgd, other), called = prepared(side, TASKS["plain"].module, make_optimizer=optimizers.two_halves)
    for number in range(14):
        sgd.zero_grad()
        other.zero_grad()
        TASKS["plain"].loss(called, TASKS["plain"].batch(side.rank, number)).backward()
        sgd.step()
        if number < 6 or number % 2:
            other.step()
    return side.result(module, sgd, other)


def one_steps_again(side):
    """Two optimizers; one takes a second step with the same gradients, which are then zeroed in place."""
    module, (one, other), called = prepared(side, TASKS["plain"].module, make_optimizer=optimizers.two_halves)
    for number in range(STEPS):
        one.zero_grad(set_to_none=False)
        other.zero_grad(set_to_none=False)
        TASKS["plain"].loss(called, TASKS["plain"].batch(side.rank, number)).backward()
        other.step()
        float(module[8].weight.sum())
        other.step()
        other.zero_grad(set_to_none=False)
        one.step()
    return side.result(module)


LOOPS = {
    "a backward after each of two forwards": lambda side: several_backwards(side, 2),
    "two backwards of one forward": lambda side: several_backwards(side, 1),
    "parts of a model by turns": parts_by_turns,
    "a pass without sync after one with": sync_and_then_none,
    "one backward of two calls": lambda side: one_backward_of_two_calls(side, net),
    "the same with batch norm": lambda side: one_backward_of_two_calls(side, batch_norm, broadcast_buffers=False),
    "a pass left out": a_pass_left_out,
    "adversaries": lambda side: adversaries(side, freeze=False),
    "adversaries, one frozen": lambda side: adversaries(side, freeze=True),
    "optimizers by turns": optimizers_by_turns,
    "a second step of one optimizer": one_steps_again,
    "a layer first used in the warm-up": lambda side: first_used_late(side, 2),
    "a layer first used after it": lambda side: first_used_late(side, 15),
}


@pytest.mark.parametrize("name", LOOPS)
@on_ranks(2)
def test_a_loop_gives_what_it_gives_with_ddp(rank, name, mode):
    return differences(rank, LOOPS[name], mode)
