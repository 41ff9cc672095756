"""Modules that FSDP2 shards: with gradcast between the replicas they train as native HSDP does, bit for bit.

Each loop runs on two replicas of two shards, once under native HSDP and once attached; ``replicate()`` on two replicas.
"""

import contextlib
import copy
import os
from collections.abc import Callable
from unittest import mock

import pytest

import gradcast
from gradcast.training.compat import sharding
from training import compare, inside
from training.attached import attach, error_of, heard, not_refused
from training.needs import torch
from training.pool import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
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
        self.rank, self.mode = rank, mode
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


def kept_by_others(training: Training) -> None:
    """A pass that uses everything is kept, and the next one uses one block."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.module.set_requires_all_reduce(False)
        training.backward(10 * number)
        training.module.set_requires_all_reduce(True)
        training.module[1](training.batch(10 * number + 1)).square().mean().backward()
        for name, parameter in training.module.named_parameters():
            training.seen[f"{name} {number}"] = None if parameter.grad is None else parameter.grad.to_local().clone()
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


LOOPS = (
    steps, without_all_reduce, without_sync, synchronized_twice, two_losses, in_between, accumulated_over_steps,
    clipped, evaluated, saved, prefetched, under_no_sync,
)  # fmt: skip


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@on_ranks(4)
def test_loops_train_as_native_hsdp(rank, loop, mode):
    return differences(rank, mode, loop)


@pytest.mark.parametrize(
    "loop", [steps, *(pytest.param(loop, marks=pytest.mark.slow) for loop in LOOPS[1:])], ids=lambda loop: loop.__name__
)
@on_ranks(2)
def test_loops_train_as_native_replicate(rank, loop):
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh

    def build(_):
        module, mesh = Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("replicas",))
        for block in (module[1], module[2]):
            replicate(block, mesh=mesh)
        return replicate(module, mesh=mesh)

    return differences(rank, "overlap", loop, build=build)


def checkpointed(training: Training, folder) -> list[str]:
    """Saves while updates are due, trains on, and goes back to what was saved."""
    from torch.distributed.checkpoint import save

    steps(training)
    due = training.handle is None or inside.session_of(training.handle).pending_names()
    save(state_of(training), checkpoint_id=folder)
    steps(training)
    restored(training, folder)
    steps(training)
    return [] if due else ["nothing was due"]


def state_of(training: Training) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("module", "optimizer"), get_state_dict(training.module, training.optimizer), strict=True))


def restored(training: Training, folder) -> None:
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = state_of(training)
    load(state, checkpoint_id=folder)
    set_state_dict(
        training.module, training.optimizer, model_state_dict=state["module"], optim_state_dict=state["optimizer"]
    )


@on_ranks(4)
def test_checkpoints_by_dcp(rank, tmp_path):
    """Each side goes back to its own checkpoint, and a new one goes on from that of the other side."""
    native, ours = Training(rank, None), Training(rank, "overlap")
    wrong = checkpointed(native, tmp_path / "native") + checkpointed(ours, tmp_path / "ours")
    expected = native.result()
    wrong += compare.trees(ours.result(), expected)
    for mode, folder in ((None, "ours"), ("overlap", "native")):
        new = Training(rank, mode)
        restored(new, tmp_path / folder)
        steps(new)
        wrong += compare.trees(new.result(), expected)
    return wrong


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


FAST_BUILDS = ("bf16 parameters", "uneven shards", "a shard without a part")


@pytest.mark.parametrize(
    "build", [*FAST_BUILDS, *(pytest.param(name, marks=pytest.mark.slow) for name in BUILDS if name not in FAST_BUILDS)]
)
@on_ranks(4)
def test_models_train_as_native_hsdp(rank, build):
    return differences(rank, "overlap", steps, build=BUILDS[build])


@on_ranks(4)
def test_divisors_of_the_program_are_kept(rank):
    def build(mesh):
        module = sharded(Net(), mesh)
        for part in module.modules():
            if hasattr(part, "set_gradient_divide_factor"):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(8.0)
        return module

    return differences(rank, "overlap", steps, build=build)


@on_ranks(4)
def test_passes_of_a_shard_without_a_part(rank):
    return differences(rank, "overlap", without_all_reduce, build=BUILDS["a shard without a part"])


@pytest.mark.parametrize("build", ["fp32", "a shard without a part"])
@on_ranks(4)
def test_sums_of_groups_that_are_not_used_again(rank, build):
    """torch 2.15 averages them with the next pass; 2.11 not before the group is used."""
    return differences(rank, "overlap", kept_by_others, build=BUILDS.get(build, lambda mesh: sharded(Net(), mesh)))


def called_twice(training: Training) -> None:
    """A pass is kept, and the next one calls a block twice."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        training.module.set_requires_all_reduce(False)
        training.backward(10 * number)
        training.module.set_requires_all_reduce(True)
        outputs = [training.module(training.batch(10 * number + part)).square().mean() for part in (1, 2)]
        sum(outputs).backward()
        training.optimizer.step()


