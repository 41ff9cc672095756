"""Trains a small CNN on scikit-learn's handwritten digits, with stock DDP or with gradcast.

    torchrun --nproc-per-node 2 examples/digits.py --gradcast off       # PyTorch's DistributedDataParallel as it is
    torchrun --nproc-per-node 2 examples/digits.py --gradcast hook      # the same semantics, better blocks
    torchrun --nproc-per-node 2 examples/digits.py --gradcast overlap   # gradients also travel under the next forward

The data are part of scikit-learn: nothing is downloaded. One process works too: python examples/digits.py
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TEST_COUNT = 297  # of the 1797 images; the others are trained on


def make_model(width: int = 32, hidden: int = 512) -> nn.Module:
    """Two convolutions over 8 x 8 pixels, then three linear layers, which hold most of the parameters."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(2 * width * 16, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 10),
    )  # fmt: skip


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images as (count, 1, 8, 8) with mean 0 and deviation 1, and their digits, in a fixed random order."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = (digits.images - digits.images.mean()) / digits.images.std()
    return torch.tensor(images, dtype=torch.float32)[order, None], torch.tensor(digits.target)[order]


def batches(count: int, batch: int, epoch: int) -> tuple[torch.Tensor, ...]:
    """The indices that this rank trains on in an epoch: in each another order, on every rank as many batches."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    order = order[: count // (batch * dist.get_world_size()) * batch * dist.get_world_size()]
    return order[dist.get_rank() :: dist.get_world_size()].split(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradcast", choices=["off", "hook", "overlap"], default="overlap")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50, help="images per process and step (default: 50)")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # set by torchrun; this makes `python examples/digits.py` a world of one
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, targets = load_data()

    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if args.gradcast != "off":
        import gradcast

        gradcast.attach(model, optimizer if args.gradcast == "overlap" else None)  # the one line

    for epoch in range(args.epochs):
        model.train()
        start, chosen = time.perf_counter(), batches(len(images) - TEST_COUNT, args.batch, epoch)
        for indices in chosen:
            optimizer.zero_grad()
            loss = cross_entropy(model(images[indices]), targets[indices])
            loss.backward()
            optimizer.step()
        step_ms = 1e3 * (time.perf_counter() - start) / len(chosen)
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[-TEST_COUNT:]).argmax(1) == targets[-TEST_COUNT:]).float().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}, accuracy {accuracy:.1%}, {step_ms:.1f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
