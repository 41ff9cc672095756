"""Gradients that gradcast cannot send: sparse, or with a graph of their own. The error names the parameter."""

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
