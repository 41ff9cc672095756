"""Changes of the program around the time in which DDP reduces by itself, and what is left once gradcast has gone."""

import weakref

import pytest

from training.attached import planning
from training.inside import session_of
from training.models import TASKS
from training.needs import torch
from training.pair import DDP, Side, differences
from training.plan.test_handover import STEPS, Loop, goes_and_returns, soon
from training.pool import on_ranks

nn = torch.nn
MODES = pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])


def gan(side):
    """The discriminator is frozen in each step of the generator, in which it may be that DDP begins."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 6))
    judges = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    modules = [(each, DDP(each), torch.optim.Adam(each.parameters())) for each in (makes, judges)]
    for _, ddp, optimizer in modules:
        side.attach(ddp, optimizer, plan=planning(adapt=True))
    (_, maker, makers_optimizer), (_, judge, judges_optimizer) = modules
    by_ddp = set()
    for number in range(STEPS):
        noise = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + side.rank))
        judges.requires_grad_(True)
        judges_optimizer.zero_grad()
        fake = maker(noise)
        judge(torch.cat([side.batch(number), fake.detach()])).square().mean().backward()
        judges_optimizer.step()
        judges.requires_grad_(False)
        makers_optimizer.zero_grad()
        judge(fake).mean().backward()
        makers_optimizer.step()
        by_ddp |= {k for k, handle in enumerate(side.handles) if handle.stats()["reduced_by_ddp"]}
    assert by_ddp == set(range(len(side.handles)))
    return [side.result(module, optimizer) for module, _, optimizer in modules]


def frozen_on_one_rank(side):
    """DDP finds that the parameter is unused there."""
    training = Loop(side, ddp={"find_unused_parameters": True})
    first = next(training.module.parameters())
    for number in range(STEPS):
        training.optimizer.zero_grad()
        first.requires_grad_(not (side.rank == 0 and number % 5 in (1, 2)))
        training.step(number)
    goes_and_returns(training)
    return training.result()


def static_graph_and_no_sync(side):
    """DDP's first step with a static graph has to be reduced."""
    training = Loop(side, ddp={"static_graph": True})
    for number in range(STEPS):
        training.optimizer.zero_grad()
        if number > 0:
            with training.ddp.no_sync():
                training.backward(100 * number)
        training.step(number)
    goes_and_returns(training)
    return training.result()


def disabled_join(side):
    training = Loop(side)
    for number in range(STEPS):
        with training.ddp.join(enable=False):
            training.optimizer.zero_grad()
            training.step(number)
    goes_and_returns(training)
    return training.result()


@MODES
@pytest.mark.parametrize("program", [gan, frozen_on_one_rank, static_graph_and_no_sync, disabled_join])
@on_ranks(2)
def test_the_bits_are_those_of_ddp(rank, mode, program):
    with soon():
        return differences(rank, program, mode)


def trained(side, *, agreed, **arguments):
    """A training in which DDP reduces, or, ``agreed``, is to reduce from the next forward pass on."""
    training, number = Loop(side, **arguments), 0
    controller = session_of(side.handle).controller
    while not (controller.leaves_to_ddp if agreed else training.by_ddp and training.by_ddp[-1]):
        training.optimizer.zero_grad()
        training.step(number)
        number += 1
    return training


@MODES
@on_ranks(2)
def test_a_weight_after_the_agreement_keeps_the_reduction(rank, mode):
    side = Side(mode, rank.index)
    with soon():
        training = trained(side, agreed=True)
        with side.handle.weight(1 + rank.index):
            training.step(0)
        side.handle.detach()
    return ["DDP reduces a weighted step"] if training.by_ddp[-1] else []


@MODES
@pytest.mark.parametrize("agreed", [True, False])
@on_ranks(2)
def test_a_new_parameter_gets_the_value_of_rank_0(rank, mode, agreed):
    side = Side(mode, rank.index)
    with soon():
        training = trained(side, agreed=agreed)
        training.module.scale = nn.Parameter(torch.full((3,), 1.0 + rank.index))
        training.module.register_forward_hook(lambda module, _, output: output * module.scale.sum())
        if mode == "overlap":
            training.optimizer.add_param_group({"params": [training.module.scale]})
        seen = []
        training.module.register_forward_pre_hook(lambda module, _: seen.append(module.scale.tolist()))
        training.step(0)
        side.handle.detach()
    return [] if seen == [[1.0, 1.0, 1.0]] and not training.by_ddp[-1] else [seen, training.by_ddp]


@MODES
@on_ranks(2)
def test_a_module_can_be_converted_while_ddp_reduces(rank, mode):
    side = Side(mode, rank.index)
    with soon():
        training = trained(side, agreed=False, optimizer=torch.optim.SGD)
        training.module.double()
        for number in range(3):
            inputs, targets = TASKS["plain"].batch(rank.index, number)
            training.optimizer.zero_grad()
            nn.functional.cross_entropy(training.ddp(inputs.double()), targets).backward()
            training.optimizer.step()
        side.handle.detach()
    first = next(training.module.parameters()).grad
    found = [torch.empty_like(first) for _ in range(2)]
    torch.distributed.all_gather(found, first)
    return [] if first.dtype == torch.float64 and torch.equal(*found) else found


@MODES
@on_ranks(2)
def test_a_kept_handle_does_not_keep_ddp(rank, mode):
    """The next DDP around the module would be refused."""
    side = Side(mode, rank.index)
    with soon():
        training = trained(side, agreed=False)
        side.handle.detach()
        former = weakref.ref(training.ddp)
        training.ddp = None
    return ["DDP is alive"] if former() is not None else []


@pytest.mark.parametrize("all_of_it", [False, True])
@on_ranks(2)
def test_ddp_reduces_what_was_frozen_at_detach(rank, all_of_it):
    side = Side("hook", rank.index)
    training = Loop(side)
    first = next(training.module.parameters())
    (training.module if all_of_it else first).requires_grad_(False)
    side.handle.detach()
    training.module.requires_grad_(True)
    training.backward(0)
    found = [torch.empty_like(first.grad) for _ in range(2)]
    torch.distributed.all_gather(found, first.grad)
    return [] if torch.equal(*found) else found


@on_ranks(2)
def test_few_parameters_keep_the_reduction(rank):
    """The times of their gradients are those of the step before from time to time, on one rank."""
    side = Side("hook", rank.index)
    with soon():
        module = nn.Linear(6, 1, bias=False)
        ddp = DDP(module)
        side.attach(ddp, None, plan=planning(adapt=True))
        by_ddp = []
        for number in range(20):
            ddp(side.batch(number)).sum().backward()
            by_ddp.append(side.handle.stats()["reduced_by_ddp"])
        side.handle.detach()
    return [by_ddp] if any(by_ddp) else []
