"""Clipping that a framework asks for between backward and step(): torch's numbers, bit for bit on two ranks."""

import functools
import math
import unittest.mock

import pytest

import gradcast
from gradcast.frameworks.clipping import ClipCalls, with_clipping
from training import compare
from training.attached import error_of, heard, not_refused, planning
from training.needs import torch
from training.pair import DDP, Side, net
from training.pool import on_ranks
from training.test_disabled import disabling

nn = torch.nn
MAX_NORM, MAX_VALUE = 0.5, 0.05  # some steps of the program below are clipped, others not
KINDS = {"norm": {"norm": MAX_NORM}, "value": {"value": MAX_VALUE}}


def torch_clips(kind, parameters, **more):
    if kind == "norm":
        return nn.utils.clip_grad_norm_(parameters, MAX_NORM, **more)
    return nn.utils.clip_grad_value_(parameters, MAX_VALUE)


class Clipped(Side):
    """``clip()`` is torch's with DDP, and with gradcast what a framework calls that has this setting."""

    def begin(self, kind, world_size=2):
        self.kind, self.module, self.waited = kind, net(), False
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01, foreach=True)
        if self.name == "ddp":
            self.forward = DDP(self.module) if world_size > 1 else self.module
            return
        self.forward = self.module
        options = with_clipping(gradcast.Options(plan=planning("p3")), "it", **KINDS[kind])
        self.handles.append(gradcast.attach(self.module, self.optimizer, options=options))
        self.calls = ClipCalls(self.handle, options)

    def clip(self, parameters=None, **more):
        parameters = list(self.module.parameters()) if parameters is None else parameters

        def own():
            self.waited = True
            return torch_clips(self.kind, parameters)

        if self.name == "ddp":
            return torch_clips(self.kind, parameters, **more)
        if self.kind == "norm":
            return self.calls.norm(own, parameters, MAX_NORM)
        return self.calls.value(own, parameters, MAX_VALUE)

    def rounds(self):
        return self.steps(self.forward, self.optimizer)


def read_norm(side):
    norm = side.clip()
    return [norm if norm is None else norm.item()]


def read_gradients(side):
    side.clip()
    return [parameter.grad.clone() for parameter in side.module.parameters()]


def change_gradients(side):
    norm = side.clip()
    side.module[2].weight.grad *= 3
    return [norm]


def replace_gradients(side):
    norm = side.clip()
    side.module[2].weight.grad = torch.ones(16, 16)
    side.module[0].bias.grad = None
    return [norm]


def drop_gradients(side):
    norm = side.clip()
    side.optimizer.zero_grad()
    return [norm]


def zero_gradients(side):
    norm = side.clip()
    side.optimizer.zero_grad(set_to_none=False)
    return [norm]


def clip_twice(side):
    return [side.clip(), side.clip()]


def change_before(side):
    side.module[4].bias.grad *= 100
    return [side.clip()]


def replace_before(side):
    side.module[4].bias.grad = torch.ones(2)
    return [side.clip()]


def add_gradients(side):
    norm = side.clip()
    side.forward(side.batch(99)).sum().backward()
    return [norm]


def leave_out(side):
    """A framework that clips some steps only."""
    return []


def reversed_order(side):
    return [side.clip(list(side.module.parameters())[::-1])]


USES = (
    read_norm, read_gradients, change_gradients, replace_gradients, drop_gradients, zero_gradients, clip_twice,
    change_before, replace_before, add_gradients, leave_out, reversed_order,
)  # fmt: skip


def program(side, kind, world_size=2):
    """Steps in which the program does each of these between backward and step(), and steps in which it only clips."""
    side.begin(kind, world_size)
    told, norms = [], []
    for use in [None, None, *(each for pair in USES for each in (pair, None))]:
        side.optimizer.zero_grad()
        side.forward(side.batch(len(norms))).square().sum().backward()
        told += [] if use is None else use(side)
        norms += [side.clip()] if use is None else []
        side.optimizer.step()
    told += norms
    assert not side.waited
    if kind == "norm" and side.name == "ddp":
        assert min(norms) < MAX_NORM < max(norms), norms
    return told, side.result(side.module, side.optimizer)


def compared(rank, kind, world_size=2):
    theirs = program(Clipped("ddp", rank.index), kind, world_size)
    side = Clipped("overlap", rank.index)
    found = compare.trees(program(side, kind, world_size), theirs)
    side.handle.detach()
    return found


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_whatever_the_program_does_between_clipping_and_step(rank, kind):
    return compared(rank, kind)


def single(rank):
    return compared(rank, "norm", world_size=1)


def test_a_single_worker_clips_at_once(ranks):
    assert ranks.run(1, single) == [[]]


@on_ranks(2)
@disabling
def test_stock_ddp_clips_at_once(rank):
    return compared(rank, "norm")


