"""What every random program begins with. Its text is part of each printed program: it imports nothing of the tests,
and the modules that those programs use."""

# ruff: noqa: F401
import contextlib
import copy
import io
import itertools
import json
import os
import random
import signal

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.checkpoint import checkpoint

import gradcast
from gradcast import _core
from gradcast.training.plan import loop
from gradcast.training.plan.agreement import STATE_VERSION
from gradcast.training.plan.loop import Leaving
from gradcast.training.state import TrainingState

WIDTH = 8


class Scale(torch.autograd.Function):
    """Reads its weight where no module hook sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Holder(nn.Module):
    """A framework's wrapper around a module."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, *arguments):
        return self.held(*arguments)


class Stop(Exception):  # noqa: N818
    """What a program raises and catches itself."""


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float32)
    y = torch.randn(3, WIDTH, generator=generator, dtype=torch.float32)
    return x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype())


def taken(value):
    """A copy of everything in it, however deep."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {str(key): taken(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [taken(each) for each in value]
    return value


def pin(handle, seed):
    """Follows a random plan of many blocks from now on: another layout, cuts through tensors, any order."""
    chance = random.Random(seed)
    places = list(handle.layout)
    chance.shuffle(places)
    tensors = [
        _core.Tensor(
            name=place.name,
            bytes=place.end_bytes - place.lo_bytes,
            buffer=place.buffer,
            element_bytes=place.dtype.itemsize,
            ready_ns=len(places) - number,
            need_ns=number,
        )
        for number, place in enumerate(places)
    ]
    link = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1, beta_ns_per_byte=1)])
    length_ns, world_size = len(places), handle.world_size
    profile = _core.Profile(
        name="random", forward_ns=length_ns, backward_ns=length_ns, tensors=tensors, world_size=world_size, link=link
    )
    ranges, ends = [], {}
    for tensor in profile.tensors:
        low = ends.get(tensor.buffer, 0)
        ends[tensor.buffer] = low + tensor.bytes
        elements = tensor.bytes // tensor.element_bytes
        cuts = sorted({chance.randrange(elements) for _ in range(chance.choice([0, 0, 0, 1, 2]))} - {0})
        for one, other in itertools.pairwise([0, *cuts, elements]):
            ranges.append((tensor.buffer, low + one * tensor.element_bytes, low + other * tensor.element_bytes))
    chance.shuffle(ranges)
    blocks = []
    while ranges:
        first = ranges.pop()
        together = [first] + [
            ranges.pop() for _ in range(chance.choice([0, 1, 2, 3])) if ranges and ranges[-1][0] == first[0]
        ]
        merged = []
        for _, low, high in sorted(together):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        blocks.append(_core.Block(ranges=merged, buffer=first[0]))
    plan = _core.Plan(blocks=blocks, mode=handle.mode, in_flight=chance.choice([1, 1, 2])).to_json()
    text, mode = profile.to_json(), handle.mode
    made = {"version": STATE_VERSION, "mode": mode, "world_size": world_size}
    state = made | {"profile": text, "layout": text, "plan": plan, "unseen_reads": []}
    handle.load_state_dict(state)


def hand_over(handle, seed):
    """Leaves the reduction to DDP again and again, for a few steps, or rests if something speaks against it."""
    chance = random.Random(seed)
    controller = TrainingState.of(handle, "a program").session.controller
    begin = controller.begin_iteration

    def begin_and_leave(*arguments):
        begin(*arguments)
        if controller.warmup is not None or controller.rests or chance.random() < 0.5:
            return
        if not controller.leave_to_ddp(Leaving.FOR_GOOD):
            controller.phase.rest_steps = controller.phase.take_rest()
            controller.meter.pause()

    controller.begin_iteration = begin_and_leave
    interval = chance.choice([1, 1, 2, 3])
    vars(loop).update(_REST_STEPS=interval, _REST_STEPS_MAX=interval)


class KeepsPrevious(torch.optim.Optimizer):
    """Moves along the difference to the last gradient, which it keeps as it is."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                previous = self.state[p].get("previous")
                p.sub_(p.grad if previous is None else 1.5 * p.grad - 0.5 * previous, alpha=group["lr"])
                self.state[p]["previous"] = p.grad
        return loss


class Schedule:
    """An object that an optimizer asks, and a program advances."""

    value = 1.0


class Tuned(torch.optim.SGD):
    """Has settings in containers, of its groups and of its own."""

    def __init__(self, groups, schedule):
        super().__init__(groups, lr=0.1, momentum=0.9)
        self.schedule, self.own = schedule, {"factors": [1.0]}
        for group in self.param_groups:
            group["factors"] = [1.0, {"deep": 1.0}]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            factor = group["factors"][0] * group["factors"][1]["deep"] * self.own["factors"][0]
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - 0.01 * factor * (1.0 if self.schedule is None else self.schedule.value))
        super().step()
        return loss


def tuned(optimizer, schedule=None):
    return optimizer if isinstance(optimizer, Tuned) and schedule is None else Tuned(optimizer.param_groups, schedule)


def change_settings(optimizer, factor):
    for group in optimizer.param_groups if isinstance(optimizer, Tuned) else ():
        group["factors"][0] *= factor
        group["factors"][1]["deep"] *= factor
        optimizer.own["factors"][0] *= factor


class Votes(torch.optim.SGD):
    """Asks the other ranks about each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad)
        super().step()
        return loss


class Raises(torch.optim.SGD):
    """Somebody sends the process a signal in the middle of each update."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        signal.raise_signal(signal.SIGUSR2)
        super().step()
        return loss


def on_signal(function):
    signal.signal(signal.SIGUSR2, lambda *_: function() and None)


def loss_of(model, parameters, x, y):
    return (torch.func.functional_call(model, parameters, (x,)) - y).pow(2).mean()


def other_mapping(parameter):
    """The parameter's shared memory once more, as another process has it."""
    memory = torch.UntypedStorage._new_shared_fd_cpu(*parameter.untyped_storage()._share_fd_cpu_())
    return torch.empty(0, dtype=parameter.dtype).set_(memory, 0, parameter.size(), parameter.stride())


class Fails(torch.optim.SGD):
    """While the class is ``armed``, a step is out of memory. (Its own attributes are those of when it was called.)"""

    armed = False

    def step(self, closure=None):
        if Fails.armed:
            raise MemoryError("no memory for the update")
        return super().step(closure)


def fabric_module(ddp):
    """As Fabric.setup() wraps it."""
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.wrappers import _FabricModule

    return _FabricModule(ddp, DDPStrategy(), ddp.module)