@on_ranks(4)
def test_sums_and_a_block_that_is_called_twice(rank):
    """torch 2.15 averages the sums where the first call ends in backward, and the gradients behind the second."""
    return differences(rank, "overlap", called_twice)


@on_ranks(4)
def test_bf16_that_computes_only(rank):
    """torch 2.11 reduces in bf16, too, which is refused; 2.15 in the parameters' type."""

    def build(mesh):
        return sharded(Net(), mesh, mp_policy=policy(param_dtype=torch.bfloat16))

    if IS_LATER:
        return differences(rank, "overlap", steps, build=build)
    return not_refused(lambda: Training(rank, "overlap", build=build), "wire='bf16'")


@later_only
@on_ranks(4)
def test_parameters_that_compute_in_types_of_their_own(rank):
    def type_of(parameter):
        return torch.float32 if parameter.dim() == 3 else None

    def build(mesh):
        own = policy(param_dtype=torch.bfloat16, param_dtype_override_fn=type_of)
        return sharded(Net().append(Scale()), mesh, mp_policy=own)

    return differences(rank, "overlap", in_between, build=build)


@later_only
@on_ranks(4)
def test_several_groups_of_one_module(rank):
    """Which a program has that gives parameters meshes of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    def build(_):
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicas", "shards", "whole"))
        shards, whole = (HSDPMeshInfo(mesh["replicas", name], 1, 0) for name in ("shards", "whole"))

        def place(parameter):
            return ShardPlacementResult(None, shards if parameter.dim() == 1 else whole)

        module = sharded(Net(), mesh["replicas", "shards"], shard_placement_fn=place)
        assert len(sharding.groups_of(module)) == 6
        return module

    return differences(rank, "overlap", in_between, build=build)


@later_only
@on_ranks(4)
def test_a_backward_pass_that_the_program_ends_is_refused(rank):
    training = Training(rank, "overlap")
    training.module.set_manual_backward_finalization(True)
    training.backward(0)
    wrong = not_refused(training.module.finalize_backward, "set_manual_backward_finalization")
    return wrong + not_refused(training.module.reset_iter_state, "from a checkpoint")


@on_ranks(4)
def test_what_is_not_used_in_a_step_keeps_its_gradient(rank):
    return differences(rank, "overlap", a_part_is_unused)


class Skipping(Net):
    """Omits a block where ``skips`` says so. One rank of each replica has no part of the last layer."""

    skips = False

    def forward(self, x):
        x = self[1](self[0](x))
        return self[3](x if self.skips else self[2](x))


def kept_for_a_later_step(training: Training) -> None:
    """A pass that is not averaged uses a block that the averaged one of every third step omits; the fourth step has
    no averaged one."""
    for number in range(STEPS):
        training.optimizer.zero_grad()
        for part in range(2):
            training.module.set_requires_all_reduce(part == 1 and number != 3)
            training.module.skips = part == 1 and number % 3 == 1
            training.backward(10 * number + part)
        training.optimizer.step()


@on_ranks(4)
def test_gradients_that_are_not_averaged_are_kept_as_natively(rank):
    return differences(rank, "overlap", kept_for_a_later_step, build=lambda mesh: sharded(Skipping(outputs=1), mesh))


@on_ranks(4)
def test_replicas_of_the_programs_own_are_averaged(rank):
    """A mesh of one dimension, and a process group beside it."""
    mesh = mesh_of(rank)
    native = Training(rank, None)
    ours = Training(
        rank, "overlap", build=lambda mesh: sharded(Net(), mesh["shards"]), process_group=mesh.get_group("replicas")
    )
    for each in (native, ours):
        steps(each)
    return compare.trees(ours.result(), native.result())


@on_ranks(4)
def test_detach_gives_the_all_reduce_back(rank):
    training, native = Training(rank, "overlap"), Training(rank, None)
    for each in (training, native):
        steps(each)
    training.result()
    training.handle.detach()
    training.handle = None
    for each in (training, native):
        steps(each)
    return compare.trees(training.result(), native.result())


@on_ranks(4)
def test_detach_says_that_it_drops_what_was_not_averaged(rank):
    training = Training(rank, "overlap")
    steps(training)
    training.module.set_requires_all_reduce(False)
    training.backward(50)
    with heard() as lines:
        training.handle.detach()
    return [] if any("left of 12 parameters are dropped" in line for line in lines) else lines


@on_ranks(4)
def test_updates_wait_until_a_group_is_gathered(rank):
    """Where a group is gathered, its own parameters are complete, and later ones' are not."""
    training = Training(rank, "overlap", policy="fifo")
    steps(training)
    training.backward(50)
    training.optimizer.step()
    session, found = inside.session_of(training.handle), {}
    due = set(session.pending_names())
    for name in ("1.", "2."):
        block = training.module[int(name[0])]
        block.up.register_forward_pre_hook(lambda *_, name=name: found.update({name: session.pending_names()}))
    training.module(training.batch(51))
    wrong = [
        f"{names} where block {block} begins"
        for block, names in found.items()
        if any(n.startswith(block) for n in names)
    ]
    return wrong if due == {name for name, _ in training.module.named_parameters()} else [f"only {due} were pending"]


