"""A module under gradcast with nothing around it, for tests of what is refused."""

import gradcast
from training.needs import torch


class Attached:
    def __init__(self, module, mode="overlap", **options):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.handle = gradcast.attach(
            module,
            self.optimizer if mode == "overlap" else None,
            options=gradcast.Options(adapt=False, warmup_steps=3, **options),
        )

    def step(self, *inputs):
        self.optimizer.zero_grad()
        self.module(*inputs).sum().backward()
        self.optimizer.step()


def error_of(function):
    try:
        function()
    except gradcast.Error as error:
        return error.code, str(error)
    return None, "no error"
