"""A model that is compiled as a whole or in parts, with DDP's result bit for bit."""

import pytest

from training.attached import heard
from training.needs import torch
from training.pool import on_ranks
from training.twins import Twins


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
    twins = Twins(rank, mode=mode, policy="fifo")
    for module in twins.modules:
        if what == "functions":
            module[2].forward = torch.compile(module[2].forward, backend="aot_eager")
        elif what == "wrapped":
            module[2] = torch.compile(module[2], backend="aot_eager")
        else:
            for part in [module] if what == "module" else [module[0], module[4]]:
                part.compile(backend="aot_eager")
    with heard() as lines:
        twins.train(7)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        twins.train(5)
    warnings = sum("compiled as a whole" in line for line in lines)
    assert warnings == ((what, mode, rank.index) == ("module", "overlap", 0))
    assert what == "functions" or torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    return twins.differences()
