"""benchmarks/stacked_gpt.py has the numbers of one model after the other: DDP's, then the reference's local steps."""

import copy

import pytest

from training.needs import torch

pytest.importorskip("training.needs")
from benchmarks.int8_training import chances, char_gpt
from benchmarks.stacked_gpt import MOMENTUM, Stack, rates

from gradcast.local_steps import make_schedule
from training.local.reference import Reference

STEPS, RANKS, BEGIN = 20, 2, 6
COMMON = {"batch": 2, "width": 32, "steps": STEPS, "seed": 3}
DDP = COMMON | {"rate": 0.2}
LOCAL = COMMON | {"every": 5, "start": BEGIN / STEPS, "outer_lr": 0.7, "outer_momentum": 0.9}
FORMS = [("average", 0, 0.2), ("nesterov", 0, 0.1), ("average", None, 0.2), ("nesterov", 3, 0.2)]


def one_after_the_other(run):
    """The parameters of rank 0 at the end."""
    torch.manual_seed(run["seed"])
    job = char_gpt(run["batch"], run["width"])
    module, draws = job.module(), chances(run["seed"], RANKS)
    optimizers = [torch.optim.SGD(module.parameters(), lr=run["rate"], momentum=MOMENTUM)]
    loss = torch.nn.functional.cross_entropy

    def same(module):
        own = torch.optim.SGD(module.parameters(), lr=run["rate"], momentum=MOMENTUM)
        own.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        return own

    local = None
    for step, rate in enumerate(rates(run["rate"], STEPS)):
        if "start" in run and step == BEGIN:
            local = Reference(module, same, RANKS, run["every"], run["overlap"], run["outer"])
            optimizers = local.optimizers
        batches = [job.draw(chance) for chance in draws]
        if local is None:
            batches = [[torch.cat(each) for each in zip(*batches, strict=True)]]
        modules = [module] if local is None else local.modules
        for each, optimizer, (inputs, targets) in zip(modules, optimizers, batches, strict=True):
            optimizer.zero_grad()
            loss(each(inputs).flatten(0, 1), targets.flatten()).backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        if local is not None:
            local.after_step()
    if local is not None:
        local.end()
        module = local.modules[0]
    return module, job.held_out


def test_a_stack_trains_as_one_model_after_the_other():
    """Streamed and blocking, of two rates, and with DDP's training beside them."""
    runs = [DDP] + [LOCAL | {"outer": outer, "overlap": overlap, "rate": rate} for outer, overlap, rate in FORMS]
    stack = Stack(runs, RANKS, "cpu")
    curves = stack.train(10)
    assert stack.runs == runs
    sizes = [(each.numel(), 4) for each in char_gpt(2, COMMON["width"]).module().parameters()]
    assert len(make_schedule(sizes, LOCAL["every"], None).fragments) > 1
    for run, curve, ours in zip(runs, curves, stack.parameters, strict=True):
        module, (inputs, targets) = one_after_the_other(run)
        theirs = torch.nn.utils.parameters_to_vector(module.parameters())
        torch.testing.assert_close(ours, theirs.detach().expand(RANKS, -1), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        assert curve[-1] == pytest.approx(float(loss), rel=1e-5)
        assert len(curve) == 3
