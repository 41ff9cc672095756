"""The buffers of gradients: where each lies, and what moves when they get other places."""

import pytest

from gradcast.training.step.gradient_buffers import ALIGNMENT_BYTES, GradientBuffers
from training import compare
from training.inside import session_of
from training.needs import torch
from training.pair import Pair, Side, net
from training.pool import on_ranks

nn = torch.nn


def parameters():
    """Parameters of two dtypes, of sizes that no alignment fits."""
    shapes = {"a": (3,), "b": (7, 5), "c": (8,), "d": (2, 3, 1), "e": (31,)}
    dtypes = {"b": torch.bfloat16, "e": torch.bfloat16}
    return {name: torch.zeros(shape, dtype=dtypes.get(name, torch.float32)) for name, shape in shapes.items()}


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1)])
def test_gradients_begin_where_devices_copy_fast(order):
    named = parameters()
    buffers = GradientBuffers(list(named), list(named.values()), 2)
    buffers.lay_out(order)
    ends = [0, 0]
    for place in buffers.layout:
        assert place.lo_bytes % ALIGNMENT_BYTES == place.end_bytes % ALIGNMENT_BYTES == 0
        assert place.lo_bytes == ends[place.buffer], "one behind the other"
        assert place.hi_bytes - place.lo_bytes == named[place.name].nbytes
        assert place.end_bytes - place.hi_bytes < ALIGNMENT_BYTES, "nothing but padding"
        ends[place.buffer] = place.end_bytes
    assert ends == [flat.nbytes for flat in buffers.flats]
    assert [sum(buffers.bytes_of(i) for i in range(5) if buffers.buffer_of[i] == b) for b in range(2)] == ends
    for view, address in zip(buffers.views, buffers.addresses, strict=True):
        assert (address - buffers.flats[view.dtype == torch.bfloat16].data_ptr()) % ALIGNMENT_BYTES == 0


def test_what_is_held_moves_and_the_rest_is_zero():
    named = parameters()
    buffers = GradientBuffers(list(named), list(named.values()), 2)
    for index, view in enumerate(buffers.views):
        view.fill_(index + 1)
    del view  # whoever refers to one, keeps it
    named["a"].grad, named["b"].grad, named["e"].grad = buffers.views[0], buffers.views[1].clone(), buffers.views[4]
    buffers.lay_out((4, 3, 2, 1, 0))
    assert [view.unique().tolist() for view in buffers.views] == [[1], [0], [0], [0], [5]]
    views = sum(float(view.float().sum()) for view in buffers.views)
    assert sum(float(flat.float().sum()) for flat in buffers.flats) == views, "nothing old between them"


KEPT = {"itself": lambda view: view, "detached": torch.Tensor.detach, "as an array": torch.Tensor.numpy}


@pytest.mark.parametrize("how", KEPT)
def test_who_keeps_a_view_is_seen(how):
    named = parameters()
    buffers = GradientBuffers(list(named), list(named.values()), 2)
    buffers.lay_out(range(5))
    assert not buffers.is_kept()
    kept = KEPT[how](buffers.views[2])
    assert buffers.is_kept()
    buffers.lay_out(range(5))
    assert buffers.apart == {2}
    assert len(kept) == 8


class Reversed(nn.Module):
    """Reads its parameters in another order than that in which it has them."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(12, 10, bias=False), nn.Linear(12, 12, bias=False)

    def forward(self, value):
        return self.last(self.first(value))


@pytest.mark.parametrize(("set_to_none", "expected"), [(True, 0), (False, 2)])
@on_ranks(2)
def test_only_gradients_that_somebody_holds_are_copied_when_the_layout_changes(rank, set_to_none, expected):
    """It changes where backward begins, and memory is fullest there."""
    pair = Pair(rank, Reversed, "sgd plain", mode="hook")
    buffers, moved = session_of(pair.handle).exchange.buffers, []
    moving = buffers._moving

    def counted(kept):
        found = moving(kept)
        moved.append(len(found))
        return found

    buffers._moving = counted
    for _ in range(6):
        pair.step(set_to_none=set_to_none)
    assert moved[0] == expected, "the layout of the plan"
    return pair.differences()


@pytest.mark.parametrize("kept", [None, 2])
@on_ranks(2)
def test_only_a_gradient_that_is_kept_gets_memory_of_its_own(rank, mode, kept):
    """A variable that is left over costs the one gradient that it refers to: new memory for it in each step."""
    module, side, found, held = net(), Side(mode, rank.index), [], None
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(module, optimizer)
    for _ in side.steps(module, optimizer):
        gradients = [p.grad for p in module.parameters()]
        found.append([each.data_ptr() for each in gradients])
        held = gradients[kept] if kept is not None else None
        del gradients
    del held
    side.handle.detach()
    usual = found[4:]  # a plan is followed, so the layout stays
    moved = [number for number, places in enumerate(zip(*usual, strict=True)) if len(set(places)) > 1]
    return compare.trees(moved, [] if kept is None else [kept], "moved")


@on_ranks(2)
def test_a_gradient_stays_the_same_tensor_when_the_module_is_converted_and_back(rank):
    pair = Pair(rank, "plain", "sgd plain")
    for _ in range(5):
        pair.step(set_to_none=False)
    pair.handle.flush()
    kept = [[parameter.grad for parameter in module.parameters()] for module in pair.modules]
    for module in pair.modules:
        module.double().float()
    pair.theirs.wrap()
    pair.step(set_to_none=False)
    pair.handle.flush()
    for module, gradients in zip(pair.modules, kept, strict=True):
        assert all(p.grad is grad for p, grad in zip(module.parameters(), gradients, strict=True))
    return pair.differences() + compare.trees(kept[1], kept[0], "kept")


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_what_numpy_holds_of_gradients_survives_a_conversion_of_the_module(rank, set_to_none):
    """An array holds memory, not a tensor, and the conversion gives the gradient other memory."""
    pair, held = Pair(rank, "plain", "sgd plain"), []
    for number in range(8):
        pair.step(set_to_none=set_to_none)
        if number in (3, 5):
            pair.handle.flush()
            held += [p.grad.numpy() for module in pair.modules for p in module.parameters()]
            copies = [each.copy() for each in held]
            for module in pair.modules:
                module.double().float()
            pair.theirs.wrap()
    pair.handle.flush()
    return pair.differences() + [f"held {n}" for n, each in enumerate(copies) if (each != held[n]).any()]
