"""Gradients that gradcast cannot send: sparse, or with a graph of their own. The error names the parameter."""

from training.attached import Attached, not_refused
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens):
        return self.head(self.table(tokens))


@on_ranks(2)
def test_sparse_gradients_are_refused(rank, mode):
    """Known at attach, where the module says so; at the latest with the first gradient."""
    return not_refused(lambda: Attached(Sparse(), mode).step(torch.tensor([1, 2, 3])), "table.weight", "sparse")


@on_ranks(2)
def test_gradients_with_a_graph_of_their_own_are_refused(rank):
    attached = Attached(nn.Linear(4, 1, bias=False))
    loss = attached.module(torch.ones(2, 4)).pow(2).sum()
    return not_refused(lambda: loss.backward(create_graph=True), "weight", "create_graph")
