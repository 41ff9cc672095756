"""Random training programs over FSDP2's replicas: python -m training.sharded_programs (see random_campaign.py)."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import random
from typing import Any

from training import random_campaign
from training.attached import attach, planning
from training.needs import torch

nn = torch.nn
BATCH, STEPS = 3, 6
SYNCS = ("all", "all", "all", "kept", "kept", "no_sync", "unreduced")
POLICIES = ("forecast", "forecast", "fifo", "fsdp", "p3", "ddp")
CHECKPOINTS = ("inside", "outside", "inside reentrant", "outside reentrant")
TYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}  # of parameters; else fp32
PRECISIONS = {
    "fp32": {},
    "fp64": {"param_dtype": torch.float64},
    "bf16 parameters": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 outputs": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32},
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
# Code of the features, by name. Names in it are those of ``Training.names``.
ZEROS = {
    "none": "for each in optimizers: each.zero_grad()",
    "zero": "for each in optimizers: each.zero_grad(set_to_none=False)",
    "module": "module.zero_grad()",
    "": "",
}
READS = {
    "gradients": "for p in params[1::2]: see(p.grad)",
    "a parameter": "see(params[-1])",
    "a whole parameter": "see(params[0].full_tensor())",
    "norm of a parameter": "see(params[0].norm())",
    "state": "for each in optimizers:\n for state in each.state.values():\n  for value in state.values(): see(value)",
    "total norm": "see(nn.utils.get_total_norm(gradients()))",
}
CLIPS = {
    "clip": "see(nn.utils.clip_grad_norm_(module.parameters(), 0.1))",
    "clip singly": "see(nn.utils.clip_grad_norm_(params, 0.1, foreach=False))",
    # The largest of no elements is an error.
    "clip by largest": "see(nn.utils.clip_grad_norm_([p for p in params if len(p) > 1], 0.1, float('inf')))",
    "clip as torchtitan": "norm = whole(nn.utils.get_total_norm(gradients()))\nsee(norm)\n"
    "nn.utils.clip_grads_with_norm_(params, 0.1, norm)",
    "clip values": "nn.utils.clip_grad_value_(params, 0.05)",
    "scale gradients": "with torch.no_grad():\n for each in gradients(): each.mul_(0.5)",
}
CHANGES = {
    "scale parameters": "with torch.no_grad():\n for p in params[::2]: p.mul_(0.9)",
    "another rate": "for each in optimizers:\n for group in each.param_groups: group['lr'] *= 0.7",
    "drop a gradient": "params[0].grad = None",
    "replace gradients": "for p in params[::2]:\n if p.grad is not None: p.grad = p.grad * 0.5",
    "keep a gradient": "see(kept)\nkept = params[-1].grad",
    "zero": ZEROS["none"],
    "step again": "for each in optimizers: each.step()",
    "flush": "if handle: handle.flush()",
}
MOMENTS = {
    "evaluate": "module.eval()\nwith torch.no_grad(): see(module(batch(7), order, True))\nmodule.train()",
    "save": "for value in module.state_dict().values(): see(value)",
    "load": "module.load_state_dict({name: value * 1.25 for name, value in module.state_dict().items()})\n"
    "for each in optimizers: each.load_state_dict(copy.deepcopy(each.state_dict()))",
    "gather": "module.unshard()\nsee(module.last.weight)\nmodule.reshard()",
}
LEAVE = {"detach": "if handle: handle.detach()\nhandle = None"}  # from here on FSDP reduces
CODE = READS | CLIPS | CHANGES | MOMENTS | LEAVE


@dataclasses.dataclass(frozen=True)
class Pass:
    """A backward pass. ``order``: the blocks that it calls. ``sync``: one of SYNCS. ``losses``: forward passes.
    ``again``: it goes through the same graph twice. ``after``: one of READS."""

    order: tuple[int, ...] = (0, 1)
    sync: str = "all"
    losses: int = 1
    again: bool = False
    uses_spare: bool = True
    after: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    zero: str = "none"
    passes: tuple[Pass, ...] = (Pass(),)
    before: tuple[str, ...] = ()
    updates: str = "step"
    after: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """``sharded``: blocks that are a group each, or tuples of those that are one together."""

    seed: int
    mode: str = "overlap"
    replicate: bool = False
    width: int = 6
    outputs: int = 4
    blocks: int = 2
    sharded: tuple[Any, ...] = (0, 1)
    frozen: tuple[int, ...] = ()
    precision: str = "fp32"
    reshard: bool | None = None
    factor: float | None = None
    setting: str = ""
    checkpoints: str = ""
    optimizer: str = "sgd"
    form: str = "single"
    in_two: str = ""
    policy: str = "forecast"
    steps: tuple[Step, ...] = (Step(),) * STEPS

    tolerance = 0.0

    @property
    def mesh(self) -> tuple[str, ...]:
        return ("replicas",) if self.replicate else ("replicas", "shards")

    def training(self, rank, mesh, is_ours: bool) -> "Training":
        return Training(rank, mesh, self, is_ours)


def program_of(seed: int) -> Program:
    chance = random.Random(seed)
    pick = chance.choice
    rarely = lambda value, plain, share=0.25: value if chance.random() < share else plain  # noqa: E731
    some = lambda things, most=2, least=0: tuple(pick(things) for _ in range(max(least, chance.randint(-1, most))))  # noqa: E731
    blocks = chance.randint(1, 3)
    together = blocks > 1 and chance.random() < 0.15
    sharded = ((0, 1),) if together else tuple(index for index in range(blocks) if chance.random() < 0.8)
    orders = [tuple(range(blocks)), some(range(blocks), 4, 1)]
    # Where replicas keep gradients, FSDP needs the same parameters of a group in each pass.
    keeps = chance.random() < 0.5
    varies = 0.5 * (not keeps or (len(sharded) == blocks and not together))
    order, spare = pick(orders), rarely(False, True)
    make = lambda count: Step(  # noqa: E731
        pick(["none", "none", "none", *ZEROS]),
        tuple(
            Pass(
                rarely(pick(orders), order, varies), pick(SYNCS) if keeps else "all", rarely(2, 1, 0.15),
                rarely(True, False, 0.05), rarely(not spare, spare, 0 if keeps else 0.2),
                rarely(pick([*READS]), "", 0.15),
            )
            for _ in range(count)
        ),
        some([*READS, *CLIPS, *CLIPS, *CHANGES]),
        chance.choices(["step", "closure", "none"], [12, 1, 1])[0],
        some([*READS, *CHANGES, *MOMENTS, *([] if keeps else LEAVE)]),
    )  # fmt: skip
    kinds = [make(pick([1, 1, 2, 3])) for _ in range(pick([1, 3]))]
    return Program(
        seed, rarely("hook", "overlap", 0.2), rarely(True, False), pick([4, 5, 6]), pick([1, 3, 4]), blocks, sharded,
        tuple(index for index in range(blocks) if chance.random() < 0.1),
        chance.choices(list(PRECISIONS), [5, 2, 3, 1, 1])[0], pick([None, True, False]),
        rarely(pick([1.0, 2.0, 4.0, 8.0]), None, 0.15),
        rarely(pick(["forward", "backward", "kept gathered", "not the last"]), ""), rarely(pick(CHECKPOINTS), "", 0.3),
        pick(list(OPTIMIZERS)), pick(["single", "foreach", "fused"]), rarely(pick(["groups", "optimizers"]), ""),
        pick(POLICIES), tuple(pick(kinds) for _ in range(STEPS)),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, checkpoints: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width, bias=False)
        self.spare = nn.Parameter(torch.full((1,), 0.5))  # one rank alone has a part of it
        self.checkpoints = checkpoints

    def forward(self, x, uses_spare: bool = True):
        inner = recomputed(self.inner, self.checkpoints) if "inside" in self.checkpoints else self.inner
        return x + inner(x) * (self.spare if uses_spare else 1)

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))


def recomputed(function, checkpoints: str):
    return functools.partial(torch.utils.checkpoint.checkpoint, function, use_reentrant="reentrant" in checkpoints)


class Net(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.first, self.last = nn.Linear(program.width, program.width), nn.Linear(program.width, program.outputs)
        self.blocks = nn.ModuleList(Block(program.width, program.checkpoints) for _ in range(program.blocks))
        self.checkpoints = program.checkpoints

    def forward(self, x, order, uses_spare: bool):
        x = self.first(x)
        for block in (self.blocks[index] for index in order):
            x = (recomputed(block, self.checkpoints) if "outside" in self.checkpoints else block)(x, uses_spare)
        return self.last(x)


def sharded(net: Net, program: Program, mesh) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net.to(TYPES.get(program.precision, torch.float32))
    for index in program.frozen:
        net.blocks[index].up.requires_grad_(False)
    settings = {"mesh": mesh} | ({} if program.replicate else {"reshard_after_forward": program.reshard})
    shard = functools.partial(replicate if program.replicate else fully_shard, **settings)
    policy = MixedPrecisionPolicy(**PRECISIONS[program.precision])
    groups: list[Any] = []
    for each in program.sharded:
        blocks = [net.blocks[index] for index in (each if isinstance(each, tuple) else [each])]
        shard(blocks if len(blocks) > 1 else blocks[0], mp_policy=dataclasses.replace(policy, output_dtype=None))
        groups += blocks
    groups.append(shard(net, mp_policy=policy))
    for before, after in itertools.pairwise(groups):
        if program.setting == "forward":
            before.set_modules_to_forward_prefetch([after])
        elif program.setting == "backward":
            after.set_modules_to_backward_prefetch([before])
    if program.setting == "kept gathered":
        net.set_reshard_after_backward(False)
    for each in groups if program.factor else ():
        each.set_force_sum_reduction_for_comms(True)
        each.set_gradient_divide_factor(program.factor)
    return net


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # without gradients it is no DTensor


class Side:
    """One side of a program. ``names``: those of the features' code. ``seen``: what it has read."""

    def __init__(self, program: Any, module: nn.Module) -> None:
        self.program, self.module, self.seen, self.number, self.handle = program, module, [], 0, None
        self.params = [each for each in module.parameters() if each.requires_grad]
        half = len(self.params) // 2 if program.in_two else 0
        parts: list[Any] = [part for part in (self.params[:half], self.params[half:]) if part]
        if program.in_two == "groups":
            parts = [[{"params": part, "lr": 0.01 * (1 + index)} for index, part in enumerate(parts)]]
        kind, settings = OPTIMIZERS[program.optimizer]
        form = "foreach" if program.form == "fused" and "adam" not in program.optimizer else program.form
        settings = settings | ({"foreach": False} if form == "single" else {form: True})
        self.optimizers = [kind(part, **settings) for part in parts]

    def begin(self, given: Any, group: Any, *, is_ours: bool, **names: Any) -> None:
        """Attaches, if it is ours, to what is given. ``names``: further ones."""
        if is_ours:
            plan = planning(self.program.policy)
            self.handle = attach(given, self.optimizers, self.program.mode, group, plan=plan)
        self.names = {
            "module": self.module, "params": self.params, "optimizers": self.optimizers, "handle": self.handle,
            "nn": nn, "torch": torch, "copy": copy, "whole": whole, "see": self.see, "kept": None,
            "gradients": lambda: [each.grad for each in self.params if each.grad is not None], **names,
        }  # fmt: skip

    def see(self, value) -> None:
        self.seen.append(local(value).detach().clone() if isinstance(value, torch.Tensor) else value)

    def do(self, code: str) -> None:
        exec(code, self.names)

    def leave(self) -> None:
        self.do(LEAVE["detach"])

    def result(self) -> dict:
        self.do(CHANGES["flush"])
        states = [each.state.get(parameter, {}) for each in self.optimizers for parameter in self.params]
        return {
            "parameters": [local(each).detach().clone() for each in self.module.parameters()],
            "gradients": [None if each.grad is None else local(each.grad).clone() for each in self.params],
            "states": [{key: local(value).clone() for key, value in state.items()} for state in states],
            "seen": self.seen,
        }


