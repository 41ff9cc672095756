"""Stages of torch.distributed.pipelining, two replicas of each: the bits of DDP around the stage's module, and of one
process where DDP is wrong."""

import contextlib
import copy
import functools
import os
import socket
import struct
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest

import gradcast
from gradcast.training.compat.sharding import local_of
from training import compare
from training.attached import attach, error_of, not_refused
from training.inside import session_of
from training.needs import torch
from training.pair import DDP, net
from training.pool import on_ranks

pytest.importorskip("torch.distributed.pipelining")
from torch.distributed import pipelining
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

nn = torch.nn
WIDTH, ROWS, BATCH, STEPS = 8, 3, 24, 7  # ROWS: of a micro-batch
SEVERAL = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")  # stages per rank
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", *SEVERAL[:2])  # those that DDP is right with


class Part(nn.Module):
    """The module of stage ``number``. The first micro-batch of a step alone uses ``spare``."""

    def __init__(self, number, hidden=2 * WIDTH):
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.spare = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(2))
        self.delay_s, self.uses_spare = 0.0, True

    def forward(self, x):
        y = x + self.down(torch.tanh(self.raised(x)))
        if self.delay_s and y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.delay_s))
        if self.uses_spare and torch.is_grad_enabled():
            self.uses_spare = False
            return y * self.spare
        return y

    def raised(self, x):
        return self.up(x)


class _WithoutWeight(torch.autograd.Function):
    """A linear layer that leaves the weight's gradient to ``late``."""

    @staticmethod
    def forward(ctx, x, weight, late):
        ctx.save_for_backward(x, weight)
        ctx.late = late
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.late.append(gradient.T @ x)
        return gradient @ weight, None, None


class LatePart(Part):
    """Makes the gradient of one weight where the schedule asks for it (``dw_builder``)."""

    def __init__(self, number, hidden=2 * WIDTH):
        super().__init__(number, hidden)
        self.late = []

    def raised(self, x):
        return _WithoutWeight.apply(x, self.up.weight, self.late) + self.up.bias

    def dw_builder(self):
        made = self.late.pop()

        def add():
            weight = self.up.weight
            weight.grad = made if weight.grad is None else weight.grad.add_(made)

        return add


