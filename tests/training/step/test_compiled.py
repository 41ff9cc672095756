"""A model that is compiled as a whole or in parts, with DDP's result bit for bit."""

import functools

import pytest

from training.attached import heard, planning
from training.inside import session_of
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.step import compiled_blocks


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        ("module", "overlap"),
        ("module", "hook"),
        ("layers", "overlap"),
        ("wrapped", "overlap"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("layers", "hook"), ("wrapped", "hook"), ("functions", "overlap"), ("functions", "hook"))
        ),
    ],
)
@on_ranks(2, timeout_s=120)
def test_compiled_modules(rank, what, mode):
    """In the course of training nothing is compiled again: compiled code never sees a pending parameter. That a whole
    model keeps forward waiting is said once."""
    torch._dynamo.reset()
    pair = Pair(rank, mode=mode, policy="fifo")
    for module in pair.modules:
        if what == "functions":
            module[2].forward = torch.compile(module[2].forward, backend="aot_eager")
        elif what == "wrapped":
            module[2] = torch.compile(module[2], backend="aot_eager")
        else:
            for part in [module] if what == "module" else [module[0], module[4]]:
                part.compile(backend="aot_eager")
    with heard() as lines:
        pair.train(7)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        pair.train(5)
    warnings = sum("compiled as a whole" in line for line in lines)
    assert warnings == ((what, mode, rank.index) == ("module", "overlap", 0))
    assert what == "functions" or torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    return pair.differences()


@on_ranks(2, timeout_s=120)
def test_a_compiled_function_may_take_the_step(rank):
    torch._dynamo.reset()
    pair = Pair(rank, policy="fifo")
    theirs, ours = (side.optimizer for side in pair.sides)
    steps = {theirs: theirs.step, ours: torch.compile(lambda: ours.step(), backend="eager")}
    for _, side in pair.rounds(12):
        side.optimizer.zero_grad()
        side.loss().backward()
        steps[side.optimizer]()
    return pair.differences()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Blocks(torch.nn.Module):
    """A loop over blocks, one of which comes twice, tied weights, and parameters before which no part begins."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.places = torch.nn.Embedding(4, 16)
        self.first = torch.nn.Linear(12, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.tied = torch.nn.Linear(12, 16)
        self.tied.weight = self.first.weight
        self.last = torch.nn.Linear(16, 10)

    def forward(self, inputs):
        x = self.first(inputs) * self.scale + self.places.weight[1]
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.last(torch.relu(x + self.tied(inputs)))


def compiled_model(**options):
    return torch.compile(Blocks(), backend="aot_eager", **options)


@pytest.mark.parametrize("how", ["module", pytest.param("wrapped", marks=pytest.mark.slow), "ddp"])
@on_ranks(2, timeout_s=120)
def test_a_split_model_waits_part_by_part(rank, how):
    """Nothing is compiled again. DDP's model has the same code, compiled before without breaks."""
    torch._dynamo.reset()
    model = Blocks if how == "module" else compiled_model
    pair = Pair(rank, model, split_compiled=True, wrap=how == "ddp", plan=planning("p3", slice_elements=150))
    if how == "module":
        for module in pair.modules:
            module.compile(backend="aot_eager")
    with heard() as lines:
        pair.train(7)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        pair.train(5)
    found = [line for line in lines if "compiled" in line]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    needs = {tensor.need_ns for tensor in session_of(pair.handle).report.profile.tensors}
    assert len(needs) >= 6, f"forward needs parameters at {needs}"
    pair.pending_step()
    with torch.no_grad():
        theirs, ours = (module.eval()(torch.ones(2, 12)) for module in pair.modules)
    found += [] if torch.equal(theirs, ours) else ["evaluation reads parameters that are not updated"]
    for module in pair.modules:
        module.train()
    pair.train(3)
    return found + pair.differences()


@on_ranks(2, timeout_s=120)
def test_a_full_graph_is_not_split(rank):
    torch._dynamo.reset()
    pair = Pair(rank, functools.partial(compiled_model, fullgraph=True), split_compiled=True)
    with heard() as lines:
        pair.train(7)
    found = pair.differences()
    assert sum("compiled as a whole" in line for line in lines) == (rank.index == 0)
    inside = Pair(rank, Blocks)
    inside.ours.module.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give attach the compiled module"):
        inside.ours.module(torch.ones(2, 12))
    return found


def test_parts_hold_a_share_each():
    flat = Blocks()
    assert compiled_blocks.parts(flat) == [flat.places, flat.first, flat.tied, flat.last, *flat.blocks]
    deep = torch.nn.Sequential(Block(), torch.nn.Sequential(*(Block() for _ in range(4))), torch.nn.Tanh())
    assert compiled_blocks.parts(deep) == [deep[0], *deep[1]]
    assert compiled_blocks.parts(torch.nn.Linear(2, 2)) == []
