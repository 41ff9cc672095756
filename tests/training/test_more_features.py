"""Weight averages, synchronized batch norm, Muon, and data-parallel groups under tensor parallelism."""

import copy

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch
from training.optimizers import Recipe
from training.twins import Twins

nn = torch.nn


def averages(rank, mode):
    """EMA by swa_utils after each step, evaluated in between, and batch norm statistics of the average at the end."""
    twins = Twins(rank, "convnet", "adamw foreach", mode=mode)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    models = [torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=decay) for module, _, _ in twins.each()]
    found = []
    for number in range(9):
        twins.step()
        for model, (module, _, _) in zip(models, twins.each(), strict=True):
            model.update_parameters(module)
        if number in (4, 6):
            inputs = twins.task.batch(9, number)[0]
            with torch.no_grad():
                found += compare.trees(models[1](inputs), models[0](inputs), "average")
    for model in models:
        torch.optim.swa_utils.update_bn([twins.task.batch(rank.index, n)[0] for n in range(3)], model)
    found += compare.modules(models[1].module, models[0].module)
    return found + twins.differences()


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_averages_of_the_weights(ranks, mode):
    for found in ranks.run(2, averages, mode):
        assert found == []


def swa(rank):
    """SWALR and AveragedModel in their documented order."""
    twins = Twins(rank, "plain", "sgd fused")
    models = [torch.optim.swa_utils.AveragedModel(module) for module, _, _ in twins.each()]
    schedulers = [torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01) for _, optimizer, _ in twins.each()]
    for number in range(9):
        twins.step()
        for model, scheduler, (module, _, _) in zip(models, schedulers, twins.each(), strict=True):
            if number > 4:
                model.update_parameters(module)
                scheduler.step()
    return compare.modules(models[1].module, models[0].module) + twins.differences()


def test_stochastic_weight_averaging(ranks):
    for found in ranks.run(2, swa):
        assert found == []


def synchronized_norm(rank, mode):
    """SyncBatchNorm's own collectives run on the default group, in forward and in backward, between our blocks.

    On the CPU torch has no SyncBatchNorm; this does the same with differentiable collectives.
    """
    import torch.distributed.nn.functional as collectives

    class SyncNorm(nn.BatchNorm1d):
        def forward(self, x):
            sums = collectives.all_reduce(torch.cat([x.sum(0), (x * x).sum(0)])) / (2 * x.shape[0])
            mean, square = sums.split(x.shape[1])
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
            return (x - mean) * torch.rsqrt(square - mean * mean + 1e-5) * self.weight + self.bias

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 12), SyncNorm(12), nn.Tanh(), nn.Linear(12, 10))

    theirs, ours = make(), make()
    ddp = nn.parallel.DistributedDataParallel(theirs)
    adams = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (theirs, ours)]
    handle = gradcast.attach(
        ours,
        adams[1] if mode == "overlap" else None,
        options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"),
    )
    for number in range(9):
        inputs, targets = TASKS["plain"].batch(rank.index, number)
        for forward, adam in ((ddp, adams[0]), (ours, adams[1])):
            adam.zero_grad()
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            adam.step()
    handle.flush()
    return compare.modules(ours, theirs) + compare.optimizers(adams[1], adams[0])


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_collectives_inside_of_forward_and_backward(ranks, mode):
    for found in ranks.run(2, synchronized_norm, mode):
        assert found == []


def muon_and_adamw(rank, mode):
    """Matrices by Muon, the others by AdamW: two optimizers of one module, by turns after each backward."""
    task = TASKS["plain"]
    sides = []
    for _ in range(2):
        module = task.module(seed=0)
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        sides.append((module, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]))
    ddp = nn.parallel.DistributedDataParallel(sides[0][0])
    options = gradcast.Options(adapt=False, warmup_steps=3, policy="fifo")
    handle = gradcast.attach(sides[1][0], sides[1][1] if mode == "overlap" else None, options=options)
    for number in range(9):
        inputs, targets = task.batch(rank.index, number)
        for forward, (_, both) in zip((ddp, sides[1][0]), sides, strict=True):
            for optimizer in both:
                optimizer.zero_grad()
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            for optimizer in both:
                optimizer.step()
    handle.flush()
    found = compare.modules(sides[1][0], sides[0][0])
    for ours, theirs in zip(sides[1][1], sides[0][1], strict=True):
        found += compare.optimizers(ours, theirs)
    return found


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_muon_with_adamw(ranks, mode):
    for found in ranks.run(2, muon_and_adamw, mode):
        assert found == []


