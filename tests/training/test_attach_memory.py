"""attach, a thaw and a new layout need the gradient buffers and pieces of a few MB, not a copy of the model; parameters
that are frozen for long leave the plan."""

import ctypes
from pathlib import Path

import pytest

import gradcast
from training.needs import torch
from training.sides import DDP, Side, differences, net

nn = torch.nn
MIB = 1 << 20
ROOM_BYTES = 32 * MIB
_M_MMAP_THRESHOLD = -3  # of malloc.h


def resident_bytes(line):
    """VmRSS: now; VmHWM: the most since ``forget_peak()``."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{line}:")[1].split()[0])  # in kB


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


class Peak:
    """The most memory above what there was at its beginning, in bytes."""

    def __enter__(self):
        forget_peak()
        self._before = resident_bytes("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = resident_bytes("VmHWM") - self._before


def chain(frozen):
    """Layers of 16 MiB of parameters each, with inputs and outputs of nothing to speak of."""
    layers = [nn.Linear(2048, 2048, bias=False).requires_grad_(number >= frozen) for number in range(frozen + 2)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


def measure(rank, mode):
    """A model of which most is frozen, as with LoRA: 160 MiB, of which 32 MiB are trained."""
    # What is freed goes back at once, also where much was freed before.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    module = chain(8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x = torch.ones(1, 2048)
    gradcast.attach(net()).detach()  # what is loaded once
    found = {}
    side = Side(mode, rank.index)
    with Peak() as peak:
        side.attach(module, optimizer)
    found["attach"] = peak.bytes - 32 * MIB

    def peak_of_steps(count):
        with Peak() as peak:
            for _ in range(count):
                optimizer.zero_grad()
                module(x).sum().backward()
                optimizer.step()
            side.handle.flush()
        return peak

    peak = peak_of_steps(6)  # gradients in the old layout and in the new one
    usual = peak_of_steps(6)  # what autograd and the backend need while a step runs
    found["layout"] = peak.bytes - usual.bytes - 32 * MIB
    module[0].requires_grad_(True)
    peak = peak_of_steps(1)
    found["thaw"] = peak.bytes - usual.bytes - (48 + 16) * MIB  # three layers' buffers; and one more layer's backward
    side.handle.detach()
    return found


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_nothing_as_large_as_the_model_is_allocated(ranks, mode):
    for found in ranks.run(2, measure, mode):
        for moment, above in found.items():
            assert above <= ROOM_BYTES, f"{moment}: {above / MIB:.0f} MiB above the gradient buffers"


def frozen_for_long(rank, mode):
    """How many bytes travel in a step, before and after a layer has been frozen for many steps."""
    side = Side(mode, rank.index)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    side.attach(module, optimizer)
    found = []
    for steps, frozen in ((6, False), (75, True)):
        module[0].requires_grad_(not frozen)
        for number in range(steps):
            optimizer.zero_grad()
            module(side.batch(number)).square().sum().backward()
            optimizer.step()
        found.append(sum(place.end_bytes - place.lo_bytes for place in side.handle.layout))
    names = sorted({place.name for place in side.handle.layout})
    side.handle.detach()
    return found, names


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_what_is_frozen_for_long_travels_no_more(ranks, mode):
    for (before, after), names in ranks.run(2, frozen_for_long, mode):
        assert after < before
        assert names == ["2.bias", "2.weight", "4.bias", "4.weight"]


def frozen_and_back(side):
    """Frozen until it is left out, thawed again: DDP needs new wrappers, gradcast begins again by itself."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    called = DDP(module) if side.name == "ddp" else module
    side.attach(called, optimizer)
    for number in range(90):
        if number in (6, 80):
            module[0].requires_grad_(number == 80)
            called = DDP(module) if side.name == "ddp" else module
        optimizer.zero_grad()
        called(side.batch(number)).square().sum().backward()
        optimizer.step()
    return side.result(module)


def run_frozen_and_back(rank, mode):
    return differences(rank, frozen_and_back, mode)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_what_was_frozen_for_long_may_be_trained_again(ranks, mode):
    for found in ranks.run(2, run_frozen_and_back, mode):
        assert found == []
