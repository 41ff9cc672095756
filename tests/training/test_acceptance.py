"""What attach takes over wherever it lies in the module, and who else's gradients it refuses."""

import importlib.util
import types

import pytest

import gradcast
from training.needs import torch
from training.pair import DDP, differences, net, refused
from training.pool import on_ranks

pytest.importorskip("training.needs")
from fuzz_training.prelude import Holder, fabric_module

nn = torch.nn


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def compiled(module):
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "compiled": compiled,
    "held": Holder,
    "fabric": fabric_module,
    "held and compiled": lambda ddp: Holder(compiled(ddp)),
    "compiled and held": lambda ddp: compiled(Holder(ddp)),
}
NEEDS_LIGHTNING = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="this needs lightning: pip install lightning"
)


def train_wrapped(side, name, called_before=False):
    module = net()
    whole = WRAPPERS[name](DDP(module))
    optimizer = sgd(module)
    if called_before:  # the compiler has made its code
        whole(side.batch(99)).square().sum().backward()
    side.attach(whole, optimizer)
    try:
        return side.trained(whole, module, optimizer)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "called_before"),
    [
        *((name, False) for name in WRAPPERS if name != "fabric"),
        ("compiled", True),
        pytest.param("fabric", False, marks=NEEDS_LIGHTNING),
    ],
)
@on_ranks(2)
def test_a_ddp_inside_of_a_wrapper_is_taken_over(rank, name, called_before, mode):
    return differences(rank, train_wrapped, mode, name, called_before)


def ddp_around(side):
    """attach() is given what lies inside, and the loop calls the wrapper."""
    module = net()
    ddp, optimizer = DDP(module), sgd(module)
    side.attach(ddp.module, optimizer)
    return side.trained(ddp, module, optimizer)


def ddp_afterwards(side, around=lambda ddp: ddp):
    module = net()
    optimizer = sgd(module)
    side.attach(module, optimizer)
    return side.trained(around(DDP(module)), module, optimizer)


def comm_hook_afterwards(side):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module = net()
    ddp, optimizer = DDP(module), sgd(module)
    side.attach(ddp, optimizer)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return side.trained(ddp, module, optimizer)


def attach_whole(side, whole):
    side.attach(whole, sgd(whole))


def a_parameter_outside(side):
    whole = Holder(DDP(net()))
    whole.scale = nn.Parameter(torch.ones(1))
    attach_whole(side, whole)


def python_reducer(side):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        attach_whole(side, DDP(net()))


def attached_inside(side):
    module = net()
    gradcast.attach(module[0])
    attach_whole(side, module)


def sharded():
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(side):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    attach_whole(side, fully_shard(net(), mesh=init_device_mesh("cpu", (2,))))


def zero(side):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DDP(net())
    side.attach(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1))


def local_sgd(side):
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DDP(net())
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    side.attach(ddp, PostLocalSGDOptimizer(sgd(ddp), averager))


def update_in_backward(side):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    attach_whole(side, module)


REFUSED = {
    "ddp around": (ddp_around, "DistributedDataParallel"),
    "ddp afterwards": (ddp_afterwards, "DistributedDataParallel"),
    "ddp afterwards, compiled": (lambda side: ddp_afterwards(side, compiled), "DistributedDataParallel"),
    "comm hook afterwards": (comm_hook_afterwards, "communication hook"),
    "two ddps": (
        lambda side: attach_whole(side, nn.ModuleList([DDP(net()), DDP(net())])),
        "2 DistributedDataParallel modules",
    ),
    "a parameter outside": (a_parameter_outside, "scale lies outside"),
    "python reducer": (python_reducer, "python_reducer"),
    "attached inside": (attached_inside, "attached"),
    "fsdp": (lambda side: attach_whole(side, sharded()), "FSDP"),
    "fsdp inside": (lambda side: attach_whole(side, sharded().module), "FSDP"),
    "fsdp2": (fsdp2, "fully_shard"),
    "zero": (zero, "ZeroRedundancyOptimizer"),
    "local sgd": (local_sgd, "PostLocalSGDOptimizer"),
    "data parallel": (lambda side: attach_whole(side, nn.DataParallel(net())), "DataParallel"),
    "update in backward": (update_in_backward, "_apply_optimizer_in_backward"),
}


