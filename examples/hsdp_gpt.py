"""Trains the GPT of char_gpt.py with FSDP2 on a mesh of (replicas, shards): HSDP, by itself or with gradcast.

    torchrun --nproc-per-node 4 examples/hsdp_gpt.py --gradcast off       # native HSDP
    torchrun --nproc-per-node 4 examples/hsdp_gpt.py --gradcast hook      # the same semantics, planned blocks
    torchrun --nproc-per-node 4 examples/hsdp_gpt.py --gradcast overlap   # replicas' sums also under the next forward

Half the processes are a replica, unless --shards says otherwise. It runs on CPUs over Gloo.
"""

import argparse
import time

import torch
import torch.distributed as dist
from char_gpt import CONTEXT, GPT, load_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradcast", choices=["off", "hook", "overlap"], default="overlap")
    parser.add_argument("--shards", type=int, help="processes per replica (default: half of all)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--passes", type=int, default=2, help="backward passes per step (default: 2)")
    parser.add_argument("--batch", type=int, default=4, help="texts per process and pass (default: 4)")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    shards = args.shards or dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)  # FSDP does not make replicas equal: each has to begin with the same parameters
    text = load_text()
    chance = torch.Generator().manual_seed(dist.get_rank())  # each rank draws texts of its own

    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.gradcast != "off":
        import gradcast

        gradcast.attach(model, optimizer if args.gradcast == "overlap" else None)  # the one line

    start, told = time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        for number in range(1, args.passes + 1):
            model.set_requires_all_reduce(number == args.passes)  # earlier passes stay with their replica
            places = torch.randint(len(text) - CONTEXT, (args.batch, 1), generator=chance) + torch.arange(CONTEXT + 1)
            texts = text[places]
            loss = cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten()) / args.passes
            loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 0 or step == args.steps):
            step_ms = 1e3 * (time.perf_counter() - start) / (step - told)
            print(f"step {step:4}: loss {args.passes * loss.item():.3f}, {step_ms:.1f} ms per step", flush=True)
            start, told = time.perf_counter(), step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
