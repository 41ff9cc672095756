"""Gradients on a CUDA device, two ranks on the same one over Gloo: DDP's numbers, in both modes.

NOT YET RUN ON A GPU. Without one these tests are skipped.
"""

import os
import time

import pytest

import gradcast
from training import compare
from training.models import TASKS
from training.needs import torch

nn = torch.nn
STEPS = 12

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


def on_device(value):
    if torch.is_tensor(value):
        return value.to("cuda")
    if isinstance(value, dict):
        return {key: on_device(each) for key, each in value.items()}
    return type(value)(on_device(each) for each in value) if isinstance(value, list | tuple) else value


def train(rank, task_name, mode):
    # The same sums in the same order for both.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    task = TASKS[task_name]
    theirs = nn.parallel.DistributedDataParallel(task.module(seed=rank.index).to("cuda"), device_ids=[0])
    ours = task.module(seed=rank.index).to("cuda")
    sgds = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (theirs, ours)]
    options = gradcast.Options(adapt=False, warmup_steps=3)
    handle = gradcast.attach(ours, sgds[1] if mode == "overlap" else None, options=options)
    for number in range(STEPS):
        batch = on_device(task.batch(rank.index, number))
        for module, sgd in zip((theirs, ours), sgds, strict=True):
            sgd.zero_grad()
            task.loss(module, batch).backward()
            sgd.step()
    handle.flush()
    stats = handle.stats()
    handle.detach()
    return compare.modules(ours, theirs.module), stats["policy"]


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("task", TASKS)
def test_equal_to_ddp(ranks, task, mode):
    for found, policy in ranks.run(2, train, task, mode):
        assert found == []
        assert policy == "forecast"


class LateGradient(torch.autograd.Function):
    """The device is busy for some tenths of a second before it has the gradient; the host goes on at once."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        torch.cuda._sleep(300_000_000)
        return gradient


def train_late(rank):
    module = nn.Linear(8, 8).to("cuda")
    handle = gradcast.attach(module, options=gradcast.Options(adapt=False, warmup_steps=3))
    times = []
    for _ in range(5):
        value = LateGradient.apply(module(torch.ones(4, 8, device="cuda"))).sum()
        torch.cuda.synchronize()
        begin_us = time.perf_counter_ns() / 1e3
        value.backward()
        handle.flush()
        torch.cuda.synchronize()
        end_us = time.perf_counter_ns() / 1e3
        blocks = [event for event in handle.timeline()["traceEvents"] if event.get("cat") == "block"]
        times.append([(each["ts"] - begin_us, end_us - begin_us) for each in blocks if each["ts"] >= begin_us])
    handle.detach()
    return times


def test_a_block_is_launched_when_the_device_has_its_gradients(ranks):
    for times in ranks.run(2, train_late):
        for step in times:
            assert step
            for launch_us, step_us in step:
                assert launch_us > 0.5 * step_us, "while the device was busy nothing was on the network"


def capture(rank):
    module = nn.Linear(8, 8).to("cuda")
    gradcast.attach(module, torch.optim.SGD(module.parameters(), lr=0.1))
    batch = torch.ones(4, 8, device="cuda")
    module(batch).sum().backward()
    with pytest.raises(gradcast.Error, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(batch).sum().backward()
    return True


def test_a_graph_that_would_leave_the_traffic_out_is_refused(ranks):
    assert all(ranks.run(2, capture))
