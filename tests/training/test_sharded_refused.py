"""Refusals of modules that FSDP2 shards: on every rank, with what to do."""

import pytest

import gradcast
from gradcast.training.compat import sharding
from training import compare
from training.attached import error_of, not_refused
from training.needs import torch
from training.pool import on_ranks
from training.sharded import Net, Training, differences, frozen, later_only, mesh_of, policy, sharded, steps

pytestmark = pytest.mark.filterwarnings("ignore")


@later_only
@on_ranks(4)
def test_a_backward_pass_that_the_program_ends_is_refused(rank):
    training = Training(rank, "overlap")
    training.module.set_manual_backward_finalization(True)
    training.backward(0)
    wrong = not_refused(training.module.finalize_backward, "set_manual_backward_finalization")
    return wrong + not_refused(training.module.reset_iter_state, "from a checkpoint")


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
        error_of(lambda: gradcast.attach([sharded(Net(), mesh_of(rank)), Net()], training.optimizer)),
    ]
    return [str(each) for each in sentences if each[0] != "invalid_use" or "shard" not in each[1]]


@on_ranks(4)
def test_hooks_of_the_program_are_refused(rank):
    training = Training(rank, "overlap")
    training.module[1].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    code, sentence = error_of(lambda: training.step(0))
    return [] if code == "invalid_use" and "remove the hook" in sentence else [sentence]


@on_ranks(4)
def test_a_changed_model_is_refused(rank):
    training = Training(rank, "overlap", build=frozen)
    steps(training)
    for parameter in training.module.parameters():
        parameter.requires_grad_(True)
    code, sentence = error_of(lambda: training.step(0))
    return [] if code == "invalid_use" and "attach again" in sentence else [sentence]


@on_ranks(4)
def test_a_converted_model_is_refused_and_trains_on_without_gradcast(rank):
    """Module.to() swaps the contents of DTensors, also where it changes nothing."""
    ours, native = Training(rank, "overlap"), Training(rank, None)
    for each in (ours, native):
        steps(each)
        each.module.to("cpu")
        each.optimizer.zero_grad()
    wrong = not_refused(lambda: ours.backward(50), "attach again")
    ours.handle.detach()
    ours.handle = None
    for each in (ours, native):
        steps(each)
    return wrong + compare.trees(ours.result(), native.result())


@on_ranks(4)
def test_a_pass_that_is_averaged_in_parts_is_refused(rank):
    training = Training(rank, "overlap")
    steps(training)
    training.module[1].set_requires_all_reduce(False)
    code, sentence = error_of(lambda: training.step(0))
    return [] if code == "invalid_use" and "root module" in sentence else [sentence]
