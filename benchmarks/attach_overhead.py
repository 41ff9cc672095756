"""What gradcast itself costs a training step with one worker, where there is nothing to send.

    python benchmarks/attach_overhead.py [--rounds 7]

A model of 150 tensors, plain and attached in turns, step by step; the ratio of their median steps, during the warm-up,
when stamps are taken, and after it. With more workers: host_cost.py.
"""

import argparse
import statistics
import time

import torch
from torch import nn

import gradcast

_TENSORS = 150
_STEPS = 40


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
    warmup_steps = gradcast.Planning().warmup_steps
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
    rounds = [round_ratios() for _ in range(args.rounds)]
    for name in rounds[0]:
        ratios = [ratio[name] for ratio in rounds]
        print(f"one worker, {name}: {statistics.median(ratios):.4f} x plain ({min(ratios):.4f} to {max(ratios):.4f})")


if __name__ == "__main__":
    main()
