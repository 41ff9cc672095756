"""Stages of torch.distributed.pipelining, two replicas of each: the bits of DDP around the stage's module, and of one
process where DDP is wrong."""

import functools
import os
import socket
import struct
from pathlib import Path
from unittest import mock

import pytest

from training import compare
from training.attached import attach
from training.inside import session_of
from training.needs import torch
from training.pipelines import (
    LOOPS,
    SCHEDULES,
    SEVERAL,
    STEPS,
    LatePart,
    Part,
    Pipeline,
    data_of,
    init_device_mesh,
    pipelining,
    trained,
)
from training.pool import on_ranks

nn = torch.nn
FAST = ("clipping", "skipping", "keeping", "evaluating", "other counts")
SLOW = pytest.mark.slow
CASES = [
    *(pytest.param(each, "plain", 4, id=each) for each in SCHEDULES),
    pytest.param("Schedule1F1B", "plain", 3, id="three micro-batches"),
    pytest.param("ScheduleGPipe", "plain", 1, id="one micro-batch"),
    *(
        pytest.param("Schedule1F1B", each, 4, id=each, marks=() if each in FAST else SLOW)
        for each in LOOPS
        if each != "plain"
    ),
    *(pytest.param(SEVERAL[1], each, 4, id=f"interleaved, {each}", marks=SLOW) for each in LOOPS if each != "plain"),
]


@pytest.mark.parametrize(("schedule", "loop", "micro_batches"), CASES)
@on_ranks(4)
def test_a_stage_trains_as_with_ddp(rank, schedule, loop, micro_batches, mode):
    ours = trained(rank, mode, schedule, loop, micro_batches)
    return compare.trees(ours, trained(rank, None, schedule, loop, micro_batches))


SHARDED = [
    pytest.param("Schedule1F1B", "plain", id="1F1B"),
    pytest.param(SEVERAL[1], "plain", id="interleaved"),
    pytest.param("Schedule1F1B", "adding up", id="adding up"),
    pytest.param(SEVERAL[1], "other counts", id="other counts"),
    *(pytest.param("Schedule1F1B", each, id=each, marks=SLOW) for each in ("zeroing", "evaluating", "summing")),
    *(pytest.param(each, "plain", id=each, marks=SLOW) for each in ("ScheduleGPipe", SEVERAL[0], SEVERAL[2])),
]


@pytest.mark.parametrize(("schedule", "loop"), SHARDED)
@on_ranks(4)
def test_a_stage_of_replicate_trains_as_natively(rank, schedule, loop, mode):
    ours = trained(rank, mode, schedule, loop, 4, shard="replicate")
    return compare.trees(ours, trained(rank, None, schedule, loop, 4, shard="replicate"))


@pytest.mark.parametrize("micro_batches", [4, 2])
@pytest.mark.parametrize("schedule", ["Schedule1F1B", pytest.param(SEVERAL[2], marks=SLOW)])
@on_ranks(4)
def test_replicate_adds_up_schedules_in_no_sync(rank, schedule, micro_batches, mode):
    """The gradients of all schedules but the last are divided twice, as those that are in .grad are natively, where
    each schedule is all-reduced. ``micro_batches``: of the first schedule."""
    found = []
    for each in (mode, None):
        pipeline = Pipeline(rank, each, schedule, shard="replicate", dtype=torch.float64)
        for number in range(3):
            pipeline.optimizer.zero_grad()
            pipeline.prepare(micro_batches)
            pipeline.run_without_sync(number)
            pipeline.prepare(4)
            pipeline.run(number + 50)
            pipeline.optimizer.step()
        found.append(pipeline.result()["gradients"])
        if pipeline.handle is not None:
            pipeline.handle.detach()
    pairs = [(ours, native) for ours, native in zip(*found, strict=True) if ours is not native]  # not both None
    worst = max(float((ours - native).abs().max()) for ours, native in pairs)
    return [] if worst < 1e-9 else [f"differs by {worst}"]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "loop"), SHARDED)
@on_ranks(8)
def test_a_stage_of_hsdp_trains_as_natively(rank, schedule, loop):
    ours = trained(rank, "overlap", schedule, loop, 4, shard="fully_shard")
    return compare.trees(ours, trained(rank, None, schedule, loop, 4, shard="fully_shard"))


