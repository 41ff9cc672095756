"""Collectives of the program's own between those of gradcast: in forward and backward, and under tensor parallelism."""

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch

nn = torch.nn


def synchronized_norm(rank, mode):
    """SyncBatchNorm's own collectives run on the default group, in forward and in backward, between our blocks.

    On the CPU torch has no SyncBatchNorm; this does the same with differentiable collectives.
    """
    import torch.distributed.nn.functional as collectives

    class SyncNorm(nn.BatchNorm1d):
        def forward(self, x):
            # Named, because torch binds its default when the module is imported: perhaps in an earlier call's group.
            world = torch.distributed.group.WORLD
            sums = collectives.all_reduce(torch.cat([x.sum(0), (x * x).sum(0)]), group=world) / (2 * x.shape[0])
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
