"""attach, a thaw and a new layout need the gradient buffers and pieces of a few MB, not a copy of the model; a step
needs what DDP's does; parameters that are frozen for long leave the plan."""

import contextlib
import ctypes
from pathlib import Path

import pytest

import gradcast
from training.attached import attach
from training.needs import torch
from training.pair import DDP, Training, differences, net
from training.pool import on_ranks

nn = torch.nn
MIB = 1 << 20
ROOM_BYTES = 32 * MIB
LARGE_BYTES = 5120 * 5120 * 4
_M_MMAP_THRESHOLD = -3  # of malloc.h


def resident_bytes(line):
    """VmRSS: now; VmHWM: the most since the high-water mark was set back."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{line}:")[1].split()[0])  # in kB


@contextlib.contextmanager
def peak():
    """A list that gets the most memory above what there was at the beginning, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back
    before, found = resident_bytes("VmRSS"), []
    yield found
    found.append(resident_bytes("VmHWM") - before)


def chain(frozen):
    """Layers of 16 MiB of parameters each, with inputs and outputs of nothing to speak of."""
    layers = [nn.Linear(2048, 2048, bias=False).requires_grad_(number >= frozen) for number in range(frozen + 2)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


@on_ranks(2)
def test_nothing_as_large_as_the_model_is_allocated(rank, mode):
    """A model of which most is frozen, as with LoRA: 160 MiB, of which 32 MiB are trained."""
    # What is freed goes back at once, also where much was freed before.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)
    module = chain(8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    gradcast.attach(net()).detach()  # what is loaded once
    with peak() as attached:
        handle = attach(module, optimizer, mode)

    def peak_of_steps(count):
        with peak() as found:
            for _ in range(count):
                optimizer.zero_grad()
                module(torch.ones(1, 2048)).sum().backward()
                optimizer.step()
            handle.flush()
        return found[0]

    first = peak_of_steps(6)  # gradients in the old layout and in the new one
    usual = peak_of_steps(6)  # what autograd and the backend need while a step runs
    module[0].requires_grad_(True)
    thawed = peak_of_steps(1)
    handle.detach()
    above = {
        "attach": attached[0] - 32 * MIB,
        "layout": first - usual - 32 * MIB,
        "thaw": thawed - usual - (48 + 16) * MIB,  # three layers' buffers; and one more layer's backward
    }
    return [f"{moment}: {each / MIB:.0f} MiB too many" for moment, each in above.items() if each > ROOM_BYTES]


def both_peaks(rank):
    Training(rank.index, "plain", "sgd plain").handle.detach()  # what is loaded once is not counted
    theirs = Training(rank.index, "large", "sgd plain", "ddp", ddp_options={"gradient_as_bucket_view": True})
    with peak() as their_growth:
        theirs.train(5)
    with peak() as our_growth:
        ours = Training(rank.index, "large", "sgd plain")
        ours.train(5)
        ours.handle.flush()
    ours.handle.detach()
    return their_growth[0], our_growth[0] - LARGE_BYTES  # the parameters themselves


@pytest.mark.slow
def test_memory_stays_that_of_ddp(ranks):
    """That of the leanest DDP, which keeps gradients in its buckets. A second copy of them would be 100 MB more; what
    the processes' allocators do differs by some 10 MB from run to run."""
    ranks.end()  # new processes: memory that earlier tests have left to the allocator would be used again, unseen
    for theirs, ours in ranks.run(2, both_peaks, timeout_s=120):
        assert theirs > LARGE_BYTES, "the measurement does not see the gradients"
        assert ours < theirs + LARGE_BYTES // 4


def frozen_for_long(side):
    """Until it is left out; then it is thawed again. DDP needs new wrappers, gradcast begins again by itself."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    called = side.called(module, optimizer)
    for number in range(90):
        if number in (6, 80):
            if side.handle is not None:
                assert any(place.name == "0.weight" for place in side.handle.layout) == (number == 6)
            module[0].requires_grad_(number == 80)
            called = DDP(module) if side.name == "ddp" else module
        optimizer.zero_grad()
        called(side.batch(number)).square().sum().backward()
        optimizer.step()
    return side.result(module)


@on_ranks(2)
def test_what_is_frozen_for_long_travels_no_more_and_may_be_trained_again(rank, mode):
    return differences(rank, frozen_for_long, mode)
