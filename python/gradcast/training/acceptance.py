"""The models that ``attach`` accepts: one decision over the module tree, its parameters' hooks, and the optimizers.

Every gradient has one owner. So a module is accepted if nothing else reduces its gradients, or if one
DistributedDataParallel anywhere in the tree does, whose reduction gradcast takes over. Anything else that puts hooks
behind the accumulation of gradients is refused, by its name if it is known. docs/reference/guarantees.md has the
decision as a table.
"""

import collections
import dataclasses
import gc
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.training.compat import extension, sharding
from gradcast.training.compat.ddp_takeover import check_comm_hooks, has_buffer_hook
from gradcast.training.compat.pipeline_stages import Stage
from gradcast.training.compat.wrappers import the_ddp
from gradcast.training.step import partial_step
from gradcast.training.step.partial_step_check import require_splittable
from gradcast.training.step.step_settings import Read

# Modules that own gradients or parameters: package and name of the class, what to call it, and why it is refused.
_MODULE_OWNERS = (
    ("torch.distributed", "FullyShardedDataParallel", "FSDP", "FSDP shards parameters and reduces gradients itself"),
    ("torch.nn.parallel", "DataParallel", "DataParallel", "it computes on several devices from one process"),
    ("deepspeed", "DeepSpeedEngine", "DeepSpeed's engine", "it reduces gradients and updates parameters itself"),
    ("megatron", "DistributedDataParallel", "Megatron's DistributedDataParallel", "it reduces gradients itself"),
    ("apex", "DistributedDataParallel", "apex's DistributedDataParallel", "it reduces gradients itself"),
    ("fairscale", "FullyShardedDataParallel", "fairscale's FSDP", "it shards parameters and reduces gradients itself"),
    ("fairscale", "ShardedDataParallel", "fairscale's ShardedDataParallel", "it reduces gradients itself"),
)
_OPTIMIZER_OWNERS = (
    ("torch.distributed", "ZeroRedundancyOptimizer", "its step() updates a part of the parameters and sends them"),
    ("torch.distributed", "PostLocalSGDOptimizer", "its step() averages parameters over the ranks"),
    ("torch.distributed", "DistributedOptimizer", "its step() runs on other workers"),
    ("horovod", "_DistributedOptimizer", "it reduces gradients itself"),
    ("deepspeed", "ZeROOptimizer", "it reduces gradients itself"),
    ("megatron", "MegatronOptimizer", "its step() reduces and casts gradients itself"),
)
# Attributes that these libraries set on the parameters that they manage.
_PARAMETER_OWNERS = (
    ("_is_flat_param", "FSDP"),
    ("_fsdp_flattened", "FSDP"),
    ("ds_id", "DeepSpeed's ZeRO"),
    ("main_grad", "Megatron"),
)
_REMEDY = "train with it alone, or give gradcast the plain module"


