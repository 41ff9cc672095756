"""``gradcast.attach``: checks the call on all ranks, and puts a session on the module."""

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.errors import Error, refused
from gradcast.host_traffic import TWO_LEVEL, exchange_form, saves_nothing, wire_taken
from gradcast.training import launch_order, preflight
from gradcast.training.acceptance import Accepted, accept, check_hooks
from gradcast.training.attached_modules import (
    attached_modules,
    attached_to,
    collect_dropped,
    parameters_outside_stages,
    stage_modules,
)
from gradcast.training.attachment import Attachment
from gradcast.training.compat import extension, pipeline_stages, sharding
from gradcast.training.compat.wrappers import unwrapped_optimizer
from gradcast.training.handle import Handle
from gradcast.training.local.session import LocalStepsSession
from gradcast.training.options import Options
from gradcast.training.ranks import hosts
from gradcast.training.ranks.group import Group, backend_of, callers_of, make_group, require_backend
from gradcast.training.sessions.disabled import DisabledSession, is_disabled, weights_refused
from gradcast.training.sessions.kinds import Attached, Setup
from gradcast.training.sessions.quorum import Plans, Quorum, QuorumSessions
from gradcast.training.sessions.single_worker import SingleWorkerSession
from gradcast.training.step.parameter_state import shown
from gradcast.training.step.update_callbacks import UpdateCallbacks

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

_log = logging.getLogger("gradcast")
_WHAT = "attach"


def attach(
    module: "nn.Module | PipelineStage | Sequence[nn.Module] | Sequence[PipelineStage]",
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    process_group: Any = None,
    options: Options | None = None,
) -> Handle:
    """Sends the module's gradients by a plan. Collective over the workers; call it before the training loop.

    ``module``: a bare module, or one with a DistributedDataParallel around it, which may lie inside torch.compile() or
    a framework's wrapper. All trainable parameters must be on one device; the guarantees list what is accepted. A bare
    module gets rank 0's parameters and buffers now, and its buffers in each training forward pass, as with DDP.
    A list of bare modules, none inside another, is trained as one: one plan sends the gradients of all. Put a loss with
    parameters into the list, too; parameters are named by position ("1.scale").
    A torch.distributed.pipelining stage, or a list of all of this rank, is given in place of its module, with the ranks
    that have the same stage as ``process_group``.
    ``optimizer``: one, or a list of all that update the module; a framework's wrapper around one is accepted. With it,
    gradcast works in overlap mode: gradients of a step are sent while the next forward pass runs, and each parameter is
    updated before it is read. Without it, in hook mode: all gradients have arrived when backward ends, as with DDP.
    ``process_group``: the workers. Default: all, or those of the DDP module.

    The training loop stays as it is. Raises gradcast.Error, on every rank, for what would give wrong numbers.
    """
    return attach_inside([], module, optimizer, process_group, options)


def attach_inside(
    idle: Sequence[DistributedDataParallel],
    module: "nn.Module | PipelineStage | Sequence[nn.Module] | Sequence[PipelineStage]",
    optimizer: Optimizer | Sequence[Optimizer] | None,
    process_group: Any,
    options: Options | None,
) -> Handle:
    """attach() for a module inside DistributedDataParallel modules that the caller keeps ``idle``: until gradcast is
    detached, nobody calls them, so they reduce nothing."""
    options = options or Options()
    make_log_visible()
    stages = pipeline_stages.stages_in(module)
    if stages:
        module = pipeline_stages.modules_of(stages, module)
        idle = [each.ddp for each in stages if each.ddp is not None]
        process_group = process_group or next((each.process_group for each in idle), None)
    callers, replica = _callers(module, process_group)
    made: list[Attached] = []
    try:
        with replica.together(_WHAT):
            with _unreported(), callers.together(_WHAT):
                if stages:
                    preflight.check_stages(options, stages, process_group, disabled=is_disabled())
                accepted, optimizers, mode = _checked(callers, idle, module, optimizer, process_group, options)
                accepted = dataclasses.replace(accepted, stages=stages)
                _refuse_stages(accepted)
                places = preflight.check_same_call(callers, mode, options, stages)
            make = functools.partial(
                make_group, device=accepted.device, timeout_s=options.watch.timeout_s, reuses=True, nccl=options.nccl
            )
            preflight.check_same_call(replica, mode, options)
            norms = None
            if accepted.shards and options.clip.norm is not None and mode == "overlap":
                norms = replica if replica.world_size == 1 else make(replica.shared)
            with _unreported():
                group = make(callers.shared)
                if accepted.shards:
                    group.baseline, group.shard = "FSDP", replica.rank if replica.world_size > 1 else None
                with group.together(_WHAT):
                    group.hosts, doubt = hosts.agreed(places)
                    made.append(_attached(accepted, optimizers, group, options, mode, doubt, norms))
                    handle = _handle(accepted, made[0], optimizers)
        return handle
    except BaseException:
        for each in made:  # it is another rank that has failed
            each.release(reusable=not group.has_failed)
        raise


