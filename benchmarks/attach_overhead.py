"""What gradcast itself costs a training step: per gradient, and with one worker, where there is nothing to send.

    python benchmarks/attach_overhead.py [--rounds 7] [--json]

Per gradient: the hook, the engine's event and the pending mark, without the copy into the buffer, which DDP has to make
too (shown beside it). One worker: a model of 150 tensors, plain and attached in turns; the ratio of their median steps,
during the warm-up, when stamps are taken, and after it.
"""

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
from torch import nn

import gradcast
from gradcast import _core
from gradcast.training import pending, planning
from gradcast.training.buffers import GradientBuffers
from gradcast.training.gradients import Gradients
from gradcast.training.slots import Slot

_TENSORS = 150
_STEPS = 40


class Listener:
    """A session that does nothing, so that what is measured is the gradient's own way."""

    def synchronizing(self) -> bool:
        return True

    def backward_begins(self) -> None: ...
    def gradient_ready(self, slot: Slot) -> None: ...
    def backward_ended(self) -> None: ...
    def touched(self, tensors: list[torch.Tensor], function: object) -> bool:
        raise AssertionError("nothing reads a gradient here")


def hook_us() -> tuple[float, float]:
    """Microseconds per gradient: of everything, and of the copy alone."""
    parameters = [nn.Parameter(torch.randn(1000)) for _ in range(_TENSORS)]
    names = [str(index) for index in range(_TENSORS)]
    buffers = GradientBuffers(names, parameters)
    world = _core.InprocWorld(1)
    engine = _core.Engine(world.transport(0, [flat.numpy() for flat in buffers.flats]))
    profile = planning.layout_profile(names, buffers, range(_TENSORS), world_size=1, name="overhead")
    engine.follow(profile, planning.warmup_plans(profile, "overlap")[0])
    listener = Listener()
    traffic = SimpleNamespace(ready=engine.on_ready, wait_all=engine.wait_all)
    slots = [Slot(index, name, p, 0) for index, (name, p) in enumerate(zip(names, parameters, strict=True))]
    gradients = Gradients(slots, buffers, traffic, world_size=2)
    handles = gradients.listen(listener)
    # The engine takes the end of backward for an autograd pass; here nobody runs one.
    gradients._callback_queued = True
    values = [torch.randn(1000) for _ in range(_TENSORS)]
    whole, copies = [], []
    for _ in range(200):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value
        engine.begin()
        start = time.perf_counter_ns()
        for slot in slots:
            gradients._on_gradient(slot)
        whole.append((time.perf_counter_ns() - start) / _TENSORS / 1e3)
        engine.wait_all()
        gradients.open = False
        for view in buffers.views:
            pending.clear(view)
        start = time.perf_counter_ns()
        for value, view in zip(values, buffers.views, strict=True):
            torch.mul(value, 0.5, out=view)
        copies.append((time.perf_counter_ns() - start) / _TENSORS / 1e3)
    for handle in handles:
        handle.remove()
    engine.shutdown()
    return statistics.median(whole), statistics.median(copies)


def model() -> nn.Module:
    layers = [layer for _ in range(_TENSORS // 2) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers)


def steps_ms(attached: bool) -> tuple[list[float], list[float]]:
    """Times of the steps during the warm-up, its first one left out, and after it."""
    torch.manual_seed(0)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    if attached:
        gradcast.attach(module, optimizer)
    batch = torch.randn(512, 256)
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter_ns()
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
        times.append((time.perf_counter_ns() - start) / 1e6)
    warmup_steps = gradcast.Options().warmup_steps
    return times[1:warmup_steps], times[warmup_steps:]


def one_worker(rounds: int) -> dict[str, dict[str, float]]:
    ratios: dict[str, list[float]] = {"during the warm-up": [], "after the warm-up": []}
    for _ in range(rounds):
        plain, attached = steps_ms(False), steps_ms(True)
        for name, before, after in zip(ratios, plain, attached, strict=True):
            ratios[name].append(statistics.median(after) / statistics.median(before))
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in ratios.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often plain and attached take turns (default: 7)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole_us, copy_us = hook_us()
    result = {"hook_us": whole_us - copy_us, "copy_us": copy_us, "one_worker": one_worker(args.rounds)}
    if args.json:
        print(json.dumps(result))
        return
    print(f"per gradient: {result['hook_us']:.2f} us, beside {copy_us:.2f} us for the copy into the buffer")
    for name, ratio in result["one_worker"].items():
        print(f"one worker, {name}: {ratio['median']:.4f} x plain ({ratio['min']:.4f} to {ratio['max']:.4f})")


if __name__ == "__main__":
    main()
