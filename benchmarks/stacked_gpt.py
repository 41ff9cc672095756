"""Trainings of char_gpt with SGD side by side on one device: DDP's, and local steps after DDP has begun.

The parameters of all models are one tensor, so that a step of all is some batched products, on a GPU one CUDA graph.
Numbers are, within rounding, those of one model after the other (tests/training/local/test_stacked.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

from benchmarks.int8_training import HELD_OUT_BATCH, chances, char_gpt
from gradcast.local_steps import make_schedule
from gradcast.training.local.outer import MERGE

MOMENTUM = 0.9


def rates(peak: float, steps: int) -> list[float]:
    """The learning rate of each step, by torch's OneCycleLR."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, cycle_momentum=False)
    found = []
    for _ in range(steps):
        found += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    return found


def first_local_step(run: dict[str, Any]) -> int:
    return round(run["start"] * run["steps"]) if "start" in run else run["steps"]


class Net:
    """char_gpt as a function of the parameters of many models: [models, elements], in the order of ``parameters()``."""

    def __init__(self, module: nn.Module) -> None:
        self._heads, self._depth = module.blocks[0].heads, len(module.blocks)
        self._shapes = {name: each.shape for name, each in module.named_parameters()}
        self.sizes = [shape.numel() for shape in self._shapes.values()]

    def parts(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views, by the parameter's name."""
        pieces = zip(self._shapes.items(), flat.split(self.sizes, dim=1), strict=True)
        return {name: piece.unflatten(1, shape) for (name, shape), piece in pieces}

    def losses(self, parts: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of each model. ``inputs``, ``targets``: [models, texts, bytes]."""
        models, texts, context = inputs.shape
        table = parts["bytes.weight"]
        width = table.shape[2]

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            scale, shift = parts[f"{name}.weight"][:, None], parts[f"{name}.bias"][:, None]
            return torch.addcmul(shift, layer_norm(x, (width,)), scale)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return torch.baddbmm(parts[f"{name}.bias"][:, None], x, parts[f"{name}.weight"].transpose(1, 2))

        rows = inputs + 256 * torch.arange(models, device=inputs.device)[:, None, None]
        x = table.flatten(0, 1).index_select(0, rows.flatten()).view(models, texts, context, width)
        x = (x + parts["places.weight"][:, None, :context]).flatten(1, 2)
        for block in (f"blocks.{number}" for number in range(self._depth)):
            qkv = linear(norm(x, f"{block}.before_attention"), f"{block}.qkv")
            heads = qkv.view(models * texts, context, 3, self._heads, -1).unbind(2)
            attended = scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
            x = x + linear(attended.transpose(1, 2).reshape(x.shape), f"{block}.projection")
            x = x + linear(gelu(linear(norm(x, f"{block}.before_mlp"), f"{block}.mlp.0")), f"{block}.mlp.2")
        logits = torch.bmm(norm(x, "norm"), table.transpose(1, 2))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(models, -1).mean(1)


class Steps:
    """SGD's steps of some trainings. ``parameters``, ``momentum``: [trainings, ranks, elements], which change.

    ``rate``: [steps, trainings]. ``texts``: [steps, seeds, ranks, texts, bytes]. ``seeds``: each training's, an index.
    ``synced``: so many trainings, the first ones, average gradients over the ranks.
    """

    def __init__(
        self,
        net: Net,
        parameters: torch.Tensor,
        momentum: torch.Tensor,
        rate: torch.Tensor,
        texts: torch.Tensor,
        seeds: torch.Tensor,
        synced: int,
    ) -> None:
        self._net, self._parameters, self._momentum = net, parameters, momentum
        self._rate, self._texts, self._seeds = rate, texts, seeds
        self._gradients = torch.zeros_like(parameters)
        self._synced = self._gradients[:synced]
        parts = net.parts(parameters.flatten(0, 1))
        self._leaves = {name: each.detach().requires_grad_() for name, each in parts.items()}
        self._targets = list(net.parts(self._gradients.flatten(0, 1)).values())

    def make(self, number: torch.Tensor) -> None:
        """Step ``number``, of one element, which it counts up."""
        texts = self._texts.index_select(0, number)[0].index_select(0, self._seeds).flatten(0, 1).long()
        loss = self._net.losses(self._leaves, texts[..., :-1], texts[..., 1:]).sum()
        found = torch.autograd.grad(loss, list(self._leaves.values()))
        with torch.no_grad():
            for target, gradient in zip(self._targets, found, strict=True):
                target.copy_(gradient)
            self._synced.copy_(self._synced.mean(1, keepdim=True).expand_as(self._synced))
            self._momentum.mul_(MOMENTUM).add_(self._gradients)
            self._parameters.addcmul_(self._momentum, self._rate.index_select(0, number)[0, :, None, None], value=-1.0)
            number += 1

    def ready(self, number: torch.Tensor) -> Callable[[], Any]:
        """What makes the next step."""
        if number.device.type != "cuda":
            return lambda: self.make(number)
        changed = (self._parameters, self._momentum, number)
        kept = [each.clone() for each in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # a capture must not hold what only the first steps do
                self.make(number)
                for each, old in zip(changed, kept, strict=True):
                    each.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.make(number)
        return graph.replay


class Rounds:
    """Local steps of one training: what ``Reference`` of tests/training/local computes, over flat parameters."""

    def __init__(self, run: dict[str, Any], parameters: torch.Tensor, sizes: Sequence[int]) -> None:
        """``parameters``: [ranks, elements], which change."""
        self._run, self._schedule = run, make_schedule([(each, 4) for each in sizes], run["every"], run["overlap"])
        self.value = parameters[0].clone()  # the global copy
        counts = [sum(each.hi - each.lo for each in fragment) for fragment in self._schedule.fragments]
        flat = (parameters, self.value, torch.zeros_like(self.value))
        self._fragments = list(zip(*(each.split(counts, dim=-1) for each in flat), strict=True))
        self._merge = MERGE if self._schedule.overlap else 0.0
        self._sent: dict[int, torch.Tensor] = {}
        self._step = 0

    def after_step(self) -> None:
        self._step += 1
        for number in self._schedule.applied(self._step):
            self._apply(number, self._merge)
        for number in self._schedule.taken(self._step):
            self._take(number)
            if not self._schedule.overlap:
                self._apply(number, 0.0)

    def end(self) -> None:
        """As handle.end_round()."""
        if not self._schedule.overlap and self._step % self._schedule.every == 0:
            return
        for number in list(self._sent):
            self._apply(number, self._merge)
        for number in range(len(self._fragments)):
            self._take(number)
            self._apply(number, 0.0)

    def _take(self, number: int) -> None:
        own, value, _ = self._fragments[number]
        self._sent[number] = (value - own).mean(0)

    def _apply(self, number: int, merge: float) -> None:
        (own, value, momentum), mean = self._fragments[number], self._sent.pop(number)
        if self._run["outer"] == "average":
            value.sub_(mean)
        else:
            momentum.mul_(self._run["outer_momentum"]).add_(mean)
            value.sub_(mean.add(momentum, alpha=self._run["outer_momentum"]), alpha=self._run["outer_lr"])
        own.mul_(merge).add_(value, alpha=1 - merge)


class Stack:
    """Trainings which differ in nothing but seed, rate, and how they make local steps."""

    def __init__(self, runs: Sequence[dict[str, Any]], ranks: int, device: str) -> None:
        self.runs = sorted(runs, key=first_local_step, reverse=True)  # DDP's first
        batch, width, steps = (runs[0][name] for name in ("batch", "width", "steps"))
        seeds = sorted({run["seed"] for run in runs})
        first, texts = [], []
        for seed in seeds:
            torch.manual_seed(seed)
            job = char_gpt(batch, width)
            module = job.module()
            first.append(nn.utils.parameters_to_vector(module.parameters()).detach())
            own = chances(seed, ranks)
            drawn = [torch.stack([_whole(*job.draw(chance)) for chance in own]) for _ in range(steps)]
            texts.append(torch.stack(drawn))
        # Until local steps begin, trainings with the same seed and rate are one.
        trunks = sorted({(run["seed"], run["rate"]) for run in runs})
        self._net, self._held_out = Net(module), _whole(*job.held_out).to(device)
        self._texts = torch.stack(texts, 1).to(device)
        self._rate = torch.tensor([rates(rate, steps) for _, rate in trunks], device=device).t().contiguous()
        self._seeds = torch.tensor([seeds.index(seed) for seed, _ in trunks], device=device)
        self._trunk_of = torch.tensor([trunks.index((run["seed"], run["rate"])) for run in self.runs], device=device)
        start = torch.stack(first).to(device)[self._seeds]
        self.parameters = start[:, None].repeat(1, ranks, 1)  # [trainings, ranks, elements]
        self._momentum = torch.zeros_like(self.parameters)
        self._number = torch.zeros(1, dtype=torch.long, device=device)

    def train(self, measured_every: int) -> list[list[float]]:
        """The held-out losses of each of ``runs``, each so many steps and at the end."""
        steps, begin = len(self._texts), first_local_step(self.runs[-1])
        if {first_local_step(run) for run in self.runs} - {begin, steps}:
            raise ValueError("local steps of one stack begin together: train these runs apart")
        curve = [each[self._trunk_of] for each in self._run(range(begin), [], measured_every)]
        self.parameters, self._momentum = self.parameters[self._trunk_of], self._momentum[self._trunk_of]
        self._rate, self._seeds = self._rate[:, self._trunk_of], self._seeds[self._trunk_of]
        with_rounds = [number for number, run in enumerate(self.runs) if first_local_step(run) < steps]
        rounds = [Rounds(self.runs[number], self.parameters[number], self._net.sizes) for number in with_rounds]
        curve += self._run(range(begin, steps), rounds, measured_every)
        for each in rounds:
            each.end()
        curve.append(self._measured([]))
        return torch.stack(curve, 1).tolist()

    def _run(self, numbers: range, rounds: list[Rounds], measured_every: int) -> list[torch.Tensor]:
        """``rounds``: of the last trainings; the others average gradients."""
        if not numbers:
            return []
        synced = len(self.parameters) - len(rounds)
        data = (self._rate, self._texts, self._seeds)
        step = Steps(self._net, self.parameters, self._momentum, *data, synced).ready(self._number)
        found = []
        for number in numbers:
            if number % measured_every == 0:
                found.append(self._measured(rounds))
            step()
            for each in rounds:
                each.after_step()
        return found

    @torch.no_grad()
    def _measured(self, rounds: list[Rounds]) -> torch.Tensor:
        """The held-out loss of each training's model, with rounds of the global copy."""
        models = self.parameters[:, 0].clone()
        for model, each in zip(models[len(models) - len(rounds) :], rounds, strict=True):
            model.copy_(each.value)
        parts, total = self._net.parts(models), torch.zeros(len(models), device=models.device)
        for texts in self._held_out.split(HELD_OUT_BATCH):
            shared = texts.long().expand(len(models), -1, -1)
            total += len(texts) * self._net.losses(parts, shared[..., :-1], shared[..., 1:])
        return total / len(self._held_out)


def _whole(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The texts, of which inputs are all but the last bytes, and targets all but the first."""
    return torch.cat([inputs, targets[:, -1:]], 1).to(torch.uint8)