@contextlib.contextmanager
def _unreported() -> Iterator[None]:
    """Context inside ``together`` of a module's shards. A failure that all replicas of a shard know is reported to the
    other shards, too, for they would wait for these ranks in FSDP."""
    try:
        yield
    except Error as error:
        error.on_all_ranks = False
        raise


def attach_to_quorum(quorum: Quorum, plans: Plans, module: nn.Module | Sequence[nn.Module], options: Options) -> Handle:
    """attach() over process groups that come and go, in hook mode. Not collective."""
    make_log_visible()
    if is_disabled():
        raise refused(
            "GRADCAST_DISABLE is set, and nothing else would average the gradients; train with torchft's "
            "DistributedDataParallel, or unset the variable"
        )
    preflight.check_clipping(options, [])
    preflight.check_local_steps(options, [], module, disabled=False)
    accepted = accept(module, [], None)
    if accepted.shards or sharding.has_parts(accepted.module):
        raise refused(
            "the module is sharded (FSDP, DTensors), which torchft's process groups do not fit; train without gradcast"
        )
    _refuse_attached(accepted)
    _refuse_stages(accepted)
    check_hooks(accepted.parameters, [])
    options = dataclasses.replace(options, broadcast_buffers=False)
    return _handle(accepted, QuorumSessions(quorum, accepted, options, plans), [])


def _handle(accepted: Accepted, attached: Attached, optimizers: Sequence[Optimizer]) -> Handle:
    for each in accepted.owned:
        attached_modules[each] = weakref.ref(attached)
        (stage_modules.add if accepted.stages else stage_modules.discard)(each)
    return Handle(accepted.module, attached, accepted.called, optimizers)


def _refuse_attached(accepted: Accepted) -> None:
    if any(attached_to(each) is not None for each in accepted.owned):
        raise refused("gradcast is attached to this module already; call handle.detach() first")


def _refuse_stages(accepted: Accepted) -> None:
    """Refuses a module that a stage of a pipeline has, now or later, unless attach was given the stage."""
    if not accepted.stages:
        pipeline_stages.refuse_modules(accepted.parameters.values())
    pipeline_stages.refuse_new_stages(parameters_outside_stages)


def _checked(
    callers: Group,
    idle: Sequence[DistributedDataParallel],
    module: Any,
    optimizer: Any,
    process_group: Any,
    options: Options,
) -> tuple[Accepted, list[Optimizer], str]:
    """The parts of the module, its optimizers without wrappers, and the mode. Raises Error for what is refused."""
    collect_dropped()
    if callers.world_size > 1:
        extension.load()
    disabled = is_disabled()
    listed = isinstance(optimizer, list | tuple)
    given = list(optimizer) if listed else [] if optimizer is None else [optimizer]
    optimizers = [unwrapped_optimizer(each) for each in given]
    local = options.local is not None
    mode = "ddp" if disabled else "local" if local else "overlap" if optimizers else "hook"
    preflight.check_clipping(options, given)
    if disabled and options.weight is not None:
        raise weights_refused()
    preflight.check_local_steps(options, optimizers, module, disabled=disabled)
    accepted = accept(module, optimizers, process_group, in_parts=not local)
    _refuse_attached(accepted)
    if accepted.shards:
        preflight.check_sharded(options, accepted, disabled=disabled)
    else:
        preflight.check_tensor_parallel(options, accepted.whole, callers, disabled=disabled)
    if callers.world_size > 1:
        check_hooks(accepted.parameters, [*idle, *([] if accepted.ddp is None else [accepted.ddp])])
    callers.device = accepted.device
    require_backend(callers.shared, accepted.device)
    launch_order.check_launch_order(mode, callers.shared, accepted.device, accepted.whole)
    return accepted, optimizers, mode


