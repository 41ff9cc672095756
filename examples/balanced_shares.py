"""Trains where the last process is slower than the others: it gets less of each batch, and nobody waits for it.

    torchrun --nproc-per-node 2 examples/balanced_shares.py --slowness 2

Waiting stands for compute, so one machine is enough.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradcast

TOLD_EVERY = 10  # steps


class Compute(nn.Module):
    """Takes as long as a device would that computes so many samples one after the other."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.sample_s = sample_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sample_s * len(x))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slowness", type=float, default=2.0, help="of the last process (default: 2)")
    parser.add_argument("--batch", type=int, default=96, help="samples of all processes (default: 96)")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(100 * args.batch, 64), torch.randint(10, (100 * args.batch,)))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    sample_s = 1e-3 * (args.slowness if is_last else 1.0)
    model = nn.Sequential(Compute(sample_s), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    handle = gradcast.attach(model, optimizer)
    sampler = gradcast.BalancedBatchSampler(data, handle, args.batch)
    start = time.perf_counter()
    for step, (inputs, labels) in zip(range(1, args.steps + 1), DataLoader(data, batch_sampler=sampler), strict=False):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step % TOLD_EVERY == 0 and dist.get_rank() == 0:
            step_ms = 1e3 * (time.perf_counter() - start) / TOLD_EVERY
            print(f"step {step}: shares {', '.join(map(str, sampler.shares))}, {step_ms:.1f} ms per step", flush=True)
            start = time.perf_counter()
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
