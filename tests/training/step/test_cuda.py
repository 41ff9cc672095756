"""Gradients on a CUDA device, two ranks on the same one over Gloo: DDP's numbers, in both modes.

Without one these tests are skipped.
"""

import os
import time

import pytest

import gradcast
from gradcast.training.compat import extension
from training import compare
from training.attached import attach
from training.bomb import Bomb
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn
dist = torch.distributed
STEPS = 12

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("task", TASKS)
@on_ranks(2)
def test_equal_to_ddp(rank, task, mode):
    # The same sums in the same order for both.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    task = TASKS[task]
    theirs = nn.parallel.DistributedDataParallel(task.module(seed=rank.index).to("cuda"), device_ids=[0])
    ours = task.module(seed=rank.index).to("cuda")
    sgds = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (theirs, ours)]
    handle = attach(ours, sgds[1], mode)
    for number in range(STEPS):
        batch = [each.to("cuda") for each in task.batch(rank.index, number)]
        for module, sgd in zip((theirs, ours), sgds, strict=True):
            sgd.zero_grad()
            task.loss(module, batch).backward()
            sgd.step()
    handle.flush()
    assert handle.stats()["policy"] == "forecast"
    handle.detach()
    return compare.modules(ours, theirs.module)


@on_ranks(2)
def test_the_comm_hook_gives_ddps_gradients(rank):
    """DDP with torch's average and with gradcast's hook, backward on a stream of its own."""
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("cuda") for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    theirs, ours = (nn.parallel.DistributedDataParallel(module, device_ids=[0]) for module in modules)
    ours.register_comm_hook(gradcast.HookState(block_bytes=4096), gradcast.comm_hook)
    torch.manual_seed(rank.index)
    batch = torch.randn(16, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for ddp in (theirs, ours):
            ddp(batch).square().mean().backward()
        return compare.trees(*([p.grad for p in ddp.parameters()] for ddp in (ours, theirs)), "gradients")


@on_ranks(1)
def test_who_waits_for_the_comm_hook_waits_for_nccl(rank):
    """What a stream reads that waits for the hook's future, while the stream of the gradients is busy."""
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # makes the communicator
    ddp = nn.parallel.DistributedDataParallel(
        nn.Linear(64, 64, bias=False).to("cuda"), device_ids=[0], process_group=group
    )
    reader = torch.cuda.Stream()
    seen = []

    def hook(_, bucket):
        torch.cuda._sleep(300_000_000)
        bucket.buffer().fill_(2)  # backward has made ones
        future = extension.load().average_bucket(group, bucket, 4096)
        with torch.cuda.stream(reader):
            future.wait()
            seen.append(bucket.buffer().clone())
        return future

    ddp.register_comm_hook(None, hook)
    ddp(torch.ones(1, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    assert len(seen) == 1
    assert seen[0].min().item() == 2


@on_ranks(2)
def test_clipping_gives_torchs_norm_within_rounding(rank):
    """The kernel that takes the norms as gradients arrive adds in another order at other places."""
    norms = []
    for own in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300)).to("cuda")
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        handle = attach(module, sgd, clip=gradcast.Clip(norm=0.5 if own else None))
        for number in range(STEPS):
            torch.manual_seed(number)
            sgd.zero_grad()
            module(torch.randn(8, 300, device="cuda")).square().mean().backward()
            if not own:
                handle.flush()
                norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            sgd.step()
        handle.flush()
        norms.append(handle.stats()["grad_norm"] if own else norm.item())
        handle.detach()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@on_ranks(2)
def test_gradients_that_the_program_keeps_stay_as_they_were(rank, mode):
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("cuda") for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    ours, theirs = modules[0], nn.parallel.DistributedDataParallel(modules[1], device_ids=[0])
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (ours, theirs)]
    handle = attach(ours, sgds[0], mode)
    kept = [[], []]
    for number in range(STEPS):
        torch.manual_seed(number + 100 * rank.index)
        batch = torch.randn(8, 64, device="cuda")
        for module, sgd, gradients in zip((ours, theirs), sgds, kept, strict=True):
            sgd.zero_grad()
            module(batch).square().mean().backward()
            gradients += [p.grad if module is ours else p.grad.clone() for p in module.parameters()]
            sgd.step()
    handle.flush()
    handle.detach()
    return compare.trees(*kept, "gradients") + compare.modules(ours, theirs.module)


@on_ranks(2)
def test_a_step_after_a_failure_waits_for_nothing_that_never_comes(rank):
    """As a loop that logs the error and goes on. The gradients' hooks have run on a thread of autograd's."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("cuda")
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(module, sgd)
    batch = torch.ones(4, 8, device="cuda")
    for _ in range(6):
        sgd.zero_grad()
        module(batch).square().sum().backward()
        sgd.step()
    handle.flush()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    module[0].register_forward_hook(lambda *call: Bomb.apply(call[2]))
    sgd.zero_grad()
    with pytest.raises(RuntimeError, match="own error in backward"):
        module(batch).square().sum().backward()
    sgd.step()
    handle.flush()
    changed = {name for name, each in module.named_parameters() if not torch.equal(each, before[name])}
    return changed ^ {"1.weight", "1.bias"}


class LateGradient(torch.autograd.Function):
    """The device is busy for some tenths of a second before it has the gradient; the host goes on at once."""

    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        torch.cuda._sleep(300_000_000)
        return gradient


@on_ranks(2)
def test_a_block_is_launched_when_the_device_has_its_gradients(rank):
    module = nn.Linear(8, 8).to("cuda")
    handle = attach(module, None, "hook")
    for _ in range(5):
        value = LateGradient.apply(module(torch.ones(4, 8, device="cuda"))).sum()
        torch.cuda.synchronize()
        begin_us = time.perf_counter_ns() / 1e3
        value.backward()
        handle.flush()
        torch.cuda.synchronize()
        step_us = time.perf_counter_ns() / 1e3 - begin_us
        blocks = [event for event in handle.timeline()["traceEvents"] if event.get("cat") == "block"]
        launches_us = [each["ts"] - begin_us for each in blocks if each["ts"] >= begin_us]
        assert launches_us
        assert min(launches_us) > 0.5 * step_us, "while the device was busy nothing was on the network"
    handle.detach()


@on_ranks(2)
def test_a_graph_that_would_leave_the_traffic_out_is_refused(rank):
    module = nn.Linear(8, 8).to("cuda")
    handle = gradcast.attach(module, torch.optim.SGD(module.parameters(), lr=0.1))
    batch = torch.ones(4, 8, device="cuda")
    module(batch).sum().backward()
    handle.flush()  # a capture would refuse the questions that other threads ask the device meanwhile
    with pytest.raises(gradcast.Error, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(batch).sum().backward()
