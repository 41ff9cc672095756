import os
import sys

import gradcast
from training.attached import Attached
from training.needs import torch
from training.pool import on_ranks

OURS = os.path.dirname(gradcast.__file__)
FEW, MANY = 10, 60  # layers of two parameters


def calls_in_a_step(attached, inputs) -> int:
    """The number of functions that gradcast runs and calls in a step whose gradients arrive before the first update."""
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(profile)
    try:
        attached.step(inputs)
        attached.handle.flush()
    finally:
        sys.setprofile(None)
    return count


def model(layers):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))


@on_ranks(2)
def test_work_in_python_does_not_grow_with_the_parameters(rank):
    found = []
    for layers in (FEW, MANY):
        attached = Attached(model(layers), policy="fifo")
        for _ in range(8):
            attached.step(torch.ones(2, 4))
            attached.handle.flush()
        found.append(min(calls_in_a_step(attached, torch.ones(2, 4)) for _ in range(5)))
        attached.handle.detach()
    few, many = found
    return [] if abs(many - few) < 10 else [f"{few} calls with {FEW} layers, {many} with {MANY}"]
