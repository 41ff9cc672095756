"""One step's gradients equal those of stock DDP from the same parameters.

With two ranks bit for bit: a + b is b + a, whatever travels together. With more ranks each element is a sum of W terms,
the same terms x_1 … x_W on both sides (each the same product of a gradient and 1 / W), added in an order that depends
on where the element lies in its message. Every order of adding W numbers with unit roundoff u gives the exact sum up to

    gamma * (|x_1| + … + |x_W|)     with gamma = (W - 1) u / (1 - (W - 1) u)

(Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), so two orders differ by at most twice that.
Addition has no error of underflow. u is 2^-24 for float32, 2^-53 for float64 and 2^-8 for bfloat16.

That whole trainings equal DDP's follows: the updates are those of the plain loop (test_equality.py).
"""

import copy

import pytest

from training import compare
from training.models import TASKS
from training.needs import torch
from training.ours import Ours

# Before the switch of plans, right after it, and later.
COMPARED_STEPS = (0, 1, 2, 3, 6)


def local_gradients(task, module, batch, world_size):
    """This rank's own terms: gradients scaled by 1 / W."""
    plain = copy.deepcopy(module)
    task.loss(plain, batch).backward()
    return {name: parameter.grad * (1 / world_size) for name, parameter in plain.named_parameters()}


def bounds(terms, world_size):
    """For each element, how far apart two orders of summation can be."""
    limits = {}
    for name, term in terms.items():
        total = term.abs().double()
        torch.distributed.all_reduce(total)
        roundings = (world_size - 1) * torch.finfo(term.dtype).eps / 2
        limits[name] = 2 * roundings / (1 - roundings) * total
    return limits


def one_step(rank, ours, theirs, number, exact):
    """Both sides take the step's gradients from equal parameters; returns what is wrong, and the largest difference.

    ``exact``: bit for bit, whatever the number of ranks.
    """
    task = ours.task
    # The prefix of a module that DDP has wrapped.
    theirs.module.load_state_dict(ours.bare.state_dict())
    batch = task.batch(rank.index, number)
    terms = local_gradients(task, theirs.module, batch, rank.size)
    theirs.zero_grad()
    task.loss(theirs, batch).backward()
    ours.optimizer.zero_grad()
    ours.backward(batch)
    expected = dict(theirs.module.named_parameters())
    gradients = {name: parameter.grad.clone() for name, parameter in ours.bare.named_parameters()}
    ours.optimizer.step()
    found, largest = [], 0.0
    limits = bounds(terms, rank.size)
    for name, gradient in gradients.items():
        distance = (gradient.double() - expected[name].grad.double()).abs()
        largest = max(largest, float(distance.max()))
        if exact:
            found += compare.difference(f"step {number}: {name}", gradient, expected[name].grad)
        elif bool((distance > limits[name]).any()):
            found.append(f"step {number}: {name} is off by {distance.max():.3g}, more than rounding explains")
        if not bool((expected[name].grad != 0).any()):
            found.append(f"step {number}: DDP's gradient of {name} is zero, which proves nothing")
    return found, largest


def compare_steps(rank, task_name, mode, wrap):
    ours = Ours(task_name, "sgd plain", rank.index, mode=mode, wrap=wrap, policy="fifo")
    theirs = torch.nn.parallel.DistributedDataParallel(TASKS[task_name].module(seed=0))
    found, largest = [], 0.0
    for number in range(max(COMPARED_STEPS) + 1):
        if number not in COMPARED_STEPS:
            ours.step(number)
            continue
        more, distance = one_step(rank, ours, theirs, number, exact=rank.size == 2)
        found += more
        largest = max(largest, distance)
    policies = [followed.policy for followed in ours.followed]
    ours.handle.detach()
    return found, largest, policies


CASES = [
    ("convnet", "overlap", False),
    ("transformer", "hook", False),
    ("mixed64", "overlap", True),
    ("mixed16", "hook", True),
]


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("task", "mode", "wrap"), CASES)
def test_gradients_of_a_step_are_those_of_ddp(ranks, task, mode, wrap, world_size):
    for found, largest, policies in ranks.run(world_size, compare_steps, task, mode, wrap):
        assert found == []
        assert largest == 0 or world_size > 2
        assert policies[-1] == "fifo"
