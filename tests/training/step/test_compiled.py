"""A model that is compiled as a whole or in parts, with DDP's result bit for bit."""

import logging

import pytest

from training.models import TASKS
from training.needs import torch
from training.pair import Pair


def compiled(rank, what, mode):
    torch._dynamo.reset()
    pair = Pair(rank, TASKS["plain"].make, mode)
    for module in (pair.theirs, pair.ours):
        if what == "functions":
            module[2].forward = torch.compile(module[2].forward, backend="aot_eager")
        elif what == "wrapped":
            module[2] = torch.compile(module[2], backend="aot_eager")
        else:
            for part in [module] if what == "module" else [module[0], module[4]]:
                part.compile(backend="aot_eager")
    pair.train(7)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pair.train(5)
    return pair.differences(), torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


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
    """In the course of training nothing is compiled again: compiled code never sees a pending parameter."""
    for found, compilations in ranks.run(2, compiled, what, mode, timeout_s=120):
        assert found == []
        assert what == "functions" or compilations == 0


def warnings_of_compiling(rank, what):
    said = []
    logger = logging.getLogger("gradcast")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        assert compiled(rank, what, "overlap")[0] == []
    finally:
        logger.removeHandler(handler)
    return [line for line in said if "compiled as a whole" in line]


@pytest.mark.parametrize(("what", "lines"), [("module", 1), pytest.param("layers", 0, marks=pytest.mark.slow)])
def test_that_a_whole_model_keeps_forward_waiting_is_said_once(ranks, what, lines):
    first, second = ranks.run(2, warnings_of_compiling, what, timeout_s=120)
    assert (len(first), len(second)) == (lines, 0)
