"""gradcast.verify: a user's own check of one step against DDP on a model of their own."""

import pytest

import gradcast
from training import compare
from training.attached import error_of
from training.models import TASKS
from training.needs import torch


def verify(rank, task_name):
    task = TASKS[task_name]
    module = task.module(seed=rank.index)
    before = compare.digest(module)
    batch = task.batch(rank.index, 0)
    report = gradcast.verify(module, lambda m: task.loss(m, batch))
    return {
        "ok": report.ok,
        "bit_equal": report.bit_equal,
        "difference": report.largest_difference,
        "bound": report.bound,
        "where": report.where,
        "text": str(report),
        "unchanged": compare.digest(module) == before,
        "names": [name for name, _ in module.named_parameters()],
    }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("task", ["convnet", "transformer", "mixed64"])
def test_a_right_model_passes(ranks, task, world_size):
    for report in ranks.run(world_size, verify, task):
        assert report["ok"], report["text"]
        assert report["unchanged"], "verify has changed the module"
        assert report["difference"] <= report["bound"]
        assert report["where"] in report["names"]
        if world_size == 2:
            assert report["bit_equal"], report["text"]
            assert report["difference"] == 0


class Unsteady(torch.nn.Module):
    """Gives another gradient each time: no two passes can be compared, and the report must say that they differ."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * float(self.calls)


def verify_unsteady(rank):
    report = gradcast.verify(Unsteady(), lambda module: module(torch.ones(2, 4)).sum())
    return report.ok, str(report)


def test_a_difference_is_reported_with_its_place(ranks):
    """A check that cannot fail is none."""
    for ok, text in ranks.run(2, verify_unsteady):
        assert not ok
        assert "linear" in text


def verify_alone(rank):
    return error_of(lambda: gradcast.verify(torch.nn.Linear(3, 3), lambda module: module(torch.ones(1, 3)).sum()))


def test_one_worker_has_nothing_to_verify(ranks):
    assert ranks.run(1, verify_alone)[0][0] == "invalid_use"
