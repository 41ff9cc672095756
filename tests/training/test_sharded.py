"""Modules that FSDP2 shards: with gradcast between the replicas they train as native HSDP does, bit for bit.

Each loop runs on two replicas of two shards, once under native HSDP and once attached; ``replicate()`` on two replicas.
"""

import gc
import os
import random
import time
from unittest import mock

import pytest

from gradcast.training.compat import sharding
from gradcast.training.model_layout import ShardedLayout
from training import compare, inside
from training.attached import attach, heard, not_refused
from training.needs import torch
from training.pool import on_ranks
from training.sharded import (
    BUILDS,
    IS_LATER,
    STEPS,
    WIDTH,
    Net,
    Scale,
    Training,
    a_part_is_unused,
    accumulated_over_steps,
    averaged,
    called_twice,
    clipped,
    differences,
    evaluated,
    in_between,
    kept_by_others,
    later_only,
    mesh_of,
    policy,
    prefetched,
    saved,
    sharded,
    steps,
    synchronized_twice,
    two_losses,
    under_no_sync,
    without_all_reduce,
    without_sync,
)

pytestmark = pytest.mark.filterwarnings("ignore")
nn = torch.nn


LOOPS = (
    steps, without_all_reduce, without_sync, synchronized_twice, two_losses, in_between, accumulated_over_steps,
    clipped, evaluated, saved, prefetched, under_no_sync, averaged,
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


def delayed(training: Training) -> None:
    """Each rank pauses at moments of its own: groups of replicas wait for each other in FSDP alone."""
    chance = random.Random(training.rank.index)

    def pause(*_):
        time.sleep(chance.choice([0, 0, 0.01, 0.03]))

    for each in training.module.modules():
        each.register_forward_pre_hook(pause)
        each.register_full_backward_hook(pause)
    for number in range(STEPS + 3):
        pause()
        training.step(number)


@pytest.mark.slow
@on_ranks(4)
def test_ranks_at_different_speeds_train_as_natively(rank, mode):
    return differences(rank, mode, delayed)


def memory_bytes() -> int:
    """The memory of all tensors that Python knows."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        storages = [sharding.local_of(each).untyped_storage() for each in found if each.layout == torch.strided]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@on_ranks(4)
def test_memory_is_that_of_one_more_copy_of_the_gradients(rank, mode):
    """After backward, beside native HSDP."""
    needed = []

    def large(mesh):
        torch.manual_seed(0)
        return sharded(nn.Sequential(nn.Linear(WIDTH, 4000), nn.Linear(4000, 5)), mesh)

    for each in (None, mode):
        before = memory_bytes()
        training = Training(rank, each, build=large)
        steps(training)
        training.optimizer.zero_grad()
        training.backward(STEPS)
        needed.append(memory_bytes() - before)
        gradients = sum(sharding.local_of(p.grad).nbytes for p in training.module.parameters() if p.grad is not None)
        if training.handle is not None:
            training.handle.detach()
        del training
        gc.collect()
    native, ours = needed
    return [] if ours <= native + 1.1 * gradients else [f"{ours} bytes, natively {native}, of {gradients} of gradients"]


@on_ranks(4)
def test_a_list_of_sharded_modules_trains_as_natively(rank, mode):
    """Every third pass goes through the first one alone."""
    mesh = mesh_of(rank)

    def trained(mode):
        torch.manual_seed(0)
        modules = [torch.distributed.fsdp.fully_shard(nn.Linear(6, 6), mesh=mesh) for _ in range(2)]
        params = [each for module in modules for each in module.parameters()]
        adam, seen = torch.optim.AdamW(params, lr=0.01), []
        handle = attach(modules, adam, mode, policy="fifo") if mode else None
        for number in range(STEPS):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + rank.index))
            adam.zero_grad()
            first = modules[0](x)
            loss = (first if number % 3 == 2 else modules[1](first)).square().mean()
            loss.backward()
            adam.step()
            seen.append(loss.detach())
        if handle is not None:
            handle.detach()
        return [seen, [each.to_local().detach().clone() for each in params]]

    return compare.trees(trained(mode), trained(None))


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


@on_ranks(4)
def test_the_plans_of_a_checkpoint_are_followed(rank):
    """Each group of replicas has saved its own."""
    first, native = Training(rank, "overlap"), Training(rank, None)
    steps(first)
    state = first.handle.state_dict()
    first.handle.detach()
    resumed = Training(rank, "overlap")
    resumed.handle.load_state_dict(state)
    assert not resumed.handle.measuring
    for each in (resumed, native):
        steps(each)
    return compare.trees(resumed.result(), native.result())


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
def test_looking_for_changes_waits_for_nothing(rank):
    training = Training(rank, "overlap")
    steps(training)
    session = inside.session_of(training.handle)
    due, layout = session.pending_names(), ShardedLayout(sharding.groups_of(training.module), [training.optimizer])
    assert due, "nothing is pending"
    return [] if not layout.changed() and session.pending_names() == due else ["it has waited"]


@on_ranks(4)
def test_the_log_names_the_shard(rank):
    """The replicas of the first one speak; the others' lines are at level debug, and their warnings are logged."""
    with heard() as lines:
        training = Training(rank, "overlap")
        steps(training)
        group = inside.session_of(training.handle).group
        group.warning("%s", group.names_of([0, 1]))
    replica, shard = divmod(rank.index, 2)
    name = f"replicas of shard {shard}: "
    assert name.removesuffix(": ") in training.handle.profile.name
    warning = f"{name}replicas 0 (rank {shard}) and 1 (rank {2 + shard})"
    if replica or shard:
        return [] if lines == [warning] * (not replica) else lines
    return [] if len(lines) > 1 and lines[-1] == warning and all(each.startswith(name) for each in lines) else lines


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