@on_ranks(2)
def test_a_call_unlike_the_setting_is_left_to_the_framework(rank):
    """Another norm, another kind, a part of the parameters, and other parameters."""
    side = Clipped("overlap", rank.index)
    side.begin("norm")
    own = unittest.mock.Mock(return_value="its own")
    every, elsewhere = list(side.module.parameters()), [torch.ones(2, requires_grad=True)]
    calls = [
        functools.partial(side.calls.norm, own, every, MAX_NORM / 2),
        functools.partial(side.calls.value, own, every, MAX_NORM),
        functools.partial(side.calls.norm, own, every[1:], MAX_NORM),
    ]
    found = []
    with heard() as lines:
        for _, call in zip(side.rounds(), [*calls, *calls], strict=False):
            call()
    assert own.call_count == 6
    told = [line for line in lines if "unlike the setting" in line]
    found += [] if len(told) == (rank.index == 0) else told
    assert side.calls.norm(own, elsewhere, MAX_NORM) == "its own"
    # What the program's own options ask for is not put aside.
    side.calls = ClipCalls(side.handle, gradcast.Options(clip=gradcast.Clip(norm=MAX_NORM)))
    for call in (
        functools.partial(side.calls.norm, own, every, MAX_NORM, math.inf),
        functools.partial(side.calls.value, own, every, MAX_NORM),
        functools.partial(side.calls.norm, own, every[1:], MAX_NORM),
    ):
        found += not_refused(call, "the framework's clip call clips", "Clip(norm=0.5)", "clip alike")
    assert side.calls.norm(own, elsewhere, MAX_NORM) == "its own"
    side.handle.detach()
    assert side.calls.norm(own, every, 1.0) == "its own"
    return found


@pytest.mark.parametrize("deferred", [True, False])
@on_ranks(2)
def test_a_norm_that_the_call_refuses(rank, deferred):
    """Fabric's error_if_nonfinite: no rank makes the step, whose norm is inf."""
    side = Clipped("overlap", rank.index)
    side.begin("norm")
    for _ in side.rounds():
        side.clip()
    side.handle.flush()
    before = [parameter.detach().clone() for parameter in side.module.parameters()]
    side.optimizer.zero_grad()
    (side.forward(side.batch(0)).sum() * 1e30).backward()
    norm = side.calls.norm(None, side.module.parameters(), MAX_NORM, refuse_nonfinite=True)
    if not deferred:
        found = not_refused(norm.item, "norm of the gradients is inf", "error_if_nonfinite")
        side.handle.detach()
        assert norm.isinf()
    else:
        side.optimizer.step()
        found = not_refused(lambda: side.forward(side.batch(1)), "norm of the gradients is inf", "no parameter")
        found += not_refused(lambda: side.module[0].weight.sum(), "norm of the gradients is inf")
        found += not_refused(side.handle.detach, "norm of the gradients is inf")
    found += compare.trees([parameter.detach() for parameter in side.module.parameters()], before)
    side.forward(side.batch(1)).sum().backward()
    return found


@on_ranks(2)
def test_a_function_of_on_update_reads_the_norm_of_its_step(rank):
    """In the middle of the updates whose end makes the norm known."""
    theirs, ours = (Clipped(name, rank.index) for name in ("ddp", "overlap"))
    read, expected, norms = [], [], []
    for side in (theirs, ours):
        side.begin("norm")
    ours.handle.on_update(lambda *_: read.append((len(norms), norms[-1].item())))
    for _ in zip(theirs.rounds(), ours.rounds(), strict=True):
        expected.append(theirs.clip().item())
        norms.append(ours.clip())
    ours.handle.flush()
    found = compare.trees(dict(read), dict(enumerate(expected, 1)))
    found += compare.trees(ours.result(ours.module), theirs.result(theirs.module))
    ours.handle.detach()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_settings_must_agree(kind):
    setting = {"norm": 1.0} if kind == "norm" else {"value": 1.0}
    same = gradcast.Options(clip=gradcast.Clip(**setting))
    assert with_clipping(same, "it", **setting) is same
    taken = with_clipping(gradcast.Options(compare_every=2), "it", **setting)
    assert (getattr(taken.clip, kind), taken.compare_every, taken.clip.unasked) == (1.0, 2, False)
    for other in ({kind: 2.0}, {"norm": 1.0, "norm_type": 1.0}, {"value": 0.5}):
        options = gradcast.Options(clip=gradcast.Clip(**other))
        code, words = error_of(functools.partial(with_clipping, options, "Trainer has it", **setting))
        assert code == "invalid_use", words
        assert "Trainer has it" in words
    for unusual in (math.inf, -1.0):
        assert with_clipping(same, "it", norm=unusual) is same
