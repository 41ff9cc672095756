"""Attaches gradcast to every DistributedDataParallel module that a program makes, without a change to that program."""

import functools
import json
import os
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradcast
from gradcast.training.attached_modules import attached_modules, detach_left

MODES = ("hook", "overlap")
# A file name; each rank adds lines to one of its own, with its number at the end.
NOTES_VARIABLE = "GRADCAST_PEERS_NOTES"
# Few steps are measured, since a test has few: the others follow a plan.
OPTIONS = gradcast.Options(plan=gradcast.Planning(warmup_steps=3, adapt=False))


def note(event: str, text: str = "") -> None:
    """``event``: what happened to one DDP module: attached in mode "hook" or "overlap", "owned" by an optimizer of its
    own, "refused", "refused overlap", or "detached" later."""
    path = os.environ.get(NOTES_VARIABLE)
    if path:
        with open(f"{path}{torch.distributed.get_rank()}", "a") as file:
            file.write(json.dumps([event, text]) + "\n")


def install(mode: str) -> None:
    """``mode``: "hook", or "overlap": with the optimizer, where one is made of exactly the module's parameters."""
    if mode not in MODES:
        raise ValueError(f"the mode is {mode!r}; one of {', '.join(MODES)} is expected")
    plugin = _Plugin(overlaps=mode == "overlap")
    _around_init(DistributedDataParallel, plugin.made_module, plugin.makes_module)
    for each in vars(torch.optim).values():
        if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer:
            _around_init(each, plugin.made_optimizer)
    _detach_before("register_comm_hook", "a communication hook is registered on the module")
    _detach_before("_remove_autograd_hooks", "the program takes DDP's own hooks off")


def _around_init(cls: type, made: Any, makes: Any = None) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: N807
        if makes is not None:
            makes(*args, **options)
        original(self, *args, **options)
        if type(self).__init__ is __init__:  # not in the middle of a subclass's
            made(self)

    cls.__init__ = __init__


def _detach_before(method: str, reason: str) -> None:
    """What gradcast asks of a user who calls this."""
    original = getattr(DistributedDataParallel, method)

    @functools.wraps(original)
    def wrapper(self, *args: Any, **options: Any) -> Any:
        if self.module in attached_modules:
            detach_left(self)
            note("detached", reason)
        return original(self, *args, **options)

    setattr(DistributedDataParallel, method, wrapper)


class _Plugin:
    def __init__(self, overlaps: bool) -> None:
        self._overlaps = overlaps
        # Neither is kept alive for gradcast's sake.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []

    def makes_module(self, module: Any, *_: Any, **__: Any) -> None:
        """A module that is wrapped once more is detached before, as gradcast's message says."""
        for each in module.modules() if isinstance(module, nn.Module) else ():
            if each in attached_modules:
                detach_left(each)
                note("detached", "the module is wrapped in another DistributedDataParallel")

    def made_module(self, ddp: DistributedDataParallel) -> None:
        if ddp.process_group is None or ddp.process_group.size() < 2:
            return
        self._modules.append(weakref.ref(ddp))
        optimizer = next((each for each in _alive(self._optimizers) if _updates(each, ddp)), None)
        if optimizer is not None:
            note("owned")
        if optimizer is None or not self._overlaps or not _attach(ddp, optimizer):
            _attach(ddp)

    def made_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))
        for ddp in _alive(self._modules):
            if not _updates(optimizer, ddp):
                continue
            note("owned")
            if not self._overlaps:
                continue
            was_attached = ddp.module in attached_modules
            detach_left(ddp)
            if not _attach(ddp, optimizer) and was_attached:
                _attach(ddp)


def _alive(references: list) -> list:
    return [each for each in (reference() for reference in references) if each is not None]


def _updates(optimizer: Optimizer, ddp: DistributedDataParallel) -> bool:
    updated = {id(each) for group in optimizer.param_groups for each in group["params"] if each.requires_grad}
    return bool(updated) and updated == {id(each) for each in ddp.parameters() if each.requires_grad}


def _attach(ddp: DistributedDataParallel, optimizer: Optimizer | None = None) -> bool:
    """Where gradcast refuses, the module stays DDP's, and that is noted."""
    try:
        note(gradcast.attach(ddp, optimizer, options=OPTIONS).mode)
    except gradcast.Error as error:
        if error.code != "invalid_use":
            raise
        note("refused" if optimizer is None else "refused overlap", str(error))
        return False
    return True
