"""gradcast on a module that DDP has wrapped: DDP's reduction is out, and everything else that DDP does stays."""

import pytest

from training import compare
from training.needs import torch
from training.twins import Twins

VARIANTS = {
    "default": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "static_graph_and_views": {"static_graph": True, "gradient_as_bucket_view": True},
    "no_buffers": {"broadcast_buffers": False},
    "find_unused": {"find_unused_parameters": True},
    "small_buckets": {"bucket_cap_mb": 0.001},
}


def train_wrapped(rank, variant, mode):
    twins = Twins(rank, "convnet", "adamw plain", mode=mode, wrap=True, ddp_options=VARIANTS[variant])
    if variant == "no_buffers":
        # The twin is to do the same: buffers are each rank's own.
        twins.theirs.broadcast_buffers = False
    found = []
    for number in range(9):
        twins.step()
        if number in (1, 4):
            found += evaluation(twins)
    return found + twins.end()


def evaluated(twins, bare=False):
    """What DDP's side and ours give in evaluation mode. ``bare``: without DDP's forward."""
    values = []
    for module, _, forward in twins.each():
        module.eval()
        with torch.no_grad():
            values.append((module if bare else forward)(twins.task.batch(7, 0)[0]))
        module.train()
    return values


def evaluation(twins):
    """In evaluation mode DDP's forward still sends buffers, so that the ranks agree."""
    values = evaluated(twins)
    answers = twins.rank.gather(f"eval{twins.steps}", values[1].tolist())
    found = compare.trees(values[1], values[0], "evaluation")
    if (answers[0] == answers[1]) != twins.theirs.broadcast_buffers:
        found.append(f"step {twins.steps}: the ranks' evaluations are equal and should differ, or the other way round")
    return found


@pytest.mark.parametrize("mode", ["hook", "overlap"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_of_ddp(ranks, variant, mode):
    for found in ranks.run(2, train_wrapped, variant, mode):
        assert found == []


def bare_evaluation(rank):
    twins = Twins(rank, "convnet", "sgd plain")
    found = []
    for number in range(6):
        twins.step()
        if rank.index == 0 and number in (1, 4):
            found += compare.trees(*reversed(evaluated(twins, bare=True)), "evaluation")
    return found + twins.end()


def test_rank_0_alone_can_evaluate_a_bare_module(ranks):
    """As with the module inside of DDP: evaluation is no collective, and rank 0's buffers are everybody's."""
    for found in ranks.run(2, bare_evaluation):
        assert found == []


def evaluation_mode(rank, mode):
    twins = Twins(rank, "transformer", "adam plain", mode=mode, wrap=True)
    for _ in range(3):
        twins.step()
    twins.theirs.eval()
    twins.ours.module.eval()
    for _ in range(2):
        twins.step()
    twins.theirs.train()
    twins.ours.module.train()
    for _ in range(2):
        twins.step()
    return twins.end()


@pytest.mark.parametrize("mode", ["hook", "overlap"])
def test_training_in_evaluation_mode(ranks, mode):
    """Frozen batch norm: the module is in evaluation mode while gradients flow."""
    for found in ranks.run(2, evaluation_mode, mode):
        assert found == []
