"""What gradcast itself costs a training step: per gradient, and with one worker, where there is nothing to send.

    python benchmarks/attach_overhead.py [--rounds 7]

Per gradient: the hook, the engine's event and the pending mark, without the copy into the buffer, which DDP has to make
too (shown beside it). One worker: a model of 150 tensors, plain and attached in turns, step by step; the ratio of their
median steps, during the warm-up, when stamps are taken, and after it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import gradcast
from gradcast import _core
from gradcast.training.plan import measured_profile, warmup
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.parameter_state import ParameterState, ParameterStates

# The in-process network is the tests' own: `make test-modules` builds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import _testing

_TENSORS = 150
_STEPS = 40


class Listener:
    """A session that does nothing, so that what is measured is the gradient's own way."""

    def is_synchronizing(self) -> bool:
        return True

    def on_backward_begin(self) -> None: ...
    def on_gradient_sent(self, state: ParameterState) -> None: ...
    def on_backward_end(self) -> None: ...
    def wait_for_gradients(self) -> None: ...
    def resolve(self, tensors: list[torch.Tensor]) -> None:
        raise AssertionError("nothing reads a gradient here")


def hook_us() -> tuple[float, float]:
    """Microseconds per gradient: of everything, and of the copy alone."""
    parameters = [nn.Parameter(torch.randn(1000)) for _ in range(_TENSORS)]
    names = [str(index) for index in range(_TENSORS)]
    buffers = GradientBuffers(names, parameters, 2)
    world = _testing.InprocWorld(1)
    engine = _core.Engine(world.transport(0, [flat.numpy() for flat in buffers.flats]))
    profile = measured_profile.layout_profile(names, buffers, range(_TENSORS), world_size=1, name="overhead")
    engine.follow(profile, warmup.warmup_plans(profile, "overlap")[0])
    listener = Listener()
    exchange = SimpleNamespace(ready=engine.on_ready, wait_all=engine.wait_all, on_flags_written=lambda: None)
    named = enumerate(zip(names, parameters, strict=True))
    states = ParameterStates(ParameterState(index, name, parameter, 0) for index, (name, parameter) in named)
    gradients = GradientHooks(states, buffers, exchange, world_size=2)
    handles = gradients.install(listener)
    # The end of a backward pass is awaited already, as from its start at the module's output; here nobody runs one.
    gradients._task = 1
    values = [torch.randn(1000) for _ in range(_TENSORS)]
    whole, copies = [], []
    for _ in range(200):
        for parameter, value in zip(parameters, values, strict=True):
            parameter.grad = value
        engine.begin()
        start = time.perf_counter_ns()
        for state in states:
            gradients._on_gradient(state)
        whole.append((time.perf_counter_ns() - start) / _TENSORS / 1e3)
        engine.wait_all()
        gradients.open = False
        for state in states:
            state.arrive()
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


class Training:
    """One model, stepped and timed one step at a time."""

    def __init__(self, attached: bool) -> None:
        torch.manual_seed(0)
        self._module = model()
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=0.01, momentum=0.9)
        self._handle = gradcast.attach(self._module, self._optimizer) if attached else None
        self.steps_ms: list[float] = []

    def step(self, batch: torch.Tensor) -> None:
        start = time.perf_counter_ns()
        self._optimizer.zero_grad()
        self._module(batch).square().mean().backward()
        self._optimizer.step()
        self.steps_ms.append((time.perf_counter_ns() - start) / 1e6)

    def close(self) -> None:
        if self._handle:
            self._handle.detach()


def round_ratios() -> dict[str, float]:
    """Plain and attached by turns, step by step, so that whatever the machine does falls on both. The first step of
    each, in which memory is new, is left out."""
    batch = torch.randn(512, 256)
    plain, attached = pair = Training(attached=False), Training(attached=True)
    for step in range(_STEPS):
        for training in pair if step % 2 else reversed(pair):
            training.step(batch)
    for training in pair:
        training.close()
    warmup_steps = gradcast.Options().warmup_steps
    spans = {"during the warm-up": slice(1, warmup_steps), "after the warm-up": slice(warmup_steps, None)}
    return {
        name: statistics.median(attached.steps_ms[span]) / statistics.median(plain.steps_ms[span])
        for name, span in spans.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often plain and attached take turns (default: 7)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole_us, copy_us = hook_us()
    print(f"per gradient: {whole_us - copy_us:.2f} us, beside {copy_us:.2f} us for the copy into the buffer")
    rounds = [round_ratios() for _ in range(args.rounds)]
    for name in rounds[0]:
        ratios = [ratio[name] for ratio in rounds]
        print(f"one worker, {name}: {statistics.median(ratios):.4f} x plain ({min(ratios):.4f} to {max(ratios):.4f})")


if __name__ == "__main__":
    main()