def maximizing(module):
    """Settings that change by hand in the middle of training."""
    return Recipe(torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, maximize=True, weight_decay=0.01))


def by_hand(rank):
    twins = Twins(rank, "plain", maximizing)
    for number in range(10):
        twins.step()
        for _, optimizer, _ in twins.each():
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            optimizer.param_groups[0]["momentum"] = 0.5 + 0.04 * number
    return twins.differences()


def test_settings_that_change_right_after_the_step(ranks):
    for found in ranks.run(2, by_hand):
        assert found == []


class SumOverShards(torch.autograd.Function):
    """The f and g of tensor parallelism: partial results are summed in forward, gradients pass."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sharded(nn.Module):
    """Two linear layers, the first split by columns, the second by rows, over two ranks."""

    def __init__(self, shard, group):
        super().__init__()
        torch.manual_seed(3)
        grow, shrink = nn.Linear(12, 16), nn.Linear(16, 10, bias=False)
        part = slice(8 * shard, 8 * shard + 8)
        self.weight1, self.bias1 = nn.Parameter(grow.weight[part].clone()), nn.Parameter(grow.bias[part].clone())
        self.weight2 = nn.Parameter(shrink.weight[:, part].clone())
        self.group = group

    def forward(self, x):
        x = torch.tanh(nn.functional.linear(CopyToShards.apply(x, self.group), self.weight1, self.bias1))
        return SumOverShards.apply(nn.functional.linear(x, self.weight2), self.group)


def two_by_two(rank, mode):
    """Ranks 0 1 and 2 3 hold the two halves of the model; 0 2 and 1 3 train the same half on different data."""
    shards = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    replicas = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    shard, replica = rank.index % 2, rank.index // 2
    theirs = Sharded(shard, shards[replica])
    ours = Sharded(shard, shards[replica])
    ddp = nn.parallel.DistributedDataParallel(theirs, process_group=replicas[shard])
    adams = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (theirs, ours)]
    handle = gradcast.attach(
        ours,
        adams[1] if mode == "overlap" else None,
        process_group=replicas[shard],
        options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"),
    )
    for number in range(9):
        inputs, targets = TASKS["plain"].batch(replica, number)
        for forward, adam in ((ddp, adams[0]), (ours, adams[1])):
            adam.zero_grad()
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            adam.step()
    handle.flush()
    return compare.modules(ours, theirs), [float(p.detach().sum()) for p in ours.parameters()]


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_tensor_parallelism_two_by_two(ranks, mode):
    answers = ranks.run(4, two_by_two, mode)
    assert [found for found, _ in answers] == [[]] * 4
    sums = [values for _, values in answers]
    assert sums[0] == sums[2]
    assert sums[1] == sums[3]
    assert sums[0] != sums[1]


def assigned_state(rank, mode):
    """load_state_dict(assign=True) puts other parameters into the module."""
    module = TASKS["plain"].module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options = gradcast.Options(adapt=False, warmup_steps=3)
    gradcast.attach(module, optimizer if mode == "overlap" else None, options=options)
    task = TASKS["plain"]
    task.loss(module, task.batch(rank.index, 0)).backward()
    optimizer.step()
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    try:
        task.loss(module, task.batch(rank.index, 1)).backward()
    except gradcast.Error as error:
        return error.code, str(error)
    return None, [float(p.grad.sum()) for p in module.parameters()]


def test_parameters_that_are_replaced_by_load_state_dict(ranks):
    """In overlap mode the optimizer would go on updating the old ones; in hook mode the new ones travel."""
    for code, message in ranks.run(2, assigned_state, "overlap"):
        assert code == "invalid_use"
        assert "not in the module" in message
    (code, sums), (_, others) = ranks.run(2, assigned_state, "hook")
    assert code is None
    assert sums == others
