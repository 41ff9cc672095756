"""gradcast.verify: a user's own check of one step against DDP on a model of their own."""

import pytest

import gradcast
from training import compare
from training.attached import not_refused
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks


def verify(rank, task_name):
    task = TASKS[task_name]
    module = task.module(seed=rank.index)
    before = compare.digest(module)
    batch = task.batch(rank.index, 0)
    report = gradcast.verify(module, lambda m: task.loss(m, batch))
    assert report.ok, str(report)
    assert compare.digest(module) == before, "verify has changed the module"
    assert report.largest_difference <= report.bound
    assert ("bit for bit" in str(report)) == report.bit_equal
    assert report.where in dict(module.named_parameters())
    assert rank.size > 2 or (report.bit_equal and report.largest_difference == 0), str(report)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("task", ["convnet", "transformer", "mixed64"])
def test_a_right_model_passes(ranks, task, world_size):
    ranks.run(world_size, verify, task)


class Unsteady(torch.nn.Module):
    """Gives another gradient each time: no two passes can be compared, and the report must say that they differ."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * float(self.calls)


@on_ranks(2)
def test_a_difference_is_reported_with_its_place(rank):
    """A check that cannot fail is none."""
    report = gradcast.verify(Unsteady(), lambda module: module(torch.ones(2, 4)).sum())
    assert not report.ok
    assert "linear" in str(report)


@on_ranks(1)
def test_one_worker_has_nothing_to_verify(rank):
    module = torch.nn.Linear(3, 3)
    return not_refused(lambda: gradcast.verify(module, lambda module: module(torch.ones(1, 3)).sum()))
