"""The pool that runs the other tests: what goes wrong on a rank is told, and the next call is not disturbed."""

import os
import time

import pytest

from training.needs import torch
from training.pool import RankError


def add(rank, value):
    total = torch.tensor([rank.index + value])
    torch.distributed.all_reduce(total)
    return rank.index, int(total), rank.gather("values", value + rank.index)


def raises_on_one(rank):
    rank.gather("begun", None)  # a group whose other rank has ended cannot be made
    if rank.index == 1:
        raise ValueError("this one fails")
    return "fine"


def dies_on_one(rank):
    rank.gather("begun", None)
    if rank.index == 1:
        os._exit(9)
    return "fine"


def hangs_on_one(rank):
    rank.gather("begun", None)
    if rank.index == 1:
        time.sleep(100)
    return "fine"


def leaves_garbage(rank):
    """A DDP in a cycle, the last owner of the group, whose thread on rank 0 will be in Python for a while."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    ddp.cycle = [ddp]
    if rank.index == 1:
        rank.wait_for("callback")
    work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
    if rank.index == 0:
        work.get_future().add_done_callback(lambda _: time.sleep(0.3))
        rank.signal("callback")


def backends(rank):
    return torch.distributed.get_backend_config()


def check_it_works(ranks):
    assert ranks.run(3, add, 10) == [(rank, 33, [10, 11, 12]) for rank in range(3)]


def test_results_come_by_rank(ranks):
    check_it_works(ranks)
    assert [answer[1] for answer in ranks.run(2, add, 1)] == [3, 3]


def test_threads_of_a_group_end_without_the_gil(ranks):
    for _ in range(2):  # the process's first group may live on: a default argument of torch.distributed.nn's functions
        ranks.run(2, leaves_garbage, timeout_s=20)


@pytest.mark.parametrize(
    ("function", "sign"),
    [
        (raises_on_one, "ValueError: this one fails"),
        pytest.param(dies_on_one, "ended with code 9", marks=pytest.mark.slow),
        pytest.param(hangs_on_one, "in hangs_on_one", marks=pytest.mark.slow),
    ],
)
def test_a_failure_is_told_and_forgotten(ranks, function, sign):
    check_it_works(ranks)  # processes have started before the time counts
    with pytest.raises(RankError) as caught:
        ranks.run(2, function, timeout_s=5 if function is hangs_on_one else 30)
    assert sign in str(caught.value)
    assert "--- rank 0 done" in str(caught.value)
    check_it_works(ranks)
