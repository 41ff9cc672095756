"""Trainings with Accelerate, all of the same small model: python -m frameworks.accelerate_cases FOLDER"""

import functools
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gradcast
import gradcast.frameworks.accelerate as gradcast_accelerate
from frameworks.watch import BATCH, BATCHES, EPOCHS, Watch, cases_of, options, run, small_data, small_model

CLIPPED_NORM = 0.7  # some steps are clipped, others not


def train(
    watch: Watch, *, attach=None, clip: float | None = None, accumulate: int = 1, scaler=False, takes_over=False
) -> nn.Module:
    """The loop of Accelerate's own documentation. ``attach(model, optimizer)`` gets what ``prepare`` has returned.
    ``takes_over``: gradcast does what the loop's call asks for."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    if scaler:
        # What Accelerate does for fp16, which it refuses without a GPU.
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**8), True
    module = small_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(small_data(BATCHES), BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(watch.of(module), optimizer, loader, scheduler)
    handle = attach(model, optimizer) if attach is not None else None
    if takes_over:
        handle = gradcast_accelerate.attach(accelerator, model, optimizer, options=options(clip=gradcast.Clip(clip)))
    norms = []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(inputs), targets))
                if clip is not None and accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clip))
                optimizer.step()
                if accelerator.sync_gradients:
                    watch.after_step()
                scheduler.step()
                optimizer.zero_grad()
    if handle is not None:
        watch.end(handle)
        handle.detach()
    watch.notes["norms"] = list(map(float, norms))
    watch.notes["rate"] = scheduler.get_last_lr()
    return module


def register(model: nn.Module, _) -> None:
    model.register_comm_hook(gradcast.HookState(), gradcast.comm_hook)


def clipping(model: nn.Module, optimizer: Any) -> gradcast.Handle:
    return gradcast.attach(model, optimizer, options=options(clip=gradcast.Clip(CLIPPED_NORM)))


def refused(watch: Watch) -> nn.Module:
    """Clipping inside would not happen in the scaler's steps."""
    try:
        return train(watch, attach=clipping, scaler=True)
    except gradcast.Error as error:
        watch.notes["refused"] = str(error)
        return nn.Linear(1, 1)


WAYS = {
    "stock": None,
    "registered": register,
    "hook": lambda model, _: gradcast.attach(model, options=options()),
    "overlap": lambda model, optimizer: gradcast.attach(model, optimizer, options=options()),
    "inner": lambda model, optimizer: gradcast.attach(model, optimizer.optimizer, options=options()),
}
KINDS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"clip": CLIPPED_NORM},
    "scaler": {"scaler": True},
}
CASES = cases_of(train, KINDS, WAYS) | {
    "clipped inside": functools.partial(train, attach=clipping),
    "taken over": functools.partial(train, clip=CLIPPED_NORM, takes_over=True),
    "taken over accumulated": functools.partial(train, clip=CLIPPED_NORM, takes_over=True, accumulate=2),
    "clipped accumulated stock": functools.partial(train, clip=CLIPPED_NORM, accumulate=2),
    "scaler refused": refused,
}

if __name__ == "__main__":
    run(CASES)
