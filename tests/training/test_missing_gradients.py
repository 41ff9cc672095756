"""Gradients that gradcast cannot send: missing, sparse, or with a graph of their own. The error names the parameter."""

import pytest

from training.attached import Attached, error_of
from training.needs import torch

nn = torch.nn


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def sparse_gradient(rank, mode):
    """Known at attach, where the module says so; at the latest with the first gradient."""

    def train():
        attached = Attached(Sparse(), mode)
        attached.step(torch.tensor([1, 2, 3]))

    return error_of(train)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_sparse_gradients_are_refused(ranks, mode):
    for code, message in ranks.run(2, sparse_gradient, mode):
        assert code == "invalid_use", message
        assert "table.weight" in message
        assert "sparse" in message


class Skips(nn.Module):
    """Two branches, of which a step uses one or both."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, use_right=True):
        return self.left(x) + (self.right(x) if use_right else 0.0)


def missing_gradient(rank, mode, good_steps):
    attached = Attached(Skips(), mode)
    for _ in range(good_steps):
        attached.step(torch.ones(2, 4))

    def go_on():
        # In hook mode the error may come at the end of backward, at step() or where the gradients are next needed.
        for _ in range(2):
            attached.step(torch.ones(2, 4), False)
        attached.handle.flush()

    return error_of(go_on)


@pytest.mark.parametrize("good_steps", [0, 4])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_parameter_without_gradient_is_named(ranks, mode, good_steps):
    for code, message in ranks.run(2, missing_gradient, mode, good_steps):
        assert code == "invalid_use", message
        assert "right.weight" in message


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_parameter_without_gradient_on_one_rank_ends_all(ranks, mode):
    """The rank that lacks it names it; the others must not wait for it without end."""
    answers = ranks.run(2, missing_gradient_on_one, mode, timeout_s=60)
    assert answers[1][0] == "invalid_use", answers[1][1]
    assert "right.weight" in answers[1][1]
    assert answers[0][0] == "communication", answers[0][1]


def missing_gradient_on_one(rank, mode):
    attached = Attached(Skips(), mode, timeout_s=3.0)
    for _ in range(4):
        attached.step(torch.ones(2, 4))

    def go_on():
        for _ in range(3):
            attached.step(torch.ones(2, 4), rank.index != 1)
        attached.handle.flush()

    return error_of(go_on)


def create_graph(rank):
    def train():
        attached = Attached(nn.Linear(4, 1))
        attached.module(torch.ones(2, 4)).pow(2).sum().backward(create_graph=True)
        attached.optimizer.step()

    return error_of(train)


def test_gradients_with_a_graph_of_their_own_are_refused(ranks):
    for code, message in ranks.run(2, create_graph):
        assert code == "invalid_use", message
        assert "weight" in message or "bias" in message


def new_parameter(rank):
    """The optimizer gets a parameter that attach has not seen: its gradient would not travel, its update never run."""
    attached = Attached(nn.Linear(4, 1))
    for _ in range(4):
        attached.step(torch.ones(2, 4))
    attached.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return error_of(lambda: attached.step(torch.ones(2, 4)))


def thawed_parameter(rank):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    attached = Attached(module)
    for _ in range(4):
        attached.step(torch.ones(2, 4))
    module[0].requires_grad_(True)
    return error_of(lambda: attached.step(torch.ones(2, 4)))


def test_a_parameter_that_comes_later_is_refused(ranks):
    for code, message in ranks.run(2, new_parameter):
        assert code == "invalid_use", message
        assert "(3,)" in message


def test_a_parameter_that_is_thawed_later_is_named(ranks):
    for code, message in ranks.run(2, thawed_parameter):
        assert code == "invalid_use", message
        assert "0.weight" in message
