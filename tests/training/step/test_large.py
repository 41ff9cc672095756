"""One tensor of 100 MB: equal bit for bit, in its place, without copies of it."""

from pathlib import Path

import pytest

from training import optimizers
from training.models import TASKS
from training.needs import torch
from training.ours import Ours
from training.step.test_equality import Case, train_both

LARGE_BYTES = 5120 * 5120 * 4


def test_a_large_tensor_is_equal_bit_for_bit(ranks):
    for result in ranks.run(2, train_both, Case("large", "sgd fused", 2, "overlap"), 8, timeout_s=120):
        assert result["differences"] == []
        assert result["policies"][-1] == "forecast"
        assert result["stats"]["bytes"] > LARGE_BYTES
        assert result["stats"]["packed_bytes"] == 0
        assert result["stats"]["record_bytes"] < 0.01 * result["stats"]["gradient_buffer_bytes"]


def peak_growth(train):
    """By how many bytes the process's memory grows at most while this runs, what it still holds afterwards included."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = memory_bytes("VmRSS")
    train()
    return memory_bytes("VmHWM") - before


def memory_bytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def both_peaks(rank):
    task = TASKS["large"]
    Ours("plain", "sgd plain", rank.index).handle.detach()  # what is loaded once is not counted
    module = task.module(seed=0)
    theirs = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = optimizers.make("sgd plain", module).optimizer

    def train_theirs():
        for step in range(5):
            optimizer.zero_grad()
            task.loss(theirs, task.batch(rank.index, step)).backward()
            optimizer.step()

    their_growth = peak_growth(train_theirs)
    made = []

    def train_ours():
        made.append(Ours("large", "sgd plain", rank.index))
        made[0].train(range(5))
        made[0].handle.flush()

    our_growth = peak_growth(train_ours) - LARGE_BYTES  # the parameters themselves
    made[0].handle.detach()
    return their_growth, our_growth


@pytest.mark.slow
def test_memory_stays_that_of_ddp(ranks):
    """That of the leanest DDP, which keeps gradients in its buckets. A second copy of them would be 100 MB more; what
    the processes' allocators do differs by some 10 MB from run to run."""
    ranks.end()  # new processes: memory that earlier tests have left to the allocator would be used again, unseen
    for theirs, ours in ranks.run(2, both_peaks, timeout_s=120):
        assert theirs > LARGE_BYTES, "the measurement does not see the gradients"
        assert ours < theirs + LARGE_BYTES // 4
