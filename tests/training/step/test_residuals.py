"""The wire format int8 loses nothing: what arrives, and what the ranks keep, add up to the gradients of all ranks. What
they keep stays small.
"""

import copy

import pytest

from training.attached import attach, hosts_of
from training.models import TASKS, Branches
from training.needs import torch

STEPS = 100


def summed(tensor):
    torch.distributed.all_reduce(tensor)
    return tensor


def conserve(rank, ranks_per_host):
    """Each rank leaves the right branch out in a third of the steps, and all together in every seventh."""
    torch.manual_seed(0)
    module = Branches()
    reference = copy.deepcopy(module)
    with hosts_of(ranks_per_host):
        handle = attach(module, None, "hook", wire="int8", policy="fifo")
    parameters = dict(module.named_parameters())
    zeros = {name: torch.zeros_like(each, dtype=torch.float64) for name, each in parameters.items()}
    sent, arrived, magnitudes, kept = (copy.deepcopy(zeros) for _ in range(4))
    largest = dict.fromkeys(parameters, 0.0)
    for number in range(STEPS):
        use = ("left",) if (rank.index + number) % 3 == 0 or number % 7 == 0 else ("left", "right")
        inputs = TASKS["plain"].batch(rank.index, number)[0]
        module.zero_grad()
        module(inputs, use).square().mean().backward()
        loss = reference(inputs, use).square().mean()
        own = torch.autograd.grad(loss, list(reference.parameters()), allow_unused=True)
        residuals = handle.state_dict()["residuals"]["tensors"]
        for (name, parameter), gradient in zip(parameters.items(), own, strict=True):
            term = zeros[name] if gradient is None else gradient.double() / rank.size
            residual = residuals[name].double() if name in residuals else zeros[name]
            largest[name] = max(largest[name], term.abs().max().item())
            sent[name] += summed(term.clone())
            kept[name] = summed(residual.clone())
            magnitudes[name] += summed(term.abs() + residual.abs())
            if parameter.grad is not None:
                arrived[name] += parameter.grad
    wrong = []
    for name in parameters:
        # Each of a step's additions and products rounds by at most this share of the numbers that it adds.
        allowed = (rank.size + 8) * 2**-24 * magnitudes[name]
        lost = (sent[name] - arrived[name] - kept[name]).abs()
        wrong += [f"{name}: {lost.max()} is lost"] if (lost > allowed).any() else []
        # A step leaves of each rank's numbers, and of the sum, half of 1/127 of the largest; it is twice that here.
        if kept[name].dim() == 2 and kept[name].abs().max() > 2 * rank.size / 127 * largest[name]:
            wrong.append(f"{name}: {kept[name].abs().max()} has piled up, and gradients are {largest[name]} at most")
        if kept[name].dim() == 2 and not ((sent[name] - arrived[name]).abs() > allowed).any():
            wrong.append(f"{name}: nothing was rounded, so this shows nothing")
    return wrong


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host"),
    [
        (2, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 1), (4, 2))),
        pytest.param(4, 1, marks=pytest.mark.long),
    ],
)
def test_what_arrives_and_the_residuals_are_the_gradients(ranks, world_size, ranks_per_host):
    assert not any(ranks.run(world_size, conserve, ranks_per_host))
