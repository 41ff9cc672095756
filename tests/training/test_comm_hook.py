"""The pair for frameworks, ddp.register_comm_hook(gradcast.HookState(), gradcast.comm_hook), gives DDP's numbers."""

import pytest

import gradcast
from training import compare
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks


def train_hooked(rank, task, optimizer, ddp_options, block_bytes):
    pair = Pair(rank, task, optimizer, mode="ddp", ddp_options=ddp_options)
    pair.ours.forward.register_comm_hook(gradcast.HookState(block_bytes=block_bytes), gradcast.comm_hook)
    for number, side in pair.rounds(10):
        side.optimizer.zero_grad()
        if number % 3 == 2:
            with side.no_sync():
                side.task.loss(side.forward, side.batch(100 + number)).backward()
        side.loss().backward()
        side.optimizer.step()
    assert len(set(rank.gather("digest", compare.digest(pair.ours.module)))) == 1
    if rank.size > 2:  # stock DDP with other buckets differs from stock DDP by up to 2.4e-7 here
        return compare.apart(*(module.state_dict() for module in reversed(pair.modules)), 2e-6)
    return pair.differences()


@pytest.mark.parametrize(
    ("world_size", "task", "optimizer", "ddp_options", "block_bytes"),
    [
        (2, "convnet", "adam plain", {}, 1000),
        (2, "transformer", "sgd foreach", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, 8 << 20),
        (2, "mixed64", "adamw fused", {"static_graph": True}, 300),
        (3, "transformer", "sgd foreach", {}, 1000),
    ],
)
def test_it_gives_ddps_numbers(ranks, world_size, task, optimizer, ddp_options, block_bytes):
    """With two ranks bit for bit, with more within rounding."""
    assert not any(ranks.run(world_size, train_hooked, task, optimizer, ddp_options, block_bytes))


@on_ranks(2)
def test_a_hook_without_its_state_says_so(rank):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp.register_comm_hook(None, gradcast.comm_hook)
    with pytest.raises((gradcast.Error, RuntimeError), match="HookState"):
        ddp(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("block_bytes", [0, -1, 1.5, "big"])
def test_a_wrong_block_size_is_refused(block_bytes):
    with pytest.raises(gradcast.Error, match="block_bytes"):
        gradcast.HookState(block_bytes=block_bytes)