@dataclasses.dataclass(frozen=True)
class Accepted:
    """The parts of an accepted module, or of several that are trained as one.

    ``whole``: the argument of attach; a list as an nn.ModuleList. ``module``: the user's own, inside its wrappers.
    ``ddp``: the one whose reduction is taken over; None for a bare module. ``called``: the outermost module that every
    forward pass goes through and that no compiler looks into; of a list, all. ``parameters``: those that need
    gradients, by name. ``read``: what each optimizer's step() reads, if it updates in parts. ``shards``: the groups of
    a module that FSDP2 shards. ``stages``: of a pipeline, whose modules these are.
    """

    whole: nn.Module
    module: nn.Module
    ddp: DistributedDataParallel | None
    called: tuple[nn.Module, ...]
    parameters: dict[str, nn.Parameter]
    read: tuple[Read | None, ...] = ()
    shards: tuple[sharding.ShardGroup, ...] = ()
    stages: tuple[Stage, ...] = ()

    @property
    def owned(self) -> tuple[nn.Module, ...]:
        """The user's own modules, inside of wrappers."""
        return (self.module,) if self.ddp is not None else self.called

    @property
    def grouped_parameters(self) -> list[nn.Parameter]:
        """Those of FSDP's groups, in the module's order, frozen ones included."""
        grouped = {id(each) for group in self.shards for each in group.parameters}
        return [each for each in self.module.parameters() if id(each) in grouped]

    def modules_with_buffers(self, broadcast: bool, mode: str) -> tuple[nn.Module, ...]:
        """The modules whose buffers gradcast sends. ``broadcast``: the option of this name, for bare modules."""
        if self.ddp is None:
            # A stage's forward passes run inside of DDP's no_sync(), which sends none.
            return self.called if broadcast and not (self.shards or self.stages) else ()
        sends = mode == "overlap" and self.ddp.broadcast_buffers and len(self.ddp.modules_buffers) > 0
        return (self.module,) if sends and not has_buffer_hook(self.ddp) else ()

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def accept(
    module: Any,
    optimizers: Sequence[Any],
    process_group: Any,
    *,
    in_parts: bool = True,
) -> Accepted:
    """Raises Error(invalid_use), which says what to do, unless training is known to give DDP's numbers, as far as
    ``check_hooks`` finds nothing. ``in_parts``: optimizers have to update parameters one by one.
    """
    members: tuple[nn.Module, ...] = ()
    if isinstance(module, list | tuple):
        module = joined(module)
        members = tuple(module)
    if not isinstance(module, nn.Module):
        raise refused(f"the module is a {type(module).__name__}; a torch.nn.Module is expected")
    ddp = the_ddp(module)
    inner = module if ddp is None else ddp.module
    check_owners(module)
    shards = sharding.groups_of(module)
    parameters = _sharded(module, ddp, shards) if shards else trainable(inner)
    left_alone = _left_alone(module, shards) if shards else ()
    if ddp is not None:
        _check_covered(module, ddp)
        _check_ddp(ddp, process_group)
    _check_ignored(ddp, inner)
    called = members or (_called(module, ddp),)
    if any(isinstance(each, torch.jit.ScriptModule) for each in called):
        raise refused(
            "the module is a torch.jit.ScriptModule, which takes no hooks around forward; make it an attribute of an "
            "nn.Module, or wrap it in DistributedDataParallel, and give that"
        )
    check_optimizers(optimizers, parameters, left_alone)
    in_parts_only = optimizers if in_parts else ()
    for each in in_parts_only:
        partial_step.require_own_step(each)
    read = tuple(require_splittable(each) for each in in_parts_only)
    return Accepted(module, inner, ddp, called, parameters, read, tuple(shards))


def joined(modules: Sequence[Any]) -> nn.ModuleList:
    """Several modules as one. Raises Error(invalid_use) unless they are bare, or all sharded by FSDP, and have nothing
    in common."""
    for position, each in enumerate(modules):
        if isinstance(each, torch.Tensor):
            raise refused(
                f"number {position} of the list is a {type(each).__name__}; gradcast takes modules: make it an "
                "attribute of one, such as the loss as an nn.Module, and give that"
            )
        if not isinstance(each, nn.Module):
            raise refused(f"number {position} of the list is a {type(each).__name__}; torch.nn.Modules are expected")
        if the_ddp(each) is not None:
            raise refused(
                f"number {position} of the list holds a DistributedDataParallel; give the plain modules, whose "
                "gradients gradcast reduces together, or attach to each DDP module with an optimizer of its own"
            )
    sharded = [sharding.is_sharded(each) for each in modules]
    if any(sharded) and not all(sharded):
        raise refused(
            f"number {sharded.index(True)} of the list is sharded by FSDP and number {sharded.index(False)} is not; "
            "shard both, or attach to it by itself, with its optimizer"
        )
    names: dict[int, str] = {}
    for position, each in enumerate(modules):
        parts = {"": each} | {name: part for name, part in each.named_modules() if part in modules}
        for name, part in [*parts.items(), *each.named_parameters()]:
            here = f"{position}.{name}" if name else f"number {position}"
            if names.setdefault(id(part), here) != here:
                raise refused(
                    f"modules of the list overlap: {here} is {names[id(part)]} as well; give each part once, "
                    "within one module of the list"
                )
    if not modules:
        raise refused("the list of modules is empty; a torch.nn.Module or several are expected")
    return nn.ModuleList(modules)


