"""The same training with gradcast and with stock DDP, of a module that the test makes."""

import gradcast
from training import compare, optimizers
from training.models import TASKS
from training.needs import torch

nn = torch.nn


class Pair:
    """Twins of a module that the test makes."""

    def __init__(self, rank, make, mode="overlap", optimizer="adam plain"):
        self.rank = rank
        torch.manual_seed(rank.index)
        self.ours = make()
        torch.manual_seed(rank.index)
        self.theirs = make()
        self.ddp = nn.parallel.DistributedDataParallel(self.theirs)
        self.recipes = [optimizers.make(optimizer, module) for module in (self.theirs, self.ours)]
        self.handle = gradcast.attach(
            self.ours,
            self.recipes[1].optimizer if mode == "overlap" else None,
            options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"),
        )

    def train(self, steps, forward=lambda module, inputs: module(inputs)):
        task = TASKS["plain"]
        for number in range(steps):
            inputs, targets = task.batch(self.rank.index, number)
            for module, recipe in zip((self.ddp, self.ours), self.recipes, strict=True):
                recipe.optimizer.zero_grad()
                nn.functional.cross_entropy(forward(module, inputs).float(), targets).backward()
                recipe.optimizer.step()
                recipe.after_step()

    def differences(self):
        self.handle.flush()
        found = compare.modules(self.ours, self.theirs)
        found += compare.optimizers(self.recipes[1].optimizer, self.recipes[0].optimizer)
        self.handle.detach()
        return found
