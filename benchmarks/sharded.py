"""A module that FSDP2 shards, on replicas with a slow link: gradcast against the best that FSDP's own order can do.

    gradcast dev lab run --hosts 2 --ranks-per-host 2 --bandwidth 200mbit -- benchmarks/sharded.py --megabytes 9.6

The ranks of a host are the shards of a replica. Layers wait where an accelerator would compute; parameters, gradients
and all that is sent are real. The arms train equal models in turns:

alone      nothing is sent between replicas
baseline   an asynchronous all-reduce for each of FSDP's groups behind its reduce-scatter, all awaited where backward
           ends: what FSDP does on a GPU. (On the CPU its all-reduce is synchronous, which is no fair baseline.)
hook, overlap   gradcast

With ``--clip 1 --passes 2`` the loop is that of torchtitan: each pass is averaged, every step clips by its two calls,
and every tenth reads the norm.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradcast
from gradcast.training.compat.sharding import groups_of

_WIDTH = 64


class Waiting(nn.Module):
    """A layer of ``elements`` that computes for so many seconds forward, and twice as long backward."""

    def __init__(self, elements: int, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(elements // _WIDTH, _WIDTH) * 0.02)
        self.forward_s = forward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        y = x * self.weight[0].tanh()
        if y.requires_grad:
            y.register_hook(self._computes)
        return y

    def _computes(self, _: torch.Tensor) -> None:
        time.sleep(2 * self.forward_s)


class Arm:
    def __init__(self, name: str, args: argparse.Namespace, mesh) -> None:
        torch.manual_seed(0)
        elements = int(args.megabytes * 1e6 / 4 / args.layers)
        self.max_norm, self.passes, self.norms = args.clip, args.passes, []
        self.name, over = name, mesh if name in ("hook", "overlap") else mesh["shards"]
        self.module = nn.Sequential(
            *(Waiting(elements, args.forward_ms / 1e3 / args.layers) for _ in range(args.layers))
        )
        for layer in self.module:
            fully_shard(layer, mesh=over)
        fully_shard(self.module, mesh=over)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        self.handle, self._works = None, []
        if name == "baseline":
            self._replicas = mesh.get_group("replicas")
            for group in groups_of(self.module):
                group.take_over(lambda _: None, self._send, {})
        elif name in ("hook", "overlap"):
            clip = gradcast.Clip(norm=args.clip if name == "overlap" else None)
            optimizer = self.optimizer if name == "overlap" else None
            self.handle = gradcast.attach(self.module, optimizer, options=gradcast.Options(clip=clip))

    def _send(self, _, reduced) -> None:
        values = [each.parameter.grad.to_local().div_(self._replicas.size()) for each in reduced]
        self._works += [dist.all_reduce(each, group=self._replicas, async_op=True) for each in values]

    def _clip(self, *, reads: bool) -> None:
        parameters = list(self.module.parameters())
        norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None], foreach=True)
        norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm, foreach=True)
        if reads:
            self.norms.append(norm.item())

    def turn(self, steps: int) -> list[float]:
        """The ms of each step but the first."""
        times = []
        for step in range(steps):
            began = time.perf_counter()
            self.optimizer.zero_grad()
            for _ in range(self.passes):
                self.module(torch.ones(_WIDTH)).square().mean().backward()
                for work in self._works:
                    work.wait()
                self._works.clear()
            if self.max_norm is not None:
                self._clip(reads=step % 10 == 9)
            self.optimizer.step()
            times.append(1e3 * (time.perf_counter() - began))
        if self.handle is not None:
            self.handle.flush()
        return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=9.6, help="of parameters (default 9.6)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--forward-ms", type=float, default=133.0, help="backward takes twice as long")
    parser.add_argument("--passes", type=int, default=1, help="backward passes per step, each averaged (default 1)")
    parser.add_argument("--clip", type=float, help="clip by this norm, as torchtitan does")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=9)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    replicas = 2
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicas", "shards"))
    arms = [Arm(name, args, mesh) for name in ("alone", "baseline", "hook", "overlap")]
    for arm in arms:
        dist.barrier()
        arm.turn(24)
    times = {arm.name: [] for arm in arms}
    for number in range(args.rounds):
        for arm in arms if number % 2 else reversed(arms):
            dist.barrier()
            times[arm.name].append(statistics.median(arm.turn(args.steps)))
    if dist.get_rank() == 0:
        medians = {name: statistics.median(each) for name, each in times.items()}
        for arm in arms:
            stats = arm.handle.stats() if arm.handle else {}
            rounds = " ".join(f"{each:.1f}" for each in times[arm.name])
            gain = medians["baseline"] / medians[arm.name]
            print(
                f"{arm.name:9s} {medians[arm.name]:7.1f} ms, {gain:.3f} x the baseline ({rounds}), predicted "
                f"{stats.get('predicted_ms')}, as DDP: {stats.get('runs_as_ddp')}, clipping: {stats.get('clipping')}"
            )
        print(json.dumps({"arguments": vars(args), "rounds_ms": times}))
    differences = [
        float((one.to_local() - other.to_local()).detach().abs().max())
        for one, other in zip(arms[1].module.parameters(), arms[3].module.parameters(), strict=True)
    ]
    print(f"rank {dist.get_rank()}: largest difference of a parameter to the baseline's {max(differences)}")
    for arm in arms:
        if arm.handle is not None:
            arm.handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
