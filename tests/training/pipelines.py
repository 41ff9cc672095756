"""Pipelines of two ranks with two replicas, and loops that train them."""

import contextlib
import copy
import functools
import time
import warnings

from torch.distributed import pipelining
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradcast.training.compat.sharding import local_of
from training.attached import attach
from training.needs import torch
from training.pair import DDP

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


def trained(rank, mode, schedule, loop, micro_batches, **settings):
    pipeline = Pipeline(rank, mode, schedule, micro_batches=micro_batches, **settings)
    for number in range(STEPS):
        (LOOPS | {"detaching": detaching})[loop](pipeline, number)
    found = pipeline.result()
    if pipeline.handle is not None:
        pipeline.handle.detach()
    return found
