"""Several modules under one optimizer, the loss among them: what DDP around each of them gives, bit for bit."""

import contextlib

import pytest

import gradcast
from training import compare
from training.attached import attach, planning
from training.needs import torch
from training.pair import DDP, STEPS, differences
from training.pool import on_ranks

nn = torch.nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).tanh())


class Contrast(nn.Module):
    """A loss with a parameter, as CLIP's."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, some, others):
        scores = some @ others.t() * self.temperature.exp()
        return nn.functional.cross_entropy(scores, torch.arange(len(some)))


class Loop:
    """Two encoders, a frozen part that nothing is trained of, and the loss."""

    def __init__(self, side, **options):
        torch.manual_seed(side.rank)
        self.modules = [Encoder(), Encoder(), nn.Linear(6, 6).requires_grad_(False), Contrast()]
        with torch.no_grad():
            self.modules[2].weight.copy_(torch.eye(6))  # DDP would not send it: it refuses to wrap this one
            self.modules[2].bias.zero_()
        self.optimizer = torch.optim.AdamW([p for each in self.modules for p in each.parameters()], lr=1e-2)
        self.side, self.called = side, self.modules
        if side.name == "ddp":
            self.called = [each if each is self.modules[2] else DDP(each) for each in self.modules]
        else:
            side.handles.append(attach(self.modules, self.optimizer, side.name, **{"policy": "fifo"} | options))

    def loss(self, number):
        image, text, frozen, contrast = self.called
        x = frozen(self.side.batch(number))
        return contrast(image(x), text(x.flip(1)))

    def no_sync(self):
        stack = contextlib.ExitStack()
        for each in self.side.handles or [each for each in self.called if isinstance(each, DDP)]:
            stack.enter_context(each.no_sync())
        return stack

    def result(self):
        whole = nn.ModuleList(self.modules)
        return self.side.result(whole, self.optimizer), dict(whole.named_buffers())


def steps(side, **options):
    loop = Loop(side, **options)
    for number in range(STEPS):
        loop.optimizer.zero_grad()
        if number % 2:
            with loop.no_sync():
                loop.loss(number + 50).backward()
        loop.loss(number).backward()
        if side.name == "ddp" and "clip" in options:
            nn.utils.clip_grad_norm_(nn.ModuleList(loop.modules).parameters(), options["clip"].norm)
        loop.optimizer.step()
    return loop.result()


def one_at_a_time(side):
    """Each module has a step in which the others are not called."""
    loop = Loop(side)
    for number in range(STEPS):
        loop.optimizer.zero_grad(set_to_none=True)
        x = side.batch(number)
        loop.called[number % 2](x).square().sum().backward()
        loop.optimizer.step()
    return loop.result()


LOOPS = {
    "steps": steps,
    "a plan for what was measured": lambda side: steps(side, policy=gradcast.Planning.policy),
    "one at a time": one_at_a_time,
}


@pytest.mark.parametrize("name", LOOPS)
@on_ranks(2)
def test_several_modules_give_what_they_give_with_ddp(rank, name, mode):
    return differences(rank, LOOPS[name], mode)


@on_ranks(2)
def test_several_modules_are_clipped_together(rank):
    return differences(rank, lambda side: steps(side, clip=gradcast.Clip(norm=0.5)), "overlap")


@on_ranks(2)
def test_stock_ddp_around_each(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADCAST_DISABLE", "1")
        return differences(rank, steps, "overlap")


@on_ranks(2)
def test_names_averages_and_what_is_left(rank):
    torch.manual_seed(0)
    modules = (Encoder(), Contrast())
    whole = nn.ModuleList(modules)
    sgd = torch.optim.SGD(whole.parameters(), lr=0.1)
    handle = attach(modules, sgd)
    averages = [torch.optim.swa_utils.AveragedModel(whole) for _ in range(2)]
    handle.keep_average(averages[0])
    updated = []
    handle.on_update(lambda names, parameters: updated.extend(names))
    for number in range(6):
        sgd.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number + 10 * rank.index))
        modules[1](modules[0](x), modules[0](x.flip(1))).backward()
        sgd.step()
        averages[1].update_parameters(whole)
    found = compare.modules(averages[0].module, averages[1].module)
    assert sorted(updated) == sorted(6 * [name for name, _ in whole.named_parameters()])
    assert {"0.first.weight", "1.temperature"} <= {place.name for place in handle.layout}
    handle.detach()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in whole.modules())
    attach(list(modules), sgd).detach()
    return found


@on_ranks(2)
def test_verify_takes_several(rank):
    torch.manual_seed(0)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank.index))
    report = gradcast.verify([Encoder(), Contrast()], lambda modules: modules[1](modules[0](x), x[:, :5]))
    return [] if report.bit_equal else [str(report)]


def test_one_worker():
    modules = [Encoder(), Contrast()]
    sgd = torch.optim.SGD([p for each in modules for p in each.parameters()], lr=0.1)
    handle = gradcast.attach(modules, sgd, options=gradcast.Options(plan=planning(adapt=True)))
    for number in range(5):
        sgd.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        modules[1](modules[0](x), x[:, :5]).backward()
        sgd.step()
    assert {"0.first.weight", "1.temperature"} <= {tensor.name for tensor in handle.profile.tensors}
    handle.detach()
