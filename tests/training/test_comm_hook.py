"""The pair for frameworks, ddp.register_comm_hook(gradcast.HookState(), gradcast.comm_hook), gives DDP's numbers."""

import pytest

import gradcast
from training import compare, optimizers
from training.models import TASKS
from training.needs import torch


def train_hooked(rank, task_name, optimizer, ddp_options, block_bytes):
    task, sides = TASKS[task_name], []
    for hooked in (False, True):
        ddp = torch.nn.parallel.DistributedDataParallel(task.module(seed=rank.index), **ddp_options)
        if hooked:
            ddp.register_comm_hook(gradcast.HookState(block_bytes=block_bytes), gradcast.comm_hook)
        sides.append((ddp, optimizers.make(optimizer, ddp.module)))
    for number in range(10):
        for ddp, recipe in sides:
            recipe.optimizer.zero_grad()
            if number % 3 == 2:
                with ddp.no_sync():
                    task.loss(ddp, task.batch(rank.index, 100 + number)).backward()
            task.loss(ddp, task.batch(rank.index, number)).backward()
            recipe.optimizer.step()
            recipe.after_step()
    (theirs, their_recipe), (ours, recipe) = sides
    found = compare.modules(ours, theirs) + compare.optimizers(recipe.optimizer, their_recipe.optimizer)
    digests = rank.gather("digest", compare.digest(ours))
    return found, compare.largest(ours, theirs), len(set(digests))


@pytest.mark.parametrize(
    ("task", "optimizer", "ddp_options", "block_bytes"),
    [
        ("convnet", "adam plain", {}, 1000),
        ("transformer", "sgd foreach", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01}, 8 << 20),
        ("mixed64", "adamw fused", {"static_graph": True}, 300),
    ],
)
def test_two_ranks_bit_for_bit(ranks, task, optimizer, ddp_options, block_bytes):
    for found, _, count in ranks.run(2, train_hooked, task, optimizer, ddp_options, block_bytes):
        assert found == []
        assert count == 1


def test_three_ranks_within_rounding(ranks):
    """Stock DDP with other buckets differs from stock DDP by up to 2.4e-7 here."""
    for _, largest, count in ranks.run(3, train_hooked, "transformer", "sgd foreach", {}, 1000):
        assert largest < 2e-6
        assert count == 1


def wrong_state(rank):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    ddp.register_comm_hook(None, gradcast.comm_hook)
    with pytest.raises((gradcast.Error, RuntimeError)) as caught:
        ddp(torch.ones(1, 3)).sum().backward()
    return str(caught.value)


def test_a_hook_without_its_state_says_so(ranks):
    for message in ranks.run(2, wrong_state):
        assert "HookState" in message


@pytest.mark.parametrize("block_bytes", [0, -1, 1.5, "big"])
def test_a_wrong_block_size_is_refused(block_bytes):
    with pytest.raises(gradcast.Error, match="block_bytes"):
        gradcast.HookState(block_bytes=block_bytes)
