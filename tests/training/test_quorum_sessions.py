"""Sessions over process groups that fail: whatever notices it, whoever has made the group is told, and nothing raises.

With torchft's own groups, tests/frameworks/test_torchft.py.
"""

from datetime import timedelta
from unittest import mock

import pytest

import gradcast
from gradcast.training.acceptance import accept
from gradcast.training.attach import attach_to_quorum
from gradcast.training.handle import Handle
from gradcast.training.sessions.quorum import Plans, QuorumSessions
from training.bomb import Bomb
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn
dist = torch.distributed
GIVES_UP = timedelta(seconds=2)


class Quorum:
    """A quorum of all ranks, which ends when an error is reported."""

    def __init__(self):
        self.group, self.reported, self.aborted = dist.new_group(timeout=GIVES_UP), [], False

    def process_group(self):
        return None if self.reported else self.group

    def share(self):
        return 1.0 / self.group.size()

    def report(self, error):
        self.reported.append(error)

    def abort(self):
        self.aborted = True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head, self.explodes = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        x = self.trunk(x)
        return self.head(Bomb.apply(x) if self.explodes else x)


def backward(model):
    model(torch.ones(2, 4)).sum().backward()


def flush(model, handle):
    handle.flush()


def collective(model, handle):
    with handle.collective():
        pass


def read_gradient(model, handle):
    model.head.weight.grad.clone()


def second_backward(model, handle):
    with pytest.raises(RuntimeError, match="in backward"):
        model.output.sum().backward()


def test_statistics_are_known_before_the_first_quorum():
    model = Model()
    accepted = accept(model, [], None)
    handle = Handle(model, QuorumSessions(mock.Mock(), accepted, gradcast.Options(), Plans()), accepted.called, [])
    assert handle.stats()["hosts"] == {"count": 1, "ranks_per_host": 1}
    handle.detach()


@pytest.mark.parametrize("notice", [flush, collective, read_gradient, second_backward])
@on_ranks(2)
def test_what_a_failed_backward_pass_leaves_open_is_reported_if_the_others_have_gone(rank, notice):
    torch.manual_seed(0)
    model, quorum = Model(), Quorum()
    handle = attach_to_quorum(quorum, Plans(), model, gradcast.Options())
    backward(model)
    model.explodes = True
    model.output = model(torch.ones(2, 4))
    if rank.index == 1:
        rank.wait_for("noticed")
        return []
    with pytest.raises(RuntimeError, match="in backward"):
        model.output.sum().backward(retain_graph=True)
    assert not quorum.reported
    notice(model, handle)
    rank.signal("noticed")
    assert [error.code for error in quorum.reported] == ["communication"]
    assert quorum.aborted
    model.explodes = False
    backward(model)  # over no group
    assert len(quorum.reported) == 2  # once more, since nothing has made another group
    assert model.head.weight.grad.isfinite().all()
    handle.detach()
    return []
