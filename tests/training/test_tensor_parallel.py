"""Tensor-parallel parameters (DTensors): between the ranks with the same part gradcast averages as by hand.

Each loop runs on two replicas of two tensor-parallel ranks, once with an all-reduce of each local gradient behind
backward, and once attached.
"""

import contextlib
import os
import time
from unittest import mock

import pytest

import gradcast
from training import compare, inside
from training.attached import attach, not_refused
from training.needs import torch
from training.pool import on_ranks
from training.sharded import (
    BATCH,
    WIDTH,
    Block,
    Training,
    accumulated_over_steps,
    clipped,
    differences,
    evaluated,
    mesh_of,
    saved,
    steps,
)

pytestmark = pytest.mark.filterwarnings("ignore")
nn = torch.nn


class Tokens(nn.Module):
    """Rowwise, this embedding has a gradient that is whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, WIDTH)

    def forward(self, x):
        return self.table(x[:, 0].abs().mul(100).long() % 8)


class NormedBlock(Block):
    """The norm of SequenceParallel has a gradient that is partial on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Sequential):
    """``skips``: leaves block 2 out."""

    skips = False

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(Tokens(), NormedBlock(), NormedBlock(), nn.Linear(WIDTH, 5))

    def forward(self, x):
        for number, part in enumerate(self):
            x = x if number == 2 and self.skips else part(x)
        return x


def parallel(mesh, module=None) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    styles = {
        "0.table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "3": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),  # 5 outputs: uneven parts
    }
    for block in "12":
        styles |= {
            f"{block}.norm": SequenceParallel(sequence_dim=0),
            f"{block}.up": ColwiseParallel(input_layouts=Shard(0)),
            f"{block}.down": RowwiseParallel(output_layouts=Shard(0)),
        }
    return parallelize_module(module or Net(), mesh["shards"], styles)


class Parallel(Training):
    """``mode`` None: by hand. ``synchronizes``: the backward pass is averaged. ``all_skip``: both replicas skip."""

    all_skip = False

    def __init__(self, rank, mode, *, build=parallel, **options) -> None:
        mesh = mesh_of(rank)
        self.replicas, self.replica = mesh.get_group("replicas"), mesh.get_local_rank("replicas")
        self.synchronizes = True
        super().__init__(rank, mode, build=build, **options, **({"process_group": self.replicas} if mode else {}))

    def batch(self, number: int):
        generator = torch.Generator().manual_seed(100 * number + self.replica)
        return torch.randn(BATCH, WIDTH, generator=generator)

    def backward(self, number: int) -> None:
        super().backward(number)
        if self.handle is None and self.synchronizes:
            self.average()

    def average(self) -> None:
        """As FSDP: of the parameter's placements."""
        for parameter in self.module.parameters():
            if parameter.grad is None and parameter.requires_grad and not self.all_skip:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                local = parameter.grad.to_local()
                torch.distributed.all_reduce(local.mul_(1 / self.replicas.size()), group=self.replicas)


def in_no_sync(training: Parallel) -> None:
    for number in range(9):
        training.optimizer.zero_grad(set_to_none=number % 2 == 0)
        training.synchronizes = False
        with training.handle.no_sync() if training.handle else contextlib.nullcontext():
            training.backward(10 * number)
        training.synchronizes = True
        training.backward(10 * number + 1)
        training.optimizer.step()


def skipping(training: Parallel) -> None:
    """A block is used by both replicas, by none, and by one."""
    for number in range(12):
        training.all_skip = number % 3 == 1
        training.module.skips = training.all_skip or (number % 3 == 2 and training.replica == number % 2)
        training.step(number)


def with_sgd(training: Parallel) -> None:
    """Another optimizer, attached by itself."""
    if training.handle is not None:
        training.handle.detach()
    training.optimizer = torch.optim.SGD(training.module.parameters(), lr=1e-2, momentum=0.9)
    if training.handle is not None:
        training.handle = attach(training.module, training.optimizer, training.mode, training.replicas)
    steps(training)


def moved(training: Parallel) -> None:
    """Module.to() swaps the contents of DTensors, and with them the hooks."""
    for _ in range(2):
        steps(training)
        training.module.to("cpu")
    steps(training)


def frozen(mesh) -> nn.Module:
    module = Net()
    module[1].up.weight.requires_grad_(False)
    return parallel(mesh, module)


LOOPS = (in_no_sync, clipped, saved, moved, steps, accumulated_over_steps, evaluated, with_sgd, skipping)
FAST = 4


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loop",
    [*LOOPS[:FAST], *(pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS[FAST:])],
    ids=lambda loop: loop.__name__,
)
@on_ranks(4)
def test_loops_train_as_by_hand(rank, loop, mode):
    return differences(rank, mode, loop, Parallel)


@on_ranks(4)
def test_frozen_parts_stay_as_they_are(rank):
    return differences(rank, "overlap", steps, Parallel, build=frozen)


def thawed(training: Parallel) -> None:
    steps(training)
    weight = training.module[1].up.weight.requires_grad_(True)
    training.optimizer.add_param_group({"params": [weight]})
    steps(training)


@pytest.mark.slow
@on_ranks(4)
def test_thawed_parts_are_trained(rank):
    return differences(rank, "overlap", thawed, Parallel, build=frozen)


