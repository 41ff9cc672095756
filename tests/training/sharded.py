"""Sharded modules that train under native HSDP and attached, for the tests of FSDP2: models, settings and loops."""

import contextlib
import copy
from collections.abc import Callable

import pytest

from training import compare
from training.attached import attach
from training.needs import torch

nn = torch.nn
WIDTH, BATCH, STEPS = 12, 4, 9
IS_LATER = torch.__version__ >= "2.15"  # whose FSDP differs from that of 2.11
later_only = pytest.mark.skipif(not IS_LATER, reason="FSDP of torch 2.11 has no such thing")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Sequential):
    def __init__(self, outputs: int = 5) -> None:
        torch.manual_seed(7)
        super().__init__(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, outputs))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 5))

    def forward(self, x):
        return x * self.scale


def mesh_of(rank):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, rank.size // 2), mesh_dim_names=("replicas", "shards"))


def sharded(module: nn.Module, mesh, **settings) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in (each for each in module if isinstance(each, Block)):
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(module, mesh=mesh, **settings)


def policy(**types):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(**types)


class Training:
    """A sharded module, trained by native HSDP (``mode`` None) or attached."""

    def __init__(self, rank, mode: str | None, *, build: Callable = lambda mesh: sharded(Net(), mesh), **options):
        self.rank, self.mode, self.build = rank, mode, build
        self.module = build(mesh_of(rank))
        trained = [each for each in self.module.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
        self.handle = attach(self.module, self.optimizer, mode, **options) if mode else None
        self.seen: dict = {}  # what the loop has read

    def batch(self, number: int):
        generator = torch.Generator().manual_seed(100 * number + self.rank.index)
        return torch.randn(BATCH, WIDTH, generator=generator)

    def backward(self, number: int) -> None:
        self.module(self.batch(number)).float().square().mean().backward()

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.backward(number)
        self.optimizer.step()

    def result(self) -> dict:
        if self.handle is not None:
            assert self.handle.plan_version > 0, "the warm-up goes on"
            self.handle.flush()
        named = list(self.module.named_parameters())
        found = {name: parameter.to_local().detach().clone() for name, parameter in named}
        gradients = {name: None if p.grad is None else p.grad.to_local().clone() for name, p in named}
        states = {name: self.optimizer.state.get(parameter, {}) for name, parameter in named}
        kept = {name: state.get("exp_avg", state.get("momentum_buffer")) for name, state in states.items() if state}
        averages = {name: average.to_local().clone() for name, average in kept.items()}
        return {"parameters": found, "gradients": gradients, "averages": averages, "seen": self.seen}


def differences(rank, mode: str, loop: Callable[[Training], None], kind: type = Training, **settings) -> list[str]:
    results = []
    for side in (None, mode):
        training = kind(rank, side, **(settings if side else {k: settings[k] for k in settings if k == "build"}))
        loop(training)
        results.append(training.result())
        if training.handle is not None:
            training.handle.detach()
    return compare.trees(results[1], results[0])


def steps(training: Training) -> None:
    for number in range(STEPS):
        training.step(number)


def in_passes(training: Training, before: Callable[[int], None] = lambda part: None) -> None:
    """Three backward passes in each step; ``before(part)`` is called before each."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(3):
            before(part)
            training.backward(10 * number + part)
        training.optimizer.step()


def without_all_reduce(training: Training) -> None:
    """Two of three passes stay with their replica."""
    in_passes(training, lambda part: training.module.set_requires_all_reduce(part == 2))


def without_sync(training: Training) -> None:
    in_passes(training, lambda part: training.module.set_requires_gradient_sync(part == 2))


def synchronized_twice(training: Training) -> None:
    """As torchtitan's loop, which never switches synchronization off."""
    in_passes(training)


def keep_a_pass(training: Training, number: int) -> None:
    """Begins a step by a pass that is not averaged; the next one is."""
    training.optimizer.zero_grad()
    training.module.set_requires_all_reduce(False)
    training.backward(10 * number)
    training.module.set_requires_all_reduce(True)


def kept_by_others(training: Training) -> None:
    """A pass that uses everything is kept, and the next one uses one block."""
    for number in range(STEPS):
        keep_a_pass(training, number)
        training.module[1](training.batch(10 * number + 1)).square().mean().backward()
        for name, parameter in training.module.named_parameters():
            training.seen[f"{name} {number}"] = None if parameter.grad is None else parameter.grad.to_local().clone()
        training.optimizer.step()


def called_twice(training: Training) -> None:
    """A pass is kept, and the next one calls a block twice."""
    for number in range(STEPS):
        keep_a_pass(training, number)
        outputs = [training.module(training.batch(10 * number + part)).square().mean() for part in (1, 2)]
        sum(outputs).backward()
        training.optimizer.step()


def two_losses(training: Training) -> None:
    """Several forward passes before one backward pass."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        batches = [training.batch(10 * number + part) for part in range(2 + number % 2)]
        sum(training.module(batch).square().mean() for batch in batches).backward()
        training.optimizer.step()


def in_between(training: Training) -> None:
    """A pass is averaged, the next one kept, the third averaged with it; gradients are read after each."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(3):
            training.module.set_requires_all_reduce(part != 1)
            training.backward(10 * number + part)
            gradient = training.module[1].up.weight.grad
            if number % 3 == 2:
                training.seen[f"{number}.{part}"] = gradient.to_local().clone()
        training.optimizer.step()


def accumulated_over_steps(training: Training) -> None:
    for number in range(STEPS):
        if number % 2 == 0:
            training.optimizer.zero_grad(set_to_none=number % 4 == 0)
        training.backward(number)
        training.optimizer.step()


def clipped(training: Training) -> None:
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.backward(number)
        norm = nn.utils.clip_grad_norm_(training.module.parameters(), 0.05)
        training.seen[f"norm {number}"] = norm.full_tensor().detach()
        training.optimizer.step()


def evaluated(training: Training) -> None:
    for number in range(STEPS):
        training.step(number)
        if number % 2:
            training.module.eval()
            with torch.no_grad():
                training.seen[f"output {number}"] = training.module(training.batch(1000)).clone()
            training.module.train()


def saved(training: Training) -> None:
    for number in range(STEPS):
        training.step(number)
        state = training.module.state_dict()
        training.seen[f"state {number}"] = {name: value.to_local().clone() for name, value in state.items()}
        if number == STEPS - 2:
            training.module.load_state_dict({name: value * 1.5 for name, value in state.items()})
            training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def averaged(training: Training) -> None:
    """By hand over DTensors, by an AveragedModel, and by another one that gradcast keeps."""

    def average() -> torch.optim.swa_utils.AveragedModel:
        made = torch.optim.swa_utils.AveragedModel(nn.Identity())
        made.module = training.build(mesh_of(training.rank))
        return made

    by_hand = [each.detach().clone() for each in training.module.parameters()]
    called, kept = average(), average()
    if training.handle is not None:
        training.handle.keep_average(kept)
    for number in range(STEPS):
        training.step(number)
        if number % 2:
            called.update_parameters(training.module)
            with torch.no_grad():
                torch._foreach_lerp_(by_hand, list(training.module.parameters()), 0.1)
        if training.handle is None:
            kept.update_parameters(training.module)
    for name, averages in (("hand", by_hand), ("called", called.parameters()), ("kept", kept.parameters())):
        training.seen[name] = [each.to_local().detach().clone() for each in averages]


def a_part_is_unused(training: Training) -> None:
    for number in range(STEPS):
        training.optimizer.zero_grad()
        used = (
            training.module[1](training.batch(number)) if number % 3 == 1 else training.module(training.batch(number))
        )
        used.square().mean().backward()
        training.optimizer.step()


def prefetched(training: Training) -> None:
    first, second = training.module[1], training.module[2]
    training.module.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([second])
    steps(training)


def under_no_sync(training: Training) -> None:
    """handle.no_sync() is what set_requires_all_reduce(False) is natively."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.module.set_requires_all_reduce(training.handle is not None)
        with training.handle.no_sync() if training.handle else contextlib.nullcontext():
            training.backward(10 * number)
        training.module.set_requires_all_reduce(True)
        training.backward(10 * number + 1)
        training.optimizer.step()


def frozen(mesh):
    module = Net()
    for parameter in module[1].up.parameters():
        parameter.requires_grad_(False)
    return sharded(module, mesh)


BUILDS = {
    "fp64": lambda mesh: sharded(
        Net().double(), mesh, mp_policy=policy(cast_forward_inputs=True, param_dtype=torch.double)
    ),
    "bf16 parameters": lambda mesh: sharded(
        Net(), mesh, mp_policy=policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "bf16": lambda mesh: sharded(Net().bfloat16(), mesh, mp_policy=policy(param_dtype=torch.bfloat16)),
    "uneven shards": lambda mesh: sharded(Net(outputs=7), mesh),
    "a shard without a part": lambda mesh: sharded(Net(outputs=1), mesh),
    "frozen": frozen,
    "gathered until backward": lambda mesh: sharded(Net(), mesh, reshard_after_forward=False),
}