@on_ranks(4)
def test_a_number_of_shards_after_forward_is_refused(rank):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicas", "shards"))
    group = sharding.groups_of(sharded(Net(), mesh, reshard_after_forward=2))[0]
    return [] if "True or False" in (group.reason_against() or "") else [group.reason_against()]


def refusals(rank) -> dict[str, str]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    mesh = mesh_of(rank)

    def told(build, **options) -> str:
        module = build(mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        code, sentence = error_of(lambda: gradcast.attach(module, optimizer, **options))
        assert code == "invalid_use", sentence
        return sentence

    def other_seed(mesh):
        module = Net()
        with torch.no_grad():
            module[1].up.weight.add_(mesh.get_local_rank("replicas"))
        return sharded(module, mesh)

    def gathered(mesh):
        module = sharded(Net(), mesh)
        module.unshard()
        return module

    plain = lambda mesh: sharded(Net(), mesh)  # noqa: E731
    return {
        "differs between replicas": told(other_seed),
        "no replicas": told(lambda mesh: sharded(Net(), mesh["shards"])),
        "bf16 reduction": told(lambda mesh: sharded(Net(), mesh, mp_policy=policy(reduce_dtype=torch.bfloat16))),
        "fp16": told(lambda mesh: sharded(Net(), mesh, mp_policy=policy(reduce_dtype=torch.float16))),
        "offload": told(lambda mesh: sharded(Net(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "gathered": told(gathered),
        "local": told(plain, options=gradcast.Options(local=gradcast.LocalSteps(4))),
    }


def test_refusals_say_what_to_do(ranks):
    expected = {
        "differs between replicas": "same seed",
        "no replicas": "mesh of two dimensions",
        "bf16 reduction": "wire='bf16'",
        "fp16": "reduce_dtype=torch.float32",
        "offload": "omit offload_policy",
        "gathered": "module.reshard()",
        "local": "omit it",
    }
    for found in ranks.run(4, refusals):
        for name, sentence in expected.items():
            assert sentence in found[name], f"{name}: {found[name]}"


@on_ranks(4)
def test_all_shards_refuse_what_the_replicas_of_one_refuse(rank):
    """The others would wait for these ranks in FSDP. All attach afterwards."""
    mesh, module = mesh_of(rank), Net()
    with torch.no_grad():
        module[1].up.weight[-1].add_(mesh.get_local_rank("replicas"))  # a row of the second shard
    module = sharded(module, mesh)
    code, sentence = error_of(lambda: gradcast.attach(module, torch.optim.SGD(module.parameters(), lr=0.1)))
    wrong = [] if code == "invalid_use" and "1.up.weight differs between replicas 0 and 1" in sentence else [sentence]
    return wrong + differences(rank, "overlap", steps)


@on_ranks(4)
def test_what_takes_ranks_for_equal_is_refused(rank):
    training = Training(rank, "overlap")
    sentences = [
        error_of(lambda: training.handle.snapshots("unused", every=3)),
        error_of(lambda: gradcast.BalancedBatchSampler(range(64), training.handle, 8)),
        error_of(lambda: training.handle.weight(2).__enter__()),
        error_of(lambda: gradcast.attach([sharded(Net(), mesh_of(rank))], training.optimizer)),
    ]
    return [str(each) for each in sentences if each[0] != "invalid_use" or "shard" not in each[1]]


@on_ranks(4)
def test_hooks_of_the_program_are_refused(rank):
    training = Training(rank, "overlap")
    training.module[1].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    code, sentence = error_of(lambda: training.step(0))
    return [] if code == "invalid_use" and "remove the hook" in sentence else [sentence]


class Checkpointed(Net):
    """Calls a block twice, and recomputes in backward."""

    def forward(self, x):
        x = self[0](x)
        for block in (self[1], self[1], self[2]):
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self[3](x)


@on_ranks(4)
def test_blocks_that_are_recomputed_train_as_under_native_hsdp(rank):
    return differences(rank, "overlap", steps, build=lambda mesh: sharded(Checkpointed(), mesh))


class ReducedAgain(Net):
    """Makes FSDP reduce a group again in the same pass, as it does in some programs with checkpoints."""

    def forward(self, x):
        x = self[0](x)
        x.register_hook(self.reduce_again)
        return self[3](self[2](self[1](x)))

    def reduce_again(self, _):
        group = self[1]._get_fsdp_state()._fsdp_param_group
        for each in group.fsdp_params:
            each.unsharded_param.grad = torch.ones_like(each.unsharded_param)
        group.post_backward()


@pytest.mark.parametrize(
    "loop",
    [steps, *(pytest.param(loop, marks=pytest.mark.slow) for loop in (synchronized_twice, without_all_reduce))],
    ids=lambda loop: loop.__name__,
)
@on_ranks(4)
def test_groups_that_are_reduced_twice_train_as_under_native_hsdp(rank, mode, loop):
    return differences(rank, mode, loop, build=lambda mesh: sharded(ReducedAgain(), mesh))


@on_ranks(4)
def test_fewer_bits_between_replicas_keep_them_equal(rank):
    """As the guide advises for bf16."""
    native, ours = Training(rank, None), Training(rank, "overlap", wire="bf16")
    for each in (native, ours):
        steps(each)
    found, exact = (each.result()["parameters"] for each in (ours, native))
    assert ours.handle.stats()["wire"] == "bf16"
    assert compare.trees(found, exact), "nothing was rounded"
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, found, group=mesh_of(rank).get_group("replicas"))
    return compare.trees(*gathered) + compare.apart(found, exact, 1e-2)


@on_ranks(4)
def test_one_variable_leaves_everything_to_fsdp(rank):
    with mock.patch.dict(os.environ, {"GRADCAST_DISABLE": "1"}):
        ours = Training(rank, "overlap")
    native = Training(rank, None)
    for each in (native, ours):
        steps(each)
    assert ours.handle.stats()["mode"] == "ddp"
    ours.handle = None
    return compare.trees(ours.result(), native.result())


@on_ranks(4)
def test_the_gradients_of_a_group_are_ready_together(rank):
    """So the policy fsdp sends what FSDP would: a block for each group, and the step message."""
    training = Training(rank, "hook", policy="fsdp")
    steps(training)
    ready = {tensor.name: tensor.ready_ns for tensor in training.handle.profile.tensors}
    groups = {name[0] if name[0] in "12" else "root" for name in ready if name[0].isdigit()}
    times = {g: {t for name, t in ready.items() if name.startswith(g)} for g in groups - {"root"}}
    wrong = [f"group {g} is ready at {found}" for g, found in times.items() if len(found) != 1]
    blocks = training.handle.plan.blocks
    return wrong if len(blocks) in (len(groups), len(groups) + 1) else [f"{len(blocks)} blocks", *wrong]


@on_ranks(4)
def test_a_changed_model_is_refused(rank):
    training = Training(rank, "overlap", build=frozen)
    steps(training)
    for parameter in training.module.parameters():
        parameter.requires_grad_(True)
    code, sentence = error_of(lambda: training.step(0))
    return [] if code == "invalid_use" and "attach again" in sentence else [sentence]


@on_ranks(4)
def test_a_pass_that_is_averaged_in_parts_is_refused(rank):
    training = Training(rank, "overlap")
    steps(training)
    training.module[1].set_requires_all_reduce(False)
    code, sentence = error_of(lambda: training.step(0))
    return [] if code == "invalid_use" and "root module" in sentence else [sentence]