def _callers(module: Any, process_group: Any) -> tuple[Group, Group]:
    """The ranks that call attach, known before the module is checked, so that all learn what one refuses; and those
    with other shards of the same replica."""
    alone = Group(0, 1)
    members = module if isinstance(module, list | tuple) else [module]
    groups = [group for each in members if isinstance(each, nn.Module) for group in sharding.groups_of(each)]
    if groups:
        callers, shards = callers_of(sharding.the_replicas(groups, process_group)), sharding.the_shards(groups)
        return callers, alone if shards is None else callers_of(shards)
    if process_group is None and isinstance(module, nn.Module):
        ddps = (each for each in module.modules() if isinstance(each, DistributedDataParallel))
        process_group = next((each.process_group for each in ddps), None)
    return callers_of(process_group), alone


def _attached(
    accepted: Accepted,
    optimizers: Sequence[Optimizer],
    group: Group,
    options: Options,
    mode: str,
    doubt: str | None,
    replica: Group | None,
) -> Attached:
    """Begins the training. ``doubt``: about the hosts, for the log. ``replica``: see Setup. Collective."""
    preflight.check_same_model(group, accepted.module)
    is_on_device = accepted.device.type != "cpu"
    if group.world_size == 1 and mode in ("overlap", "hook"):
        preflight.check_as_several(accepted, mode, options)
    if group.rank == 0 and mode != "ddp":
        backend = None if group.world_size == 1 else backend_of(group.shared, accepted.device.type)
        if not group.shard:  # the same on all shards
            _tell_of_backend(backend, options, mode, accepted.whole)
        _tell_exchange(group, doubt, options.wire, accepted.parameters, on_device=is_on_device)
    options = dataclasses.replace(options, wire=wire_taken(group.hosts, options.wire, on_device=is_on_device))
    callbacks = UpdateCallbacks(accepted.parameters, in_parts=mode == "overlap" and group.world_size > 1)
    setup = Setup(accepted, optimizers, group, options, callbacks, replica)
    if mode == "ddp":
        return DisabledSession(setup)
    if accepted.shards:
        preflight.check_same_values(group, accepted.parameters)
        if group.rank == 0 and not group.shard:
            preflight.warn_of_left_alone(accepted)
    elif group.world_size > 1 and (mode == "local" or accepted.ddp is None):
        preflight.copy_model_from_first(group, accepted.module, options)
    if mode == "local":
        return LocalStepsSession(setup)
    return SingleWorkerSession(setup) if group.world_size == 1 else Attachment(setup)


def _tell_of_backend(backend: str | None, options: Options, mode: str, module: nn.Module) -> None:
    """Warns of settings and modules that do not fit the backend. ``backend``: None for a single worker."""
    if backend == "nccl":
        for sentence in launch_order.warnings_of(mode, module):
            _log.warning("%s", sentence)
        return
    why = "a single worker sends nothing" if backend is None else f"blocks are sent over {backend}"
    for name in ("max_ctas", "cta_policy", "register_buffers", "own_stream", "event_times"):
        if getattr(options.nccl, name):
            _log.warning("options.nccl.%s is for blocks over NCCL, and %s, so it changes nothing", name, why)


def _tell_exchange(
    group: Group, doubt: str | None, wire: str, parameters: dict[str, nn.Parameter], *, on_device: bool
) -> None:
    found = group.hosts
    if doubt is not None:
        group.warning("the hosts of the ranks: %s", doubt)
    if found.count < len(found.host_of):
        levels = ""
        if exchange_form(found, wire, on_device=on_device) == TWO_LEVEL:
            levels = "; gradients are summed inside each host first"
        elif found.ranks_per_host is None and not on_device:
            levels = "; hosts with differently many ranks do not sum their gradients first"
        group.info("%s%s", found.describe(), levels)
    if wire_taken(found, wire, on_device=on_device) != wire:
        group.warning("%s; they are sent in fp32", saves_nothing(found, wire))
        return
    if wire != "fp32":
        feedback = " with error feedback, which keeps one more copy of the fp32 gradients" if wire == "int8" else ""
        group.info("lossy: %s on the wire%s", wire, feedback)
        exact = [f"{name} ({each.dtype})" for name, each in parameters.items() if each.dtype != torch.float32]
        if exact:
            group.info("not in %s, but as they are: the gradients of %s", wire, shown(exact))
    if (sentence := saves_nothing(found, wire, on_device=on_device)) is not None:
        group.warning("%s; omit options.wire", sentence)


def make_log_visible() -> None:
    """Logs to standard error what gradcast expects and decides, if the program has not set up logging."""
    if _log.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("gradcast: %(message)s"))
    _log.addHandler(handler)
    if _log.level == logging.NOTSET:
        _log.setLevel(logging.INFO)
