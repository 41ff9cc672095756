"""Training code that gradcast cannot follow raises in the step in which it happens, and names the parameter."""

from training.attached import Attached, not_refused
from training.models import ReadsMemory, at_address
from training.needs import torch
from training.pair import Pair, Training
from training.pool import on_ranks

nn = torch.nn


@on_ranks(2)
def test_a_stale_read_raises_when_its_gradient_comes(rank):
    """A gradient comes after a forward that ran while its parameter's update was pending: an old value was used."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    attached = Attached(module, policy="fifo")
    for _ in range(4):
        attached.step(torch.ones(2, 4))
    attached.handle.flush()
    weight = module[0].weight
    alias = at_address(weight)
    if rank.index == 1:
        between = module[0].register_forward_hook(
            lambda module, inputs, output: output.register_hook(lambda gradient: rank.wait_for("forward")) and None
        )
        attached.step(torch.ones(2, 4))
        between.remove()
        attached.handle.flush()
        rank.signal("flushed")
        return []
    attached.step(torch.ones(2, 4))
    loss = ReadsMemory.apply(torch.ones(2, 4), weight, alias).sum()
    rank.signal("forward")
    found = not_refused(loss.backward, "0.weight", "flush()")
    rank.wait_for("flushed")  # what rank 1 waits for is still on its way
    return found


@on_ranks(2)
def test_a_second_backward_is_refused(rank):
    """In overlap mode, past the module's own forward, so that nobody sees the second pass begin.

    The first pass's gradients cannot have arrived: rank 1 has not even begun.
    """
    pair = Pair(rank, "plain", "sgd plain")
    pair.train(4)
    if rank.index == 1:
        rank.wait_for("refused")

    def two_passes():
        for part in range(2):
            values, targets = pair.ours.batch(part)
            for layer in pair.ours.module:
                values = layer(values)
            nn.functional.cross_entropy(values, targets).backward()

    found = not_refused(two_passes, "no_sync")
    rank.signal("refused")
    return found


@on_ranks(2)
def test_a_detached_handle_refuses_what_it_cannot_do(rank):
    ours = Training(rank.index, "plain", "sgd plain")
    ours.train(3)
    ours.handle.detach()
    return not_refused(lambda: ours.handle.no_sync().__enter__(), "detached")


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