def trainable(module: nn.Module, known: Collection[int] = ()) -> dict[str, nn.Parameter]:
    """Parameters that need gradients, by name, each once. ``known``: ids of frozen parameters to include."""
    found = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise refused(f"{name} is not initialized yet; run one forward pass before attach")
        if not parameter.requires_grad and id(parameter) not in known:
            continue
        values = sharding.local_of(parameter.detach())
        if type(values) is not torch.Tensor:
            raise refused(
                f"{name} is a {type(values).__name__}, a tensor that is more than its values; gradcast reduces "
                "ordinary tensors and DTensors of them"
            )
        if parameter.is_complex():
            raise refused(f"{name} is complex; gradcast sends real gradients only")
        if values.numel() > 0:
            found[name] = parameter
    if not found:
        raise refused("the module has no parameter that needs a gradient")
    devices = {parameter.device for parameter in found.values()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise refused(f"the module lies on several devices ({names}); gradcast needs it on one per process")
    device = next(iter(devices))
    if device.type not in ("cpu", "cuda"):
        raise refused(f"the module lies on {device}; gradcast knows cpu and cuda")
    return found


def _sharded(
    module: nn.Module, ddp: DistributedDataParallel | None, shards: Sequence[sharding.ShardGroup]
) -> dict[str, nn.Parameter]:
    """The trainable parameters of FSDP's groups that have a part on this rank, by name."""
    if ddp is not None:
        raise refused("a part of the module is sharded by FSDP, and another is in a DistributedDataParallel; use one")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, nn.Parameter] = {}
    for group in shards:
        missing = [each for each in group.parameters if id(each) not in names]
        if missing:
            raise refused("parameters of the module are gathered now; call module.reshard() before attach")
        reason = group.reason_against()
        if reason is not None:
            raise refused(f"FSDP's group with {names[id(group.parameters[0])]} cannot be attached: {reason}")
        found |= {names[id(each)]: each for each in group.parameters if each.requires_grad}
    with_values = {name: each for name, each in found.items() if sharding.local_of(each).numel() > 0}
    if not with_values:
        raise refused("FSDP has no trainable part of the module on this rank; shard it over fewer ranks")
    return with_values


def _left_alone(module: nn.Module, shards: Sequence[sharding.ShardGroup]) -> list[nn.Parameter]:
    """Trainable parameters outside of FSDP's groups, which FSDP leaves alone, too. An optimizer may have them."""
    in_groups = {id(each) for group in shards for each in group.parameters}
    return [each for each in module.parameters() if each.requires_grad and id(each) not in in_groups]