@on_ranks(4)
def test_disabled_a_sharded_stage_is_left_to_fsdp(rank, mode):
    with mock.patch.dict(os.environ, GRADCAST_DISABLE="1"):
        ours = trained(rank, mode, "Schedule1F1B", "plain", 2, shard="replicate")
    return compare.trees(ours, trained(rank, None, "Schedule1F1B", "plain", 2, shard="replicate"))


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", SEVERAL[1]])
@on_ranks(4)
def test_ddp_around_the_module_of_a_stage_is_idle_until_detach(rank, schedule, mode):
    ours = trained(rank, mode, schedule, "detaching", 4, wraps=True)
    return compare.trees(ours, trained(rank, None, schedule, "detaching", 4))


@pytest.mark.parametrize(
    ("schedule", "part", "keeps"),
    [
        (SEVERAL[2], Part, False),
        (SEVERAL[1], LatePart, False),
        pytest.param(SEVERAL[2], LatePart, True, marks=SLOW),
        pytest.param(SEVERAL[2], Part, True, marks=SLOW),
        pytest.param(SEVERAL[1], Part, True, marks=SLOW),
    ],
)
@on_ranks(4)
def test_a_stage_trains_as_in_one_process(rank, schedule, part, keeps, mode):
    """With a zero bubble, or a ``dw_builder``, DDP leaves replicas different (pytorch #144530)."""
    pipeline = Pipeline(rank, mode, schedule, dtype=torch.float64, part=part)
    model = nn.Sequential(*map(Part, range(4))).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(STEPS):
        for each in () if keeps else (pipeline.optimizer, optimizer):
            each.zero_grad()
        pipeline.run(number)
        pipeline.optimizer.step()
        for x, target in data_of(number, torch.float64)[:, :2, : pipeline.rows].transpose(0, 1):
            for count, (rows, goal) in enumerate(zip(x.chunk(4), target.chunk(4), strict=True)):
                for each in model:
                    each.uses_spare = count == 0
                (nn.functional.mse_loss(model(rows), goal) / 2).backward()
        for each in (each for each in model.parameters() if each.grad is not None):
            each.grad.div_(4)
        optimizer.step()
    pipeline.handle.flush()
    wanted = [each for index in pipeline.indices for each in model[index].parameters()]
    worst = max(float((a - b).abs().max()) for a, b in zip(pipeline.params, wanted, strict=True))
    pipeline.handle.detach()
    return [] if worst < 1e-12 else [f"differs by {worst}"]


@on_ranks(4)
def test_a_step_sends_each_gradient_once_and_waits_for_none(rank, mode):
    """Whatever the number of micro-batches. The slow replica's traffic ends long after the other one's step()."""
    wrong = []
    pipeline = Pipeline(rank, mode, SEVERAL[1], micro_batches=4)
    for number in range(STEPS):
        pipeline.step(number)
    pipeline.handle.flush()
    blocks = [each for each in pipeline.handle.timeline()["traceEvents"] if each.get("cat") == "block"]
    sent = sum(each["args"]["bytes"] for each in blocks if each["args"]["step"] == STEPS - 1)
    gradients = sum(each.numel() * each.element_size() for each in pipeline.params)
    if not gradients <= sent < 2 * gradients:  # with the step message
        wrong.append(f"{sent} bytes are sent of {gradients}")
    if pipeline.handle.stats()["step"] != STEPS:
        wrong.append(f"{pipeline.handle.stats()['steps']} steps")
    wrong += [str(each) for each in pipeline.handle.stats()["waits"] if "flush" not in each["what"]]
    before = [None if each.grad is None else each.grad.clone() for each in pipeline.params]
    pipeline.run(STEPS, "eval")
    pipeline.handle.flush()
    if len(blocks) != sum(each.get("cat") == "block" for each in pipeline.handle.timeline()["traceEvents"]):
        wrong.append("evaluation sends gradients")
    return wrong + compare.trees([each.grad for each in pipeline.params], before)


