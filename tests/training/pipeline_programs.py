"""Random training programs over pipelines, two ranks with two replicas: python -m training.pipeline_programs (see
random_campaign.py).

Natively the modules of stages are in DDP, or in replicate() where DDP is wrong (zero bubble).
"""

import dataclasses
import functools
import random
import warnings
from typing import Any

from training import random_campaign
from training.needs import torch
from training.sharded_programs import CHANGES, CLIPS, OPTIMIZERS, READS, ZEROS, Side

nn = torch.nn
WIDTH, ROWS, STEPS = 6, 2, 6  # ROWS: of a micro-batch
# By schedule: the stages per rank, and the numbers of micro-batches.
SCHEDULES = {
    "ScheduleGPipe": (1, (1, 2, 3, 4)), "Schedule1F1B": (1, (2, 3, 4)), "ScheduleLoopedBFS": (2, (2, 4)),
    "ScheduleInterleaved1F1B": (2, (2, 4)), "ScheduleInterleavedZeroBubble": (2, (4, 8)),
}  # fmt: skip
ZERO_BUBBLE = "ScheduleInterleavedZeroBubble"
POLICIES = ("forecast", "forecast", "fifo", "p3", "ddp")
MOMENTS = {
    # torch divides gradients that are still there once more, and gradcast does not.
    "evaluate": "for each in optimizers: each.zero_grad()\nevaluate()",
    "save": "for value in module.state_dict().values(): see(value)",
    "load": "module.load_state_dict({name: value * 1.25 for name, value in module.state_dict().items()})\n"
    "for each in optimizers: each.load_state_dict(copy.deepcopy(each.state_dict()))",
}
# Stages have different parameters, so that what a program changes on the local ones differs between them, as it should.
CODE = {name: code for name, code in (READS | CLIPS | CHANGES | MOMENTS).items() if name != "a whole parameter"}


@dataclasses.dataclass(frozen=True)
class Step:
    """``schedules``: how many run, all but the last of them in no_sync(). ``uses``: the micro-batches that use each
    part's spare parameter."""

    zero: str = "none"
    schedules: int = 1
    micro_batches: int = 4
    uses: tuple[int, ...] = (0,)
    before: tuple[str, ...] = ()
    updates: bool = True
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """``wraps``: DDP, which is idle then, is around the modules of an attached pipeline, too."""

    seed: int
    mode: str
    schedule: str
    replicate: bool
    wraps: bool
    scales: bool
    frozen: bool
    dtype: str
    optimizer: str
    form: str
    in_two: str
    policy: str
    steps: tuple[Step, ...]

    mesh = ("stages", "replicas")

    @property
    def tolerance(self) -> float:
        """With a zero bubble replicate() adds in another order."""
        return 0.0 if self.replicate or self.schedule != ZERO_BUBBLE else 1e-9

    def training(self, rank, mesh, is_ours: bool) -> "Training":
        return Training(mesh, self, is_ours)


def program_of(seed: int) -> Program:
    chance = random.Random(seed)
    pick = chance.choice
    rarely = lambda value, plain, share=0.25: value if chance.random() < share else plain  # noqa: E731
    some = lambda things, most=2: tuple(pick(things) for _ in range(max(0, chance.randint(-1, most))))  # noqa: E731
    schedule = pick(list(SCHEDULES))
    replicate = rarely(True, False)
    native_sum = schedule == ZERO_BUBBLE or replicate
    # With a zero bubble replicate() adds to gradients that stay in another way, not the same in all versions of torch.
    zeros = [name for name in ZEROS if name or schedule != ZERO_BUBBLE or replicate]
    make = lambda: Step(  # noqa: E731
        pick(["none", "none", "none", *zeros]),
        1 if native_sum else rarely(2, 1),  # FSDP has no no_sync() that a stage does not undo
        pick(SCHEDULES[schedule][1]),
        tuple(each for each in range(4) if chance.random() < 0.5),
        some([*READS, *CLIPS, *CLIPS, *CHANGES]),
        not rarely(True, False, 0.1),
        some([*READS, *CHANGES, *MOMENTS]),
    )
    kinds = [make() for _ in range(pick([1, 3]))]
    clean = lambda names: tuple(name for name in names if name in CODE)  # noqa: E731
    kinds = [dataclasses.replace(each, before=clean(each.before), after=clean(each.after)) for each in kinds]
    dtype = "fp64" if schedule == ZERO_BUBBLE else pick(["fp32", "fp64"])
    return Program(
        seed, rarely("hook", "overlap", 0.2), schedule, replicate, not replicate and rarely(True, False, 0.15),
        rarely(False, True, 0.15), rarely(True, False, 0.15), dtype, pick(list(OPTIMIZERS)),
        pick(["single", "foreach", "fused"]), rarely(pick(["groups", "optimizers"]), ""), pick(POLICIES),
        tuple(pick(kinds) for _ in range(STEPS)),
    )  # fmt: skip