def check_optimizers(
    optimizers: Sequence[Any], parameters: dict[str, nn.Parameter], left_alone: Sequence[nn.Parameter] = ()
) -> None:
    """Raises unless every trainable parameter is in exactly one optimizer, and no optimizer has any other than those
    that are ``left_alone``."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    known = names.keys() | set(map(id, left_alone))
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        _refuse_owned_optimizer(optimizer)
        if isinstance(optimizer, type):
            made = f"{optimizer.__name__}(module.parameters(), ...)"
            raise refused(f"optimizer is the class {optimizer.__name__}; give attach an optimizer, {made}")
        if not isinstance(optimizer, Optimizer):
            raise refused(
                f"optimizer is a {type(optimizer).__name__}; a torch.optim.Optimizer or a list of them is expected"
            )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                is_trained = parameter.requires_grad and sharding.local_of(parameter).numel() > 0
                if is_trained and id(parameter) not in known:
                    raise refused(
                        f"the optimizer updates a parameter of shape {tuple(parameter.shape)} that is not in the "
                        "module; make it from module.parameters() of the module given here, or give attach a list with "
                        "the module that has that parameter"
                    )
                if owner.setdefault(id(parameter), number) != number:
                    raise refused(f"{names.get(id(parameter), 'a parameter')} is in two of the optimizers")
    missing = [name for key, name in names.items() if key not in owner] if optimizers else []
    if missing:
        raise refused(
            f"{missing[0]} is in none of the optimizers; give all optimizers of the module to attach, as a list, or "
            "freeze it with requires_grad_(False) if it is not to be trained"
        )


def check_owners(module: nn.Module) -> None:
    """Raises if another library shards, reduces or updates any part of the module by itself."""
    for name, each in module.named_modules():
        for package, class_name, called, reason in _MODULE_OWNERS:
            if _is_a(each, package, class_name):
                where = f"{name} is" if name else "the module is"
                raise refused(f"{where} wrapped in {called}, and {reason}; {_REMEDY}")
    for name, parameter in module.named_parameters():
        for attribute, called in _PARAMETER_OWNERS:
            if hasattr(parameter, attribute):
                raise refused(f"{name} is managed by {called}, which reduces gradients itself; {_REMEDY}")
        if hasattr(parameter, "_st_info"):
            raise refused(
                f"{name} was a DTensor before torch's _pre_dp_module_transform(), which makes other parameters in each "
                "forward pass, unknown to the optimizer; give attach the module without this call and without "
                "DistributedDataParallel, and the data-parallel group as process_group"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise refused(
                f"{name} is updated inside of backward (_apply_optimizer_in_backward), before the ranks' mean exists; "
                "make an ordinary optimizer, and give it to attach"
            )


def _refuse_owned_optimizer(optimizer: Any) -> None:
    for package, class_name, reason in _OPTIMIZER_OWNERS:
        if _is_a(optimizer, package, class_name):
            raise refused(
                f"the optimizer is a {class_name} of {package}: {reason}; attach without the optimizer (hook mode), or "
                "train without gradcast"
            )


def _is_a(value: Any, package: str, class_name: str) -> bool:
    return any(
        each.__name__ == class_name and f"{each.__module__}.".startswith(f"{package}.") for each in type(value).__mro__
    ) or (
        # Horovod makes a class with the name of the user's optimizer and the methods of this one.
        class_name == "_DistributedOptimizer" and f"{type(value).__module__}.".startswith(f"{package}.")
    )


def _check_covered(module: nn.Module, ddp: DistributedDataParallel) -> None:
    covered = {id(parameter) for parameter in ddp.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in covered:
            raise refused(
                f"{name} lies outside of the module's DistributedDataParallel, which leaves its gradient to each rank; "
                "wrap the whole module, or attach to the DistributedDataParallel module alone"
            )


def _check_ignored(ddp: DistributedDataParallel | None, module: nn.Module) -> None:
    """Raises for parameters that DDP leaves to each rank, where they may differ (experts, parts of a table)."""
    ignored = {*getattr(ddp, "parameters_to_ignore", ()), *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
    if ignored:
        raise refused(
            f"DDP ignores {min(ignored)}, which each rank then has for itself, and gradcast would average "
            "it; exclude it from the module that is attached, or train with DDP"
        )


def _check_ddp(ddp: DistributedDataParallel, process_group: Any) -> None:
    if process_group is not None and process_group is not ddp.process_group:
        raise refused("process_group is not the group of this DDP module; omit it")
    check_comm_hooks(ddp)
    if getattr(ddp, "mixed_precision", None) is not None:
        raise refused("DDP's mixed_precision reduces gradients in its own way; use torch.autocast with gradcast")
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise refused("DDP's delay_all_reduce_named_params is not supported; make the DDP module without it")
    if getattr(ddp, "_use_python_reducer", False):
        raise refused(
            "DDP reduces in Python here (torch._dynamo.config.optimize_ddp is 'python_reducer'); set that to "
            "'ddp_optimizer' before the DDP module is made"
        )


def check_hooks(parameters: dict[str, nn.Parameter], known: Sequence[DistributedDataParallel]) -> None:
    """Raises if other code in C++ than these reducers waits for gradients: it would use them before the average."""
    if _unknown_hook(parameters, known) is not None:
        gc.collect()  # may free a DistributedDataParallel that nothing refers to any more
    unknown = _unknown_hook(parameters, known)
    if unknown is not None:
        raise refused(
            f"something else waits for the gradient of {unknown}, as a DistributedDataParallel around this module "
            "does, and would average it, too; attach to that wrapper itself, gradcast.attach(ddp), or, if it is no "
            "longer used, delete what refers to it"
        )
    hooked = extension.load().own_hooks(list(parameters.values()))
    if hooked:
        name = list(parameters)[hooked[0]]
        raise refused(f"gradcast is attached to {name} already, by another module; call its handle.detach() first")


def _unknown_hook(parameters: dict[str, nn.Parameter], known: Sequence[DistributedDataParallel]) -> str | None:
    expected = collections.Counter(id(each) for ddp in known for each in ddp._module_parameters)
    counts = zip(parameters.items(), extension.load().foreign_hooks(list(parameters.values())), strict=True)
    return next((name for (name, parameter), count in counts if count > expected[id(parameter)]), None)


def _called(module: nn.Module, ddp: DistributedDataParallel | None) -> nn.Module:
    """The module that gets the hooks around forward. Compiled code does not notice hooks that are registered later, so
    those of a DDP module inside torch.compile() go on the compiled module."""
    if ddp is None:
        return module
    around = (each for each in module.modules() if isinstance(each, OptimizedModule))
    return next((each for each in around if any(inner is ddp for inner in each.modules())), ddp)
