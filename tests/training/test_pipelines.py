"""Stages of torch.distributed.pipelining, two replicas of each: the bits of DDP around the stage's module, and of one
process where DDP is wrong."""

import contextlib
import copy
import functools
import time
import warnings

import pytest

import gradcast
from training import compare
from training.attached import attach, error_of, not_refused
from training.inside import session_of
from training.needs import torch
from training.pair import DDP, net
from training.pool import on_ranks

pytest.importorskip("torch.distributed.pipelining")
from torch.distributed import pipelining

nn = torch.nn
WIDTH, ROWS, BATCH, STEPS = 8, 3, 12, 7  # ROWS: of a micro-batch
SEVERAL = ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")  # stages per rank
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", *SEVERAL[:2])  # those that DDP is right with
STAGE_REFUSED = ("ScheduleGPipe", "Schedule1F1B", SEVERAL[2])


class Part(nn.Module):
    """The module of stage ``number``. The first micro-batch of a step alone uses ``spare``."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(WIDTH))
        self.delay_s, self.uses_spare = 0.0, True

    def forward(self, x):
        y = x + self.down(torch.tanh(self.up(x)))
        if self.delay_s and y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.delay_s))
        if self.uses_spare and torch.is_grad_enabled():
            self.uses_spare = False
            return y * self.spare
        return y


def data_of(number, dtype):
    """Inputs and targets, by replica."""
    return torch.randn(2, 2, BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


class Pipeline:
    """Two ranks with stages, two replicas. ``mode``: None for DDP."""

    def __init__(
        self, rank, mode, schedule="Schedule1F1B", *, micro_batches=4, dtype=torch.float32, wraps=False, **options
    ):
        """``wraps``: DDP is around the modules of an attached pipeline, too."""
        self.rank, self.schedule = rank, schedule
        self.position, self.replica = divmod(rank.index, 2)
        groups = [
            [torch.distributed.new_group(each) for each in pairs] for pairs in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
        ]
        self.own, replicas = groups[0][self.replica], groups[1][self.position]
        self.count = 4 if schedule in SEVERAL else 2
        self.indices = range(self.position, self.count, 2)
        self.modules = [Part(index).to(dtype) for index in self.indices]
        self.params = [each for module in self.modules for each in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.params, lr=0.01)
        wrap = functools.partial(DDP, process_group=replicas, find_unused_parameters=True)
        called = list(map(wrap, self.modules)) if wraps or not mode else self.modules
        device = torch.device("cpu")
        self.stages = [
            pipelining.PipelineStage(each, index, self.count, device, group=self.own)
            for each, index in zip(called, self.indices, strict=True)
        ]
        self.handle, self.seen = None, []
        if mode:
            given = self.stages if schedule in SEVERAL else self.stages[0]
            self.handle = attach(given, self.optimizer, mode, None if wraps else replicas, policy="fifo", **options)
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

    def step(self, number):
        self.optimizer.zero_grad()
        self.run(number)
        self.optimizer.step()

    def result(self):
        if self.handle is not None:
            self.handle.flush()
        states = [self.optimizer.state[each] for each in self.params]
        return {
            "parameters": [each.detach().clone() for each in self.params],
            "gradients": [None if each.grad is None else each.grad.clone() for each in self.params],
            "states": [{key: value.clone() for key, value in state.items()} for state in states],
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


def detaching(pipeline, number):
    """The last two steps are DDP's."""
    if number == STEPS - 2 and pipeline.handle is not None:
        pipeline.handle.detach()
        pipeline.handle = None
    pipeline.step(number)


LOOPS = {
    "plain": Pipeline.step, "zeroing": zeroing, "adding up": adding_up, "clipping": clipping, "tying": tying,
    "keeping": keeping, "evaluating": evaluating, "other counts": other_counts, "summing": summing, "scaling": scaling,
    "resuming": resuming,
}  # fmt: skip
FAST = ("clipping", "keeping", "evaluating", "other counts")
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


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", SEVERAL[1]])
@on_ranks(4)
def test_ddp_around_the_module_of_a_stage_is_idle_until_detach(rank, schedule, mode):
    ours = trained(rank, mode, schedule, "detaching", 4, wraps=True)
    return compare.trees(ours, trained(rank, None, schedule, "detaching", 4))


@pytest.mark.parametrize("schedule", [SEVERAL[2], pytest.param(SEVERAL[1], marks=SLOW)])
@on_ranks(4)
def test_a_stage_trains_as_in_one_process(rank, schedule, mode):
    """With a zero bubble DDP leaves replicas different (pytorch #144530)."""
    pipeline = Pipeline(rank, mode, schedule, dtype=torch.float64)
    model = nn.Sequential(*map(Part, range(4))).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(STEPS):
        pipeline.step(number)
        optimizer.zero_grad()
        for x, target in data_of(number, torch.float64).transpose(0, 1):
            for count, (part, goal) in enumerate(zip(x.chunk(4), target.chunk(4), strict=True)):
                for each in model:
                    each.uses_spare = count == 0
                (nn.functional.mse_loss(model(part), goal) / 8).backward()
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
    before = [each.grad.clone() for each in pipeline.params]
    pipeline.run(STEPS, "eval")
    pipeline.handle.flush()
    if len(blocks) != sum(each.get("cat") == "block" for each in pipeline.handle.timeline()["traceEvents"]):
        wrong.append("evaluation sends gradients")
    return wrong + compare.trees([each.grad for each in pipeline.params], before)


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
    from torch.distributed.device_mesh import init_device_mesh
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
        x, target = data_of(number, torch.float64)
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


@pytest.mark.parametrize("schedule", STAGE_REFUSED)
@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(2)
def test_the_module_of_a_stage_is_refused_in_its_first_forward_pass(rank, schedule, wrap, mode):
    """Two replicas of a pipeline with one stage."""
    own = [torch.distributed.new_group([each]) for each in range(2)][rank.index]
    module = net()
    called = DDP(module) if wrap else module
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(called, sgd, mode)
    stage = pipelining.PipelineStage(called, 0, 1, torch.device("cpu"), group=own)
    make = getattr(pipelining, schedule)
    stages = [stage] if schedule == SEVERAL[2] else stage
    steps = make(stages, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = not_refused(lambda: steps.step(torch.ones(4, 6), target=torch.ones(4, 2)), "pipeline", "attach(stage")
    handle.detach()
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
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    replicated, plain = stage_of(rank, replicate(net(), mesh=init_device_mesh("cpu", (2,)))), stage_of(rank)
    return not_refused(lambda: attach(replicated, None, "hook", group), "plain module") + not_refused(
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