class Part(nn.Module):
    def __init__(self, number: int, frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.spare = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.up.requires_grad_(not frozen)
        self.uses: tuple[int, ...] = ()  # micro-batches that use ``spare``
        self.number = 0  # of the next micro-batch

    def forward(self, x):
        y = x + self.down(torch.tanh(self.up(x)))
        if torch.is_grad_enabled():
            self.number += 1
        return y * self.spare if self.number - 1 in self.uses else y


class Training(Side):
    def __init__(self, mesh, program: Program, is_ours: bool) -> None:
        from torch.distributed import pipelining
        from torch.distributed._composable.replicate_with_fsdp import replicate

        self.pipelining, (position, self.replica) = pipelining, mesh.get_coordinate()
        own, replicas = mesh.get_group("stages"), mesh.get_group("replicas")
        self.count = 2 * SCHEDULES[program.schedule][0]
        self.indices = range(position, self.count, 2)
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[program.dtype]
        modules = [Part(index, program.frozen and index % 2 == 0).to(dtype) for index in self.indices]
        ddp = functools.partial(nn.parallel.DistributedDataParallel, process_group=replicas)
        called: list[Any] = modules
        if program.replicate or (not is_ours and program.schedule == ZERO_BUBBLE):
            called = [replicate(each, mesh=mesh["replicas"]) for each in modules]
        elif program.wraps or not is_ours:
            called = [ddp(each, find_unused_parameters=True) for each in modules]
        super().__init__(program, nn.ModuleList(modules))
        device = torch.device("cpu")
        # Known, torch runs no passes of its own to find them, which the modules would count.
        known = functools.partial(torch.ones, ROWS, WIDTH, dtype=dtype)
        make = functools.partial(pipelining.PipelineStage, num_stages=self.count, device=device, group=own)
        self.stages = [
            make(
                each,
                index,
                input_args=known(requires_grad=index > 0),
                output_args=known(requires_grad=True),
            )
            for each, index in zip(called, self.indices, strict=True)
        ]
        group = None if program.wraps or program.replicate else replicas
        evaluate = functools.partial(self.schedule, 2 * len(self.indices), "eval")
        self.begin(self._given(), group, is_ours=is_ours, evaluate=evaluate)

    def _given(self):
        return self.stages if SCHEDULES[self.program.schedule][0] > 1 else self.stages[0]

    def schedule(self, micro_batches: int, call: str = "step", uses: tuple[int, ...] = ()) -> None:
        self.number += 1
        make = getattr(self.pipelining, self.program.schedule)
        settings = {"n_microbatches": micro_batches, "loss_fn": nn.functional.mse_loss}
        steps = make(self._given(), scale_grads=self.program.scales, **settings)
        for each in self.module:
            each.uses, each.number = uses, 0
        generator = torch.Generator().manual_seed(10 * self.number + self.replica)
        x, target = torch.randn(2, ROWS * micro_batches, WIDTH, generator=generator).to(self.params[0].dtype)
        losses: list = []
        named = {"target": target, "losses": losses} if self.count - 1 in self.indices else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(steps, call)(*([x] if 0 in self.indices else []), **named)
        for each in losses:
            self.see(each)

    def without_sync(self, step: Step) -> None:
        """Natively DDP reduces each schedule's gradients: the mean of sums is the sum of means, in other bits. So the
        reference takes DDP out of its stages."""
        if self.handle is not None:
            with self.handle.no_sync():
                self.schedule(step.micro_batches, uses=step.uses)
            return
        called = [stage.submod for stage in self.stages]
        for stage in self.stages:
            stage.submod = stage.submod.module
        self.schedule(step.micro_batches, uses=step.uses)
        for stage, module in zip(self.stages, called, strict=True):
            stage.submod = module

    def train(self) -> dict:
        for step in self.program.steps:
            self.do(ZEROS[step.zero])
            for _ in range(step.schedules - 1):
                self.without_sync(step)
            self.schedule(step.micro_batches, uses=step.uses)
            for name in step.before:
                self.do(CODE[name])
            for each in self.optimizers if step.updates else ():
                each.step()
            for name in step.after:
                self.do(CODE[name])
        return self.result()


if __name__ == "__main__":
    raise SystemExit(random_campaign.main("training.pipeline_programs"))
