"""gradcast on a module that DDP has wrapped: DDP's reduction is out, and everything else that DDP does stays."""

import pytest

from training import compare
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

VARIANTS = {
    "default": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "static_graph_and_views": {"static_graph": True, "gradient_as_bucket_view": True},
    "no_buffers": {"broadcast_buffers": False},
    "find_unused": {"find_unused_parameters": True},
    "small_buckets": {"bucket_cap_mb": 0.001},
}


@pytest.mark.parametrize("variant", VARIANTS)
@on_ranks(2)
def test_each_variant_of_ddp(rank, variant, mode):
    """And in evaluation mode DDP's forward still sends buffers, so that the ranks agree."""
    pair = Pair(rank, "convnet", "adamw plain", mode=mode, wrap=True, ddp_options=VARIANTS[variant])
    sends = variant != "no_buffers"
    found = []
    for number in range(9):
        pair.step()
        if number in (1, 4):
            values = []
            for side in pair.sides:
                side.module.eval()
                with torch.no_grad():
                    values.append(side.forward(side.task.batch(7, 0)[0]))
                side.module.train()
            found += compare.trees(values[1], values[0], "evaluation")
            answers = rank.gather(f"evaluation{number}", values[1].tolist())
            assert (answers[0] == answers[1]) == sends
    return found + pair.end()