HOOK_MODE = ["ddp around", "ddp afterwards", "fsdp", "fsdp2"]


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "overlap") for name in REFUSED), *((n, "hook") for n in HOOK_MODE)]
)
@on_ranks(2)
def test_other_owners_of_gradients_are_refused_by_name(rank, name, mode):
    program, words = REFUSED[name]
    try:
        return refused(rank, program, mode, words)
    finally:
        torch.compiler.reset()


def fake(package, name, base=object):
    """A class of the same name and module as that of a library which cannot be installed here."""
    return types.new_class(name, (base,), exec_body=lambda space: space.update(__module__=package))


def fake_module(side, package, name):
    attach_whole(side, fake(package, name, Holder)(net()))


def fake_optimizer(side, package, name):
    module = net()
    side.attach(module, fake(package, name, torch.optim.SGD)(module.parameters(), lr=0.1))


def fake_engine(side, package, name):
    """No optimizer of torch."""
    side.attach(net(), fake(package, name)())


def marked(side, mark):
    module = net()
    setattr(module[2].weight, mark, 0)
    attach_whole(side, module)


# What is attached, and what it is called.
FAKES = [
    (fake_module, ("deepspeed.runtime.engine", "DeepSpeedEngine"), "DeepSpeed"),
    (fake_module, ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"), "Megatron"),
    (fake_module, ("apex.parallel.distributed", "DistributedDataParallel"), "apex"),
    (fake_module, ("fairscale.nn.data_parallel.fully_sharded", "FullyShardedDataParallel"), "fairscale's FSDP"),
    (fake_module, ("fairscale.nn.data_parallel.ddp", "ShardedDataParallel"), "fairscale's ShardedDataParallel"),
    (fake_optimizer, ("horovod.torch.optimizer", "_DistributedOptimizer"), "horovod"),
    (fake_optimizer, ("horovod.torch.optimizer", "SGD"), "horovod"),  # under the name of the user's own
    (fake_engine, ("deepspeed.runtime.zero.stage_1_and_2", "ZeROOptimizer"), "deepspeed"),
    (fake_engine, ("megatron.core.optimizer.optimizer", "MegatronOptimizer"), "megatron"),
    (fake_engine, ("torch.distributed.optim.optimizer", "DistributedOptimizer"), "torch.distributed"),
    (marked, ("ds_id",), "DeepSpeed"),
    (marked, ("main_grad",), "Megatron"),
]


@on_ranks(2)
def test_libraries_that_cannot_be_installed_here_are_known_by_name(rank):
    return [
        found
        for make, of, called in FAKES
        for found in refused(rank, lambda side, make=make, of=of: make(side, *of), "overlap", called)
    ]


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_an_optimizer_that_steps_inside_of_backward_is_refused(rank, when, mode):
    """One for each parameter. Gradients are not averaged yet where DDP runs these hooks: its ranks drift apart."""

    def program(side):
        module = net()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}
        optimizer = sgd(module)
        for moment in ("before", "after"):
            if moment == when:
                for parameter in module.parameters():
                    parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
            if moment == "before":
                side.attach(module, optimizer)
        return side.trained(module, module, optimizer)

    return refused(rank, program, mode, "inside backward")


def train_scripted(side, wrapper):
    module = net()
    optimizer = sgd(module)
    called = wrapper(torch.jit.script(module))
    if side.name != "ddp":
        side.attach(called, optimizer, policy="fifo")
    elif wrapper is not DDP:
        called = DDP(called)
    return side.trained(called, module, optimizer)


@on_ranks(2)
def test_a_scripted_module_trains_inside_another(rank, mode):
    """torch refuses hooks around its forward."""
    found = refused(rank, lambda side: train_scripted(side, lambda module: module), mode, "ScriptModule", "attribute")
    with torch.jit.optimized_execution(False):  # whose roundings change from call to call
        return found + [line for each in (Holder, DDP) for line in differences(rank, train_scripted, mode, each)]