def data_of(number, dtype):
    """Inputs and targets, by replica."""
    return torch.randn(2, 4, BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


class Pipeline:
    """Two ranks with stages, two replicas. ``mode``: None for DDP."""

    def __init__(
        self,
        rank,
        mode,
        schedule="Schedule1F1B",
        *,
        micro_batches=4,
        dtype=torch.float32,
        wraps=False,
        shard=None,
        part=Part,
        **options,
    ):
        """``wraps``: DDP is around the modules of an attached pipeline, too. ``shard``: how FSDP shards them."""
        self.rank, self.schedule = rank, schedule
        shape = (2, rank.size // 2) if shard != "fully_shard" else (2, 2, rank.size // 4)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("stages", "replicas", "shards")[: len(shape)])
        self.position, self.replica = divmod(rank.index, rank.size // 2)
        self.own, replicas = mesh.get_group("stages"), mesh.get_group("replicas")
        self.count = 4 if schedule in SEVERAL else 2
        self.indices = range(self.position, self.count, 2)
        self.modules = [part(index).to(dtype) for index in self.indices]
        for module in self.modules if shard else ():
            for each in (module.up, module.down, module):
                if shard == "replicate":
                    replicate(each, mesh=mesh["replicas"])
                else:
                    fully_shard(each, mesh=mesh["replicas", "shards"])
        self.params = [each for module in self.modules for each in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.params, lr=0.01)
        wrap = functools.partial(DDP, process_group=replicas, find_unused_parameters=True)
        called = list(map(wrap, self.modules)) if wraps or not (mode or shard) else self.modules
        device = torch.device("cpu")
        self.stages = [
            pipelining.PipelineStage(
                each,
                index,
                self.count,
                device,
                # Known, torch runs no passes of its own to find them, which the modules would count.
                input_args=torch.ones(ROWS, WIDTH, dtype=dtype, requires_grad=index > 0),
                output_args=torch.ones(ROWS, WIDTH, dtype=dtype, requires_grad=True),
                group=self.own,
                dw_builder=getattr(module, "dw_builder", None),
            )
            for each, module, index in zip(called, self.modules, self.indices, strict=True)
        ]
        self.handle, self.seen = None, []
        if mode:
            given = self.stages if schedule in SEVERAL else self.stages[0]
            self.handle = attach(
                given, self.optimizer, mode, None if wraps or shard else replicas, policy="fifo", **options
            )
        self.prepare(micro_batches)

    def prepare(self, micro_batches, loss_fn=nn.functional.mse_loss, **settings):
        self.rows = ROWS * micro_batches
        given = self.stages if self.schedule in SEVERAL else self.stages[0]
        make = getattr(pipelining, self.schedule)
        self.steps = make(given, n_microbatches=micro_batches, loss_fn=loss_fn, **settings)

    def run(self, number, call="step"):
        """One step of the schedule, without the update."""
        for each in self.modules:
            each.uses_spare = call == "step"
        x, target = data_of(number, self.params[0].dtype)[:, self.replica, : self.rows]
        losses: list = []
        named = {"target": target, "losses": losses} if self.count - 1 in self.indices else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(self.steps, call)(*([x] if 0 in self.indices else []), **named)
        self.seen += [each.detach().clone() for each in losses]

    def run_without_sync(self, number):
        with self.handle.no_sync() if self.handle is not None else contextlib.ExitStack() as taken_out:
            for stage, module in zip(self.stages, self.modules, strict=True) if self.handle is None else ():
                taken_out.callback(setattr, stage, "submod", stage.submod)
                stage.submod = module
            self.run(number)

    def step(self, number):
        self.optimizer.zero_grad()
        self.run(number)
        self.optimizer.step()

    def result(self):
        if self.handle is not None:
            self.handle.flush()
        states = [self.optimizer.state[each] for each in self.params]
        return {
            "parameters": [local_of(each).detach().clone() for each in self.params],
            "gradients": [None if each.grad is None else local_of(each.grad).clone() for each in self.params],
            "states": [{key: local_of(value).clone() for key, value in state.items()} for state in states],
            "seen": self.seen,
        }


# --- Loops, which take the pipeline and the step's number ---


def zeroing(pipeline, number):
    pipeline.optimizer.zero_grad(set_to_none=False)
    pipeline.run(number)
    pipeline.optimizer.step()


def adding_up(pipeline, number):
    pipeline.run(number)
    pipeline.optimizer.step()
    if number % 3 == 2:
        pipeline.optimizer.zero_grad()


def clipping(pipeline, number):
    pipeline.optimizer.zero_grad()
    pipeline.run(number)
    pipeline.seen.append(nn.utils.clip_grad_norm_(pipeline.params, 0.01))
    pipeline.optimizer.step()


def tying(pipeline, number):
    """Stages have one bias in common, whose gradients the program adds up."""
    pipeline.optimizer.zero_grad()
    pipeline.run(number)
    torch.distributed.all_reduce(pipeline.params[2].grad, group=pipeline.own)
    pipeline.optimizer.step()


def keeping(pipeline, number):
    pipeline.step(number)
    pipeline.seen.append(pipeline.params[1].grad)


def evaluating(pipeline, number):
    pipeline.step(number)
    pipeline.run(number + 50, "eval")
    pipeline.optimizer.zero_grad()  # torch divides them once more, and gradcast does not


def other_counts(pipeline, number):
    pipeline.prepare(2 + 2 * (number % 2))
    pipeline.step(number)


def summing(pipeline, number):
    pipeline.prepare(4, scale_grads=False)
    pipeline.step(number)


def scaling(pipeline, number):
    scaler = pipeline.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
    pipeline.prepare(4, lambda output, target: scaler.scale(nn.functional.mse_loss(output, target)))
    scaler.scale(torch.zeros(()))  # on ranks that have no loss, too
    pipeline.optimizer.zero_grad()
    pipeline.run(number)
    scaler.step(pipeline.optimizer)
    scaler.update()


def resuming(pipeline, number):
    pipeline.step(number)
    if number == STEPS - 3:
        state = copy.deepcopy([pipeline.optimizer.state_dict(), [each.state_dict() for each in pipeline.modules]])
        pipeline.step(number + 50)
        pipeline.optimizer.load_state_dict(state[0])
        for module, own in zip(pipeline.modules, state[1], strict=True):
            module.load_state_dict(own)


def skipping(pipeline, number):
    """Every second step drops its gradients. The others add up those of two schedules."""
    pipeline.optimizer.zero_grad()
    if number % 2:
        pipeline.run_without_sync(number + 50)
    pipeline.run(number)
    if number % 2:
        pipeline.optimizer.step()


def detaching(pipeline, number):
    """The last two steps are DDP's."""
    if number == STEPS - 2 and pipeline.handle is not None:
        pipeline.handle.detach()
        pipeline.handle = None
    pipeline.step(number)


LOOPS = {
    "plain": Pipeline.step, "zeroing": zeroing, "adding up": adding_up, "clipping": clipping, "tying": tying,
    "keeping": keeping, "evaluating": evaluating, "other counts": other_counts, "summing": summing, "scaling": scaling,
    "resuming": resuming, "skipping": skipping,
}  # fmt: skip
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


def trained(rank, mode, schedule, loop, micro_batches, **settings):
    pipeline = Pipeline(rank, mode, schedule, micro_batches=micro_batches, **settings)
    for number in range(STEPS):
        (LOOPS | {"detaching": detaching})[loop](pipeline, number)
    found = pipeline.result()
    if pipeline.handle is not None:
        pipeline.handle.detach()
    return found


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
        (SEVERAL[2], LatePart, True),
        pytest.param(SEVERAL[2], Part, True, marks=SLOW),
        pytest.param(SEVERAL[1], Part, True, marks=SLOW),
        pytest.param(SEVERAL[1], LatePart, False, marks=SLOW),
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
    """Of gradients that are large beside all else."""
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


# --- Refused ---


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_the_module_of_a_stage_is_refused_before_a_schedule_runs(rank, wrap, mode):
    """Whichever comes first, on all ranks: those with later stages would wait for the first one."""
    module = net()
    called = DDP(module) if wrap else module
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(called, sgd, mode)
    found = not_refused(lambda: stage_of(rank, called), "detach()", "attach(stage")
    found += not_refused(lambda: stage_of(rank, nn.Sequential(module)), "detach()", "attach(stage")
    handle.detach()
    stage = stage_of(rank, called)
    found += not_refused(lambda: attach(called, sgd, mode), "in a stage of a pipeline", "attach(stage")
    attach(stage, sgd, mode, torch.distributed.group.WORLD)
    stage_of(rank, module)  # perhaps for evaluation
    return found


def stage_of(rank, module=None):
    own = [torch.distributed.new_group([each]) for each in range(2)][rank.index]
    return pipelining.PipelineStage(module or net(), 0, 1, torch.device("cpu"), group=own)


REFUSED = {
    "no group": ({}, "process_group="),
    "clipping": ({"clip": gradcast.Clip(norm=1.0)}, "clip in the loop"),
    "weights": ({"weight": "samples"}, "several backward passes"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_stages_cannot_do_is_refused(rank, name):
    options, word = REFUSED[name]
    stage, group = stage_of(rank), None if name == "no group" else torch.distributed.group.WORLD
    sgd = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    return not_refused(lambda: attach(stage, sgd, process_group=group, **options), word)


@on_ranks(2)
def test_other_modules_of_stages_are_refused(rank):
    group = torch.distributed.group.WORLD
    sharded, plain = stage_of(rank, replicate(net(), mesh=init_device_mesh("cpu", (2,)))), stage_of(rank)
    return not_refused(lambda: attach([plain, sharded], None, "hook"), "shard both") + not_refused(
        lambda: attach([plain, net()], None, "hook", group), "stages of this rank only"
    )


@on_ranks(4)
def test_replicas_of_other_stages_are_refused(rank, mode):
    """The modules of stages have equal shapes, so nothing else shows it."""
    position = rank.index // 2
    pairs = [torch.distributed.new_group(each) for each in ([0, 2], [1, 3])]
    part = Part(position)
    stage = pipelining.PipelineStage(part, position, 2, torch.device("cpu"), group=pairs[rank.index % 2])
    adam, before = torch.optim.AdamW(part.parameters()), [each.clone() for each in part.parameters()]
    found = not_refused(lambda: attach(stage, adam, mode, torch.distributed.group.WORLD), "the same stages")
    return found + compare.trees(list(part.parameters()), before)


@on_ranks(2)
def test_a_backward_pass_outside_of_the_schedule_is_refused(rank, mode):
    stage = stage_of(rank)
    sgd = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    handle = attach(stage, sgd, mode, torch.distributed.group.WORLD)
    loss = stage.submod(torch.ones(2, 6)).sum()
    found = not_refused(loss.backward, "outside of its schedule")
    other = pipelining.ScheduleGPipe(stage_of(rank, stage.submod), n_microbatches=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError) as raised:
        other.step(torch.ones(4, 6), target=torch.ones(4, 2))
    found += [] if "attach again" in str(raised.value.__cause__) else [str(raised.value.__cause__)]
    with handle.no_sync():
        stage.submod(torch.ones(2, 6)).sum().backward()
    handle.detach()
    return found


@on_ranks(2)
def test_a_schedule_that_fails_is_a_failed_backward_pass(rank, mode):
    """The other rank learns of it where it uses the gradients."""
    stage = stage_of(rank)
    sgd = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    handle = attach(stage, sgd, mode, torch.distributed.group.WORLD)
    steps = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: output.square().sum())

    calls = []

    def on_last_gradient(_):
        calls.append(rank)
        return 1 / 0 if len(calls) == 4 and rank.index == 1 else None

    def step():
        sgd.zero_grad()
        with contextlib.suppress(RuntimeError):
            steps.step(torch.ones(4, 6), target=torch.ones(4, 2))
        sgd.step()
        handle.flush()

    stage.submod[0].weight.register_hook(on_last_gradient)
    step()
    code, message = error_of(step)
    if rank.index == 0:
        rank.signal("told")
    rank.wait_for("told")  # by a rank that trains on, not by its end
    return [] if (code is not None) == (rank.index == 0) else [message]