@on_ranks(4)
def test_training_equals_that_of_replicate(rank):
    from torch.distributed._composable.replicate_with_fsdp import replicate

    ours, native = Parallel(rank, "overlap"), Parallel(rank, None)
    replicate(native.module, mesh=mesh_of(rank)["replicas"])
    native.optimizer = torch.optim.AdamW(native.module.parameters(), lr=1e-2, foreach=False)
    native.synchronizes = False  # torch does it
    for each in (ours, native):
        steps(each)
    return compare.trees(ours.result(), native.result())


@on_ranks(4)
def test_updates_wait_until_parts_are_read(rank):
    """Whatever the delays of ranks: no collective of the mesh depends on what has arrived."""
    training = Parallel(rank, "overlap", policy="fifo")
    steps(training)
    training.module[2].register_forward_hook(lambda *_: time.sleep(0.02 * (rank.index * 7 % 4)))
    session, found = inside.session_of(training.handle), []
    for number in range(6):
        training.step(100 + number)
        found.append(set(session.pending_names()) == {name for name, _ in training.module.named_parameters()})
    return [] if all(found) else [f"steps in which all updates were pending: {found}"]


@on_ranks(4)
def test_a_part_that_the_program_holds_is_updated_in_step(rank):
    training = Parallel(rank, "overlap")
    steps(training)
    local = training.module[1].up.weight.detach().to_local()
    before = local.clone()
    training.step(50)
    return ["the update was pending"] if torch.equal(local, before) else []


@on_ranks(4)
def test_weights_of_the_program_count(rank):
    """Ranks of a mesh give the same."""
    ours, equal = Parallel(rank, "overlap"), Parallel(rank, None)
    for number in range(9):
        samples = 1 + ours.replica
        ours.optimizer.zero_grad()
        with ours.handle.weight(samples):
            ours.backward(number)
        ours.optimizer.step()
        equal.synchronizes = False
        equal.optimizer.zero_grad()
        equal.backward(number)
        for parameter in equal.module.parameters():
            parameter.grad.mul_(samples * 2 / 3)
        equal.average()
        equal.optimizer.step()
    return compare.trees(ours.result(), equal.result(), tolerance=1e-5)


class ByNorm(torch.optim.Optimizer):
    """Needs the norm of whole gradients, of which each rank has a part."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-3), alpha=0.01)


@pytest.mark.parametrize("kind", [Parallel, pytest.param(Training, marks=pytest.mark.slow)])
@on_ranks(4)
def test_steps_that_talk_to_the_mesh_are_refused(rank, kind):
    """Also under HSDP, in the warm-up, where all ranks step alike."""
    training = kind(rank, None)
    training.synchronizes, training.optimizer = False, ByNorm(training.module.parameters())
    attach(
        training.module,
        training.optimizer,
        process_group=mesh_of(rank).get_group("replicas") if kind is Parallel else None,
    )
    return not_refused(lambda: steps(training), "starts collective operations", "hook mode")


def attached(module, **options):
    return gradcast.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)


@on_ranks(4)
def test_what_tensor_parallel_modules_refuse(rank):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = mesh_of(rank)
    group = mesh.get_group("replicas")
    different = parallel(mesh)
    if mesh.get_local_rank("replicas"):
        different[3].bias = nn.Parameter(different[3].bias.redistribute(placements=[Replicate()]))
    local = parallel(mesh)
    _pre_dp_module_transform(local)
    in_ddp = nn.parallel.DistributedDataParallel(local, process_group=group)
    training, clips = Parallel(rank, "overlap"), gradcast.Options(clip=gradcast.Clip(norm=1.0))
    with mock.patch.dict(os.environ, {"GRADCAST_DISABLE": "1"}):
        wrong = not_refused(lambda: attached(parallel(mesh), process_group=group), "replicate()")
    for words, call in (
        ("the second one", lambda: attached(parallel(mesh))),
        ("the second one", lambda: attached(parallel(mesh), process_group=mesh.get_group("shards"))),
        ("placed as", lambda: attached(different, process_group=group)),
        ("_pre_dp_module_transform", lambda: attached(local, process_group=group)),
        ("_pre_dp_module_transform", lambda: attached(in_ddp)),
        ("clip in the loop", lambda: attached(parallel(mesh), process_group=group, options=clips)),
        ("torch.distributed.checkpoint", lambda: training.handle.snapshots("unused", every=3)),
        ("number of samples", lambda: gradcast.BalancedBatchSampler(range(64), training.handle, 8)),
        (
            "replicate()",
            lambda: gradcast.verify(parallel(mesh), lambda m: m(training.batch(0)).sum(), process_group=group),
        ),
    ):
        wrong += not_refused(call, words)
    return wrong


@pytest.mark.slow
@on_ranks(8, timeout_s=240)
def test_under_hsdp_two_by_two_it_trains_as_one_process(rank):
    """In double precision, against one process with the batches of all replicas and shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "data", "shards"))
    part, single = parallel(mesh, Net().double()), Net().double()
    for each in (part[1], part[2], part):
        fully_shard(each, mesh=mesh["replicas", "data"])
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (part, single)]
    handle = attach(part, optimizers[0])
    place = 2 * mesh.get_local_rank("replicas") + mesh.get_local_rank("data")
    for _ in range(9):
        batches = torch.randn(4, BATCH, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(5))
        for optimizer in optimizers:
            optimizer.zero_grad()
        part(batches[place]).square().mean().backward()
        sum(single(each).square().mean() for each in batches).div(4).backward()
        for optimizer in optimizers:
            optimizer.step()
    handle.flush()
    found = {name: parameter.full_tensor().detach() for name, parameter in part.named_parameters()}
    return compare.trees(found, {n: p.detach() for n, p in single.named_parameters()}, tolerance=1e-12)
