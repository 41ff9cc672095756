"""Gradients that are sent without Python, and what makes one of them special."""

import contextlib
from unittest import mock

import pytest

from gradcast.training.compat import extension
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.step import pending
from training import compare
from training.attached import Attached, not_refused
from training.bomb import Bomb
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn
LAYERS = 4


class Addresses(torch.utils._python_dispatch.TorchDispatchMode):
    """Asks each operation for the memory of its arguments, as torch's stream checker does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for each in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor):
                each.data_ptr()
        return function(*args, **(kwargs or {}))


def trained(mode="overlap", **options) -> Attached:
    """Beyond the warm-up, in which each gradient is timed."""
    attached = Attached(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS))), mode, **options)
    for _ in range(4):
        attached.step(torch.ones(2, 4))
    attached.handle.flush()
    return attached


def in_python(step) -> int:
    """How many gradients of this step came to Python."""
    with mock.patch.object(WeakHook, "__call__", autospec=True, side_effect=WeakHook.__call__) as seen:
        step()
    return sum(isinstance(call.args[1], int) for call in seen.call_args_list)


@on_ranks(2)
def test_only_the_first_gradient_of_a_step_and_special_ones_come_to_python(rank, mode):
    attached = trained(mode)
    step = lambda: attached.step(torch.ones(2, 4))  # noqa: E731
    counts = [in_python(step), in_python(step)]
    attached.module[1].weight.register_post_accumulate_grad_hook(lambda _: None)
    counts.append(in_python(step))
    with attached.handle.no_sync():
        counts.append(in_python(lambda: attached.module(torch.ones(2, 4)).sum().backward()))
    attached.handle.detach()
    counts.append(in_python(step))
    return [] if counts == [1, 1, 2, LAYERS, 0] else counts


@on_ranks(2)
def test_what_a_failed_pass_has_sent_is_pending(rank):
    attached = trained()
    attached.optimizer.zero_grad()
    hook = attached.module[1].register_forward_hook(lambda *call: Bomb.apply(call[2]))
    with pytest.raises(RuntimeError, match="in backward"):
        attached.module(torch.ones(2, 4)).sum().backward()
    hook.remove()
    return [layer.weight.grad is not None and pending.is_pending(layer.weight.grad) for layer in attached.module] != [
        False, False, True, True,
    ]  # fmt: skip


@on_ranks(2)
def test_what_was_sent_without_python_is_not_used_inside_backward(rank, mode):
    """A hook of the program's on an early output reads the gradient of a later layer."""
    attached, wrong = trained(mode), []
    read = attached.module[2].weight

    def read_it(_module, _inputs, output):
        output.register_hook(lambda _: read.grad.norm())

    hook = attached.module[0].register_forward_hook(read_it)
    for is_dropped in (True, False):
        attached.optimizer.zero_grad(set_to_none=is_dropped)
        loss = attached.module(torch.ones(2, 4)).sum()
        wrong += not_refused(loss.backward, "used inside backward")
    hook.remove()
    attached.step(torch.ones(2, 4))
    attached.handle.flush()
    return wrong + [name for name, each in attached.module.named_parameters() if pending.is_pending(each.grad)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@on_ranks(2)
def test_the_mean_has_the_bits_of_torch(rank, mode, dtype):
    """Small gradients are divided without torch, larger ones with it, transposed ones, and those that lie elsewhere."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(3, generator=generator)[:, None] * torch.tensor([1e-30, 1.0, float("inf"), float("nan"), -0.0])
    sizes = ((), (5, 3), (70, 70))
    module = nn.Module()
    for number, size in enumerate(sizes):
        module.register_parameter(f"p{number}", nn.Parameter(torch.zeros(size, dtype=dtype)))
    module.forward = lambda given: sum((p * g).sum() for p, g in zip(module.parameters(), given, strict=True))
    attached = Attached(module, mode)
    for _ in range(5):
        given = [torch.ones(sizes[0], dtype=dtype) / 3, values.T.to(dtype), torch.full(sizes[2], 1 / 7, dtype=dtype)]
        attached.step(given)
    attached.handle.flush()
    expected = [(2 * (each * 0.5)).tolist() for each in given]
    found = [p.grad.tolist() for p in module.parameters()]
    return [] if str(found) == str(expected) else (found, expected)


@on_ranks(2)
def test_a_module_that_was_converted_there_and_back_is_hooked_again(rank, mode):
    """torch gives its parameters other nodes of the graph."""
    attached = trained(mode)
    attached.module.double()
    attached.module.float()
    attached.step(torch.full((2, 4), 1.0 + rank.index))
    attached.handle.flush()
    weights = [layer.weight for layer in attached.module]
    values = [weight.tolist() for weight in weights]
    hooked = extension.load().own_hooks(weights)
    return hooked != list(range(LAYERS)) or rank.gather("values", values) != [values, values]


@on_ranks(2)
def test_gradients_with_a_graph_of_their_own_are_refused(rank):
    attached = trained()
    loss = attached.module(torch.ones(2, 4)).sum()
    return not_refused(lambda: loss.backward(create_graph=True), "has a graph of its own")


@on_ranks(2)
def test_compiled_autograd_is_refused(rank):
    from torch._dynamo import compiled_autograd

    attached = trained()
    loss = attached.module(torch.ones(2, 4)).sum()
    with compiled_autograd._enable(lambda graph: graph), pytest.raises(RuntimeError, match="compiled_autograd off"):
        loss.backward()


@on_ranks(2)
def test_a_dispatch_mode_may_look_at_the_memory_of_what_backward_writes(rank, mode):
    found = []
    for looking in (Addresses(), contextlib.nullcontext()):
        torch.manual_seed(0)
        attached = Attached(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), mode)  # more than C++ copies
        with looking:
            for _ in range(6):
                attached.step(torch.ones(2, 128))
        attached.handle.flush()
        attached.handle.detach()
        found.append(attached.module)
    return compare.modules(*found)
