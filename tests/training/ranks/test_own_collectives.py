"""Collectives of the program's own between those of gradcast: in forward and backward, and under tensor parallelism."""

import pytest

from training.needs import torch
from training.pair import differences
from training.pool import on_ranks

pytest.importorskip("torch.distributed.nn.functional")
import torch.distributed.nn.functional as collectives

nn = torch.nn


class SyncNorm(nn.BatchNorm1d):
    """As SyncBatchNorm, which torch does not have on the CPU, with differentiable collectives on the default group."""

    def forward(self, x):
        # Named, because torch binds its default when the module is imported: perhaps in an earlier call's group.
        world = torch.distributed.group.WORLD
        sums = collectives.all_reduce(torch.cat([x.sum(0), (x * x).sum(0)]), group=world) / (2 * x.shape[0])
        mean, square = sums.split(x.shape[1])
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        return (x - mean) * torch.rsqrt(square - mean * mean + 1e-5) * self.weight + self.bias


def trained(side, module, process_group=None):
    """Every block is one gradient, so that many travel while the program's own collectives run."""
    adam = torch.optim.Adam(module.parameters(), lr=1e-2)
    called = side.called(module, adam, process_group, policy="fifo")
    return module.state_dict() | side.trained(called, module, adam)


def synchronized_norm(side):
    torch.manual_seed(0)
    return trained(side, nn.Sequential(nn.Linear(6, 12), SyncNorm(12), nn.Tanh(), nn.Linear(12, 10)))


@on_ranks(2)
def test_collectives_inside_of_forward_and_backward(rank, mode):
    return differences(rank, synchronized_norm, mode)


class Sum(torch.autograd.Function):
    """The f and g of tensor parallelism: the shards' tensors are summed in one direction, the other one passes."""

    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group = None if in_forward else group
        return summed(x, group if in_forward else None)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None, None


def summed(tensor, group):
    tensor = tensor.clone()
    if group is not None:
        torch.distributed.all_reduce(tensor, group=group)
    return tensor


class Sharded(nn.Module):
    """Two linear layers, the first split by columns, the second by rows, over two ranks."""

    def __init__(self, shard, group):
        super().__init__()
        torch.manual_seed(3)
        grow, shrink = nn.Linear(6, 16), nn.Linear(16, 10, bias=False)
        part = slice(8 * shard, 8 * shard + 8)
        self.weight1, self.bias1 = nn.Parameter(grow.weight[part].clone()), nn.Parameter(grow.bias[part].clone())
        self.weight2 = nn.Parameter(shrink.weight[:, part].clone())
        self.group = group

    def forward(self, x):
        x = torch.tanh(nn.functional.linear(Sum.apply(x, self.group, False), self.weight1, self.bias1))
        return Sum.apply(nn.functional.linear(x, self.weight2), self.group, True)


@on_ranks(4)
def test_tensor_parallelism_two_by_two(rank, mode):
    """Ranks 0 1 and 2 3 hold the two halves of the model; 0 2 and 1 3 train the same half on different data."""
    shards = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    replicas = [torch.distributed.new_group([0, 2]), torch.distributed.new_group([1, 3])]
    shard, replica = rank.index % 2, rank.index // 2

    def program(side):
        side.rank = replica  # both halves of a model get the same data
        return trained(side, Sharded(shard, shards[replica]), replicas[shard])

    return differences(rank, program, mode)