class Training(Side):
    def __init__(self, rank, mesh, program: Program, is_ours: bool) -> None:
        super().__init__(program, sharded(Net(program), program, mesh))
        self.rank = rank
        order = program.steps[0].passes[0].order
        self.begin(self.module, None, is_ours=is_ours, batch=self.batch, order=order)

    def train(self) -> dict:
        for number, step in enumerate(self.program.steps):
            self.number = 100 * number
            if step.updates == "closure":
                for each in self.optimizers:
                    each.step(functools.partial(self.passes, step))
            else:
                self.passes(step)
                for name in step.before:
                    self.do(CODE[name])
                for each in self.optimizers if step.updates == "step" else ():
                    each.step()
            for name in step.after:
                self.do(CODE[name])
        return self.result()

    def passes(self, step: Step):
        self.do(ZEROS[step.zero])
        for each in step.passes:
            self.number += 1
            if self.program.setting == "not the last":
                self.module.set_is_last_backward(each is step.passes[-1])
            loss = self.one_pass(each)
            self.do(CODE.get(each.after, ""))
        return loss

    def one_pass(self, each: Pass):
        module, handle = self.module, self.names["handle"]
        by_handle = each.sync == "no_sync" and handle is not None
        module.set_requires_gradient_sync(each.sync != "unreduced")
        module.set_requires_all_reduce(each.sync in ("all", "unreduced") or by_handle)
        with handle.no_sync() if by_handle else contextlib.nullcontext():
            outputs = [module(self.batch(part), each.order, each.uses_spare) for part in range(each.losses)]
            losses = [output.double().square().mean() for output in outputs]
            if self.number % 2:
                for retains in (True, False) if each.again else (False,):
                    sum(losses).backward(retain_graph=retains)
            else:
                for loss in losses:
                    loss.backward()
        self.see(losses[-1])
        return losses[-1]

    def batch(self, part: int):
        generator = torch.Generator().manual_seed(10 * self.number + 1000 * self.rank.index + part)
        return torch.randn(BATCH, self.program.width, generator=generator).to(TYPES.get(self.program.precision))


if __name__ == "__main__":
    raise SystemExit(random_campaign.main("training.sharded_programs"))
