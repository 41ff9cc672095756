"""A training whose parts take a known time: what the doctor's tests run, as a user's script that knows nothing of it.

Layers wait instead of computing, in forward and twice as long in backward; the gradients and their traffic are real.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LAYERS = 8
WIDTH = 256  # of a layer: 262 kB of gradients


class Waits(torch.autograd.Function):
    """Takes ``ms`` in forward and twice that in backward."""

    @staticmethod
    def forward(context, value, ms):
        context.ms = ms
        time.sleep(ms / 1e3)
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2 * context.ms / 1e3)
        return gradient, None


class Layer(nn.Module):
    """``ms``: of computing in forward, twice that in backward; ``python_ms``: between operations, in forward."""

    def __init__(self, ms, python_ms):
        super().__init__()
        self.ms, self.python_ms = ms, python_ms
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value):
        time.sleep(self.python_ms / 1e3)
        return Waits.apply(torch.relu(self.norm(self.linear(value))), self.ms)


class Items(Dataset):
    """``read_ms``: of a batch, waiting as for a disk; ``prepare_ms``: of a batch, computing."""

    def __init__(self, count, batch, read_ms, prepare_ms):
        self.count, self.read_s, self.prepare_s = count, read_ms / batch / 1e3, prepare_ms / batch / 1e3
        self.read_ms = self.prepared_ms = 0.0  # what it came to, on a machine that has other things to do, too

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = time.perf_counter()
        time.sleep(self.read_s)
        middle = time.perf_counter()
        end = time.thread_time() + self.prepare_s
        while time.thread_time() < end:
            pass
        self.read_ms += 1e3 * (middle - start)
        self.prepared_ms += 1e3 * (time.perf_counter() - middle)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)


def parse():
    parser = argparse.ArgumentParser()
    # python-ms: of a step, between operations. Layer 3 of slow-rank takes slow-ms more a step. With an only-rank, the
    # data is slow on that rank alone. accumulate: batches per step.
    defaults = {
        "steps": 40, "batch": 4, "accumulate": 1, "workers": 0, "layer-ms": 2.0, "python-ms": 0.0, "read-ms": 0.0,
        "prepare-ms": 0.0, "slow-rank": -1, "slow-ms": 0.0, "only-rank": -1,
    }  # fmt: skip
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument(
        "--mode", choices=["ddp", "hook", "overlap", "wire"], default="ddp", help="wire: overlap mode in bf16"
    )
    parser.add_argument("--bucket-mib", type=float, help="of DDP")
    parser.add_argument("--state", help="a file for rank 0's digest of the final state")
    parser.add_argument("--took", help="a file for what rank 0 has read and prepared, and its steps, ms")
    return parser.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(args.layer_ms, args.python_ms / LAYERS) for _ in range(LAYERS)))
    if rank == args.slow_rank:
        model[3].ms += args.slow_ms / 3
    ddp = DistributedDataParallel(model, bucket_cap_mb=args.bucket_mib)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    no_sync = ddp.no_sync
    if args.mode != "ddp":
        import gradcast

        options = gradcast.Options(wire="bf16" if args.mode == "wire" else "fp32")
        given = None if args.mode == "hook" else optimizer
        no_sync = gradcast.attach(ddp, given, options=options).no_sync
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7)
    slow_data = args.only_rank in (-1, rank)
    delays_ms = (args.read_ms, args.prepare_ms) if slow_data else (0.0, 0.0)
    items = Items(args.steps * args.batch, args.batch, *delays_ms)
    torch.manual_seed(rank)
    stamps = []
    loader = DataLoader(items, batch_size=args.batch, shuffle=True, num_workers=args.workers)
    for number, (inputs, targets) in enumerate(loader):
        noise = torch.randn_like(inputs)  # the generators take part in the result
        is_last = (number + 1) % args.accumulate == 0
        with contextlib.nullcontext() if is_last else no_sync():
            nn.functional.mse_loss(ddp(inputs + 0.1 * noise), targets).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            stamps.append(time.perf_counter())
    if args.state and rank == 0:
        with open(args.state, "w") as file:
            file.write(digest(model, optimizer))
    if args.took and rank == 0:
        with open(args.took, "w") as file:
            steps = [1e3 * (after - before) for before, after in itertools.pairwise(stamps)]
            per_step = {"read": items.read_ms / args.steps, "prepare": items.prepared_ms / args.steps}
            json.dump(per_step | {"steps": steps}, file)
    dist.destroy_process_group()


def digest(model, optimizer):
    """A hash of every bit that training has left."""
    found = hashlib.sha256()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*tensors, torch.get_rng_state()]:
        found.update(tensor.detach().numpy().tobytes())
    return f"{found.hexdigest()} {optimizer.param_groups[0]['lr']}"


if __name__ == "__main__":
    main()
