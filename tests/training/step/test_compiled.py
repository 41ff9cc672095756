"""A model that is compiled as a whole or in parts, with DDP's result bit for bit."""

import pytest

from training.attached import heard
from training.needs import torch
from training.twins import Twins


def compiled(rank, what, mode):
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
    return twins.differences(), torch._dynamo.utils.counters["stats"]["unique_graphs"] - before, warnings


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
def test_compiled_modules(ranks, what, mode):
    """In the course of training nothing is compiled again: compiled code never sees a pending parameter. That a whole
    model keeps forward waiting is said once."""
    results = ranks.run(2, compiled, what, mode, timeout_s=120)
    for number, (found, compilations, warnings) in enumerate(results):
        assert found == []
        assert what == "functions" or compilations == 0
        assert warnings == ((what, mode, number) == ("module", "overlap", 0))
