"""What is predicted of torch's PowerSGD hook: the sizes of its all-reduces are those that it makes."""

from unittest import mock

import pytest

from gradcast.comparison import powersgd
from training.attached import Attached
from training.needs import torch
from training.pool import on_ranks

hook = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
nn = torch.nn


@pytest.mark.parametrize(
    ("shape", "rank", "elements"),
    [
        ((40, 60), 4, (0, 160, 240)),
        ((40, 60), 12, (2400, 0, 0)),  # 1,200 elements save no more than half
        ((40, 5, 3, 4), 4, (0, 160, 240)),
        ((40,), 1, (40, 0, 0)),
        ((), 1, (1, 0, 0)),
        ((2, 1000), 4, (2000, 0, 0)),  # of rank 2
        ((0, 7), 1, (0, 0, 0)),
    ],
)
def test_what_a_gradient_sends(shape, rank, elements):
    assert powersgd.sent_elements(shape, rank) == elements


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 5), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 3))


@on_ranks(2)
def test_the_bytes_that_the_hook_sends(rank):
    images = torch.randn(4, 1, 8, 8)
    attached = Attached(model(), "hook")
    for _ in range(5):
        attached.step(images)
    predicted = powersgd.sent_bytes(attached.handle.profile, 3)
    state = hook.PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)
    ddp = nn.parallel.DistributedDataParallel(model())
    ddp.register_comm_hook(state, hook.powerSGD_hook)
    for step in range(4):
        with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as called:
            ddp(images).sum().backward()
        if step >= 2:
            sent = [each.args[0].numel() * each.args[0].element_size() for each in called.call_args_list]
            if sent != predicted:
                return f"sent {sent}, predicted {predicted}"
    return None
