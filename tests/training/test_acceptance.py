"""What attach takes over wherever it lies in the module, and who else's gradients it refuses."""

import types

import pytest

import gradcast
from training.needs import torch
from training.sides import DDP, Side, differences, net, refusal

nn = torch.nn
distributed = torch.distributed


def sgd(module, rate=0.1):
    return torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)


class Holder(nn.Module):
    """As Fabric's and Accelerate's wrappers are."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, *inputs):
        return self.held(*inputs)


def compiled(module):
    return torch.compile(module, backend="eager")


def fabric(ddp):
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    strategies = pytest.importorskip("lightning.fabric.strategies")
    return wrappers._FabricModule(ddp, strategies.DDPStrategy(), ddp.module)


WRAPPERS = {
    "compiled": compiled,
    "held": Holder,
    "held and compiled": lambda ddp: Holder(compiled(ddp)),
    "compiled and held": lambda ddp: compiled(Holder(ddp)),
    "fabric": fabric,
}


def train_wrapped(side, name, called_before=False):
    module = net()
    whole = WRAPPERS[name](DDP(module))
    optimizer = sgd(module)
    if called_before:  # the compiler has made its code
        whole(side.batch(99)).square().sum().backward()
    side.attach(whole, optimizer)
    return side.trained(whole, module, optimizer)


def run_wrapped(rank, name, mode, called_before):
    try:
        return differences(rank, lambda side: train_wrapped(side, name, called_before), mode)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_ddp_inside_of_a_wrapper_is_taken_over(ranks, name, mode):
    if name == "fabric":
        pytest.importorskip("lightning")
    for found in ranks.run(2, run_wrapped, name, mode, False):
        assert found == []


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_ddp_that_was_compiled_and_called_before_is_taken_over(ranks, mode):
    for found in ranks.run(2, run_wrapped, "compiled", mode, True):
        assert found == []


def ddp_around(side):
    """attach() is given what lies inside, and the loop calls the wrapper."""
    module = net()
    ddp, optimizer = DDP(module), sgd(module)
    side.attach(ddp.module, optimizer)
    return side.trained(ddp, module, optimizer)


def ddp_afterwards(side):
    module = net()
    optimizer = sgd(module)
    side.attach(module, optimizer)
    return side.trained(DDP(module), module, optimizer)


def ddp_afterwards_compiled(side):
    module = net()
    optimizer = sgd(module)
    side.attach(module, optimizer)
    return side.trained(compiled(DDP(module)), module, optimizer)


def comm_hook_afterwards(side):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    module = net()
    ddp, optimizer = DDP(module), sgd(module)
    side.attach(ddp, optimizer)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return side.trained(ddp, module, optimizer)


def two_ddps(side):
    whole = nn.ModuleList([DDP(net()), DDP(net())])
    side.attach(whole, sgd(whole))


def a_parameter_outside(side):
    whole = Holder(DDP(net()))
    whole.scale = nn.Parameter(torch.ones(1))
    side.attach(whole, sgd(whole))


def python_reducer(side):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp = DDP(net())
        side.attach(ddp, sgd(ddp))


def attached_inside(side):
    module = net()
    gradcast.attach(module[0])
    side.attach(module, sgd(module))


def fsdp(side):
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    side.attach(whole, sgd(whole))


def fsdp_inside(side):
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole = Holder(FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu")))
    side.attach(whole.held.module, sgd(whole))


def fsdp2(side):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
    side.attach(whole, sgd(whole))


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


def data_parallel(side):
    whole = nn.DataParallel(net())
    side.attach(whole, sgd(whole))


def update_in_backward(side):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    side.attach(module, sgd(module))


REFUSED = {
    "ddp around": (ddp_around, "DistributedDataParallel"),
    "ddp afterwards": (ddp_afterwards, "DistributedDataParallel"),
    "ddp afterwards, compiled": (ddp_afterwards_compiled, "DistributedDataParallel"),
    "comm hook afterwards": (comm_hook_afterwards, "communication hook"),
    "two ddps": (two_ddps, "2 DistributedDataParallel modules"),
    "a parameter outside": (a_parameter_outside, "scale lies outside"),
    "python reducer": (python_reducer, "python_reducer"),
    "attached inside": (attached_inside, "attached"),
    "fsdp": (fsdp, "FSDP"),
    "fsdp inside": (fsdp_inside, "FSDP"),
    "fsdp2": (fsdp2, "fully_shard"),
    "zero": (zero, "ZeroRedundancyOptimizer"),
    "local sgd": (local_sgd, "PostLocalSGDOptimizer"),
    "data parallel": (data_parallel, "DataParallel"),
    "update in backward": (update_in_backward, "_apply_optimizer_in_backward"),
}


def run_refused(rank, name, mode):
    try:
        return refusal(rank, REFUSED[name][0], mode)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("name", REFUSED)
def test_other_owners_of_gradients_are_refused_by_name(ranks, name):
    for words in ranks.run(2, run_refused, name, "overlap"):
        assert REFUSED[name][1] in words


@pytest.mark.parametrize("name", ["ddp around", "ddp afterwards", "fsdp", "fsdp2"])
def test_other_owners_are_refused_in_hook_mode(ranks, name):
    for words in ranks.run(2, run_refused, name, "hook"):
        assert REFUSED[name][1] in words


def fake(package, name, base=object):
    """A class of the same name and module as that of a library which cannot be installed here."""
    return types.new_class(name, (base,), exec_body=lambda space: space.update(__module__=package))


FAKE_MODULES = {
    "DeepSpeed": ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    "Megatron": ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    "apex": ("apex.parallel.distributed", "DistributedDataParallel"),
    "fairscale's FSDP": ("fairscale.nn.data_parallel.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    "fairscale's ShardedDataParallel": ("fairscale.nn.data_parallel.sharded_ddp", "ShardedDataParallel"),
}
FAKE_OPTIMIZERS = {
    "horovod": ("horovod.torch.optimizer", "_DistributedOptimizer"),
    "horovod under the user's name": ("horovod.torch.optimizer", "SGD"),
}
# Not optimizers of torch.
FAKE_ENGINES = {
    "deepspeed": ("deepspeed.runtime.zero.stage_1_and_2", "ZeROOptimizer"),
    "megatron": ("megatron.core.optimizer.optimizer", "MegatronOptimizer"),
    "torch.distributed": ("torch.distributed.optim.optimizer", "DistributedOptimizer"),
}
PARAMETER_MARKS = {"ds_id": "DeepSpeed", "main_grad": "Megatron"}


def attach_fake_module(side, package, name):
    whole = fake(package, name, Holder)(net())
    side.attach(whole, sgd(whole))


def attach_fake_optimizer(side, package, name):
    module = net()
    side.attach(module, fake(package, name, torch.optim.SGD)(module.parameters(), lr=0.1))


def attach_fake_engine(side, package, name):
    side.attach(net(), fake(package, name)())


def attach_marked(side, mark):
    module = net()
    setattr(module[2].weight, mark, 0)
    side.attach(module, sgd(module))


def run_fakes(rank):
    modules = {
        called: refusal(rank, lambda side, which=which: attach_fake_module(side, *which), "overlap")
        for called, which in FAKE_MODULES.items()
    }
    optimizers = {
        called: refusal(rank, lambda side, which=which: attach_fake_optimizer(side, *which), "overlap")
        for called, which in FAKE_OPTIMIZERS.items()
    }
    optimizers |= {
        called: refusal(rank, lambda side, which=which: attach_fake_engine(side, *which), "overlap")
        for called, which in FAKE_ENGINES.items()
    }
    modules |= {
        called: refusal(rank, lambda side, mark=mark: attach_marked(side, mark), "overlap")
        for mark, called in PARAMETER_MARKS.items()
    }
    return modules, optimizers


def test_libraries_that_cannot_be_installed_here_are_known_by_name(ranks):
    for modules, optimizers in ranks.run(2, run_fakes):
        for called, words in modules.items():
            assert called in words
        for called, words in optimizers.items():
            assert called.split()[0] in words


# --- hooks that use a gradient before it is averaged ---


def steps_in_a_hook(side, when):
    """An optimizer of its own for each parameter, stepped inside of backward."""
    module = net()
    # Gradients are not averaged yet where DDP runs these, so DDP's ranks drift apart: nothing to compare with.
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in module.parameters()}
    optimizer = sgd(module)

    def register():
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    if when == "before":
        register()
    side.attach(module, optimizer)
    if when == "after":
        register()
    return side.trained(module, module, optimizer)


def run_steps_in_a_hook(rank, when, mode):
    return refusal(rank, lambda side: steps_in_a_hook(side, when), mode)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_optimizer_that_steps_inside_of_backward_is_refused(ranks, when, mode):
    for words in ranks.run(2, run_steps_in_a_hook, when, mode):
        assert "inside backward" in words


def looks_in_a_hook(side):
    """Hooks that read and change gradients are as with DDP: they see the rank's own, which are averaged then."""
    module = net()
    ddp = DDP(module) if side.name == "ddp" else module
    optimizer, seen = sgd(module), []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    side.attach(module, optimizer)
    module[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(0.5).clone()))
    return side.trained(ddp, module, optimizer), seen


def run_looks_in_a_hook(rank, mode):
    return differences(rank, looks_in_a_hook, mode)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_hooks_that_read_and_change_gradients_see_what_they_see_with_ddp(ranks, mode):
    for found in ranks.run(2, run_looks_in_a_hook, mode):
        assert found == []


def test_nothing_else_is_taken_for_a_module(ranks):
    for words in ranks.run(2, refused_kind):
        assert "a torch.nn.Module is expected" in words


def refused_kind(rank):
    return refusal(rank, lambda side: side.attach([net()], sgd(net())), "overlap")


def one_side(rank):
    """``Side`` itself: the programs above do train, and to other values than they begin with."""
    before = {name: p.detach().clone() for name, p in net().named_parameters()}
    after = train_wrapped(Side("ddp", rank.index), "held")
    return [name for name, value in before.items() if torch.equal(value, after[name])]


def test_the_programs_change_every_parameter(ranks):
    for unchanged in ranks.run(2, one_side):
        assert unchanged == []
