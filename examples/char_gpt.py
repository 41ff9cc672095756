"""Trains a small GPT to write Python, on the standard library's own sources, with stock DDP or with gradcast.

    torchrun --nproc-per-node 2 examples/char_gpt.py --gradcast off       # PyTorch's DistributedDataParallel as it is
    torchrun --nproc-per-node 2 examples/char_gpt.py --gradcast hook      # the same semantics, better blocks
    torchrun --nproc-per-node 2 examples/char_gpt.py --gradcast overlap   # gradients also travel under the next forward

Characters are bytes, the text is what this Python came with. One process works too: python examples/char_gpt.py
"""

import argparse
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 64  # bytes that the model sees
TEXT_BYTES = 1_000_000


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """The embedding of the bytes is also the last layer: tied weights."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.bytes.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def load_text() -> torch.Tensor:
    """The first modules of the standard library in the order of their names."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradcast", choices=["off", "hook", "overlap"], default="overlap")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="texts per process and step (default: 8)")
    args = parser.parse_args()

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # set by torchrun; this makes `python examples/char_gpt.py` a world of one
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = load_text()
    chance = torch.Generator().manual_seed(dist.get_rank())  # each rank draws texts of its own

    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=args.steps)
    if args.gradcast != "off":
        import gradcast

        gradcast.attach(model, optimizer if args.gradcast == "overlap" else None)  # the one line

    start, told = time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        places = torch.randint(len(text) - CONTEXT, (args.batch, 1), generator=chance) + torch.arange(CONTEXT + 1)
        texts = text[places]
        optimizer.zero_grad()
        loss = cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps):
            step_ms = 1e3 * (time.perf_counter() - start) / (step - told)
            print(f"step {step:4}: loss {loss.item():.3f}, {step_ms:.1f} ms per step", flush=True)
            start, told = time.perf_counter(), step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