def acknowledged_bytes():
    """By socket: what this process has sent by TCP and its peer has received, as the kernel counts it."""
    found = {}
    for file in Path("/proc/self/fd").iterdir():
        if not file.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(file.name))) as each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                # tcpi_bytes_acked of struct tcp_info (linux/tcp.h)
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found[file.stat().st_ino] = struct.unpack_from("Q", info, 120)[0]
    return found


@pytest.mark.parametrize(("schedule", "micro_batches"), [("ScheduleGPipe", 1), ("Schedule1F1B", 4), (SEVERAL[1], 8)])
@on_ranks(4)
def test_the_kernel_counts_the_bytes_of_ddp(rank, schedule, micro_batches, mode):
    """The gradients are large, so that all else hardly counts."""
    sent = []
    for each in (mode, None):
        pipeline = Pipeline(
            rank, each, schedule, micro_batches=micro_batches, part=functools.partial(Part, hidden=40_000)
        )
        pipeline.step(0)
        before = acknowledged_bytes()
        for number in range(4):
            pipeline.step(number)
        if pipeline.handle is not None:
            pipeline.handle.flush()
        torch.distributed.barrier()
        sent.append(sum(count - before.get(each, 0) for each, count in acknowledged_bytes().items()))
        if pipeline.handle is not None:
            pipeline.handle.detach()
    gradients = 4 * sum(4 * each.numel() for each in pipeline.params)
    wrong = [] if sent[0] < 1.01 * sent[1] else [f"{sent[0]} bytes are sent, {sent[1]} by DDP"]
    return wrong + ([] if sent[1] > 0.9 * gradients else [f"DDP sends {sent[1]} bytes of {gradients}"])


@pytest.mark.parametrize("schedule", SEVERAL[1:])
@on_ranks(4)
def test_a_gradient_that_the_program_holds_becomes_the_mean(rank, schedule, mode):
    pipeline = Pipeline(rank, mode, schedule)
    for number in range(3):
        pipeline.optimizer.zero_grad()
        with pipeline.handle.no_sync():
            pipeline.run(2 * number)
        held = [each.grad for each in pipeline.params]
        pipeline.run(2 * number + 1)
        others = [index for index, each in enumerate(pipeline.params) if each.grad is not held[index]]
        if others:
            return [f"in step {number} .grad of {others} is another tensor"]
        pipeline.optimizer.step()
    pipeline.handle.detach()
    return []


@on_ranks(4)
def test_step_does_not_wait_for_a_slow_replica(rank):
    pipeline = Pipeline(rank, "overlap", "ScheduleGPipe", micro_batches=1)
    for number in range(4):
        pipeline.step(number)
    pipeline.handle.flush()
    if pipeline.position == 0 and pipeline.replica == 1:
        pipeline.modules[0].delay_s = 0.5
    pipeline.step(4)
    is_pending = bool(session_of(pipeline.handle).pending_names())
    pipeline.handle.flush()
    return [] if is_pending or pipeline.position == 1 else ["step() has waited"]


@on_ranks(8)
def test_tensor_parallel_stages(rank, mode):
    """Two stages of two parts, two replicas, against one process."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stages", "replicas", "parts"))
    position, replica, _ = mesh.get_coordinate()
    part = Part(position).double()
    parallelize_module(part, mesh["parts"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    adam = torch.optim.AdamW(part.parameters(), lr=0.01)
    stage = pipelining.PipelineStage(part, position, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    handle = attach(stage, adam, mode, mesh.get_group("replicas"), policy="fifo")
    steps = pipelining.Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    model = nn.Sequential(Part(0), Part(1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(STEPS):
        x, target = data_of(number, torch.float64)[:, :2]
        part.uses_spare = False
        adam.zero_grad()
        steps.step(*([x[replica]] if position == 0 else []), **({"target": target[replica]} if position else {}))
        adam.step()
        for each in model:
            each.uses_spare = False
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.flatten(0, 1)), target.flatten(0, 1)).backward()
        optimizer.step()
    handle.flush()
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in part.parameters()]
    worst = max(float((a - b).abs().max()) for a, b in zip(whole, model[position].parameters(), strict=True))
    handle.detach()
    return [] if worst < 1e-12 else [f"differs by {worst}"]
