"""Recorded steps, which can be replayed without their loop.

A recorded step holds the inputs of each forward pass and the gradients of its outputs. A replay computes and
communicates the same, without the loss, the data loading or the schedulers.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._pytree import tree_map

Autocast = tuple[str, bool, torch.dtype]


@dataclasses.dataclass
class RecordedPass:
    kept: bool  # whether inputs and gradients are kept; if not, only that there was a backward pass
    synchronizes: bool  # whether its backward pass sends gradients
    autocast: Autocast
    random: dict[str, torch.Tensor]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)  # by output index
    backward: int = 0  # number of its backward pass within the step, from 1


RecordedStep = list[RecordedPass]


def by_backward(step: RecordedStep) -> list[list[RecordedPass]]:
    """Returns the forward passes of each backward pass, which may end several. Others reached no backward pass."""
    used = (each for each in step if each.gradients)
    return [list(group) for _, group in itertools.groupby(used, key=lambda each: each.backward)]


def begin_pass(
    ddp: DistributedDataParallel, arguments: tuple[Any, ...], keywords: dict[str, Any], *, keep: bool
) -> RecordedPass:
    kind = ddp.device.type
    autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if not keep:
        return RecordedPass(False, ddp.require_backward_grad_sync, autocast, {})
    random = {"cpu": torch.get_rng_state()}
    if kind == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(ddp.device)
    # Detached, so that a replay does not run backward through another module or accumulate into a leaf of the user.
    arguments, keywords = tree_map(_detached, (arguments, keywords))
    return RecordedPass(True, ddp.require_backward_grad_sync, autocast, random, arguments, keywords)


def outputs_of(value: Any) -> list[torch.Tensor | None]:
    """Lists the tensors that DDP finds in a forward pass's output; None stands for one without gradient."""
    return [tensor if tensor.requires_grad else None for tensor in _find_tensors(value)]


def replay(model: Any, passes: Sequence[RecordedPass]) -> Iterator[None]:
    """Runs the forward passes of one backward pass through a wrapper of the module, yields, and runs the backward pass.

    Restores the random generators, so that the model draws the same random numbers.
    """
    with contextlib.ExitStack() as stack:
        if not passes[-1].synchronizes:
            stack.enter_context(model.no_sync())
        outputs = [_forward(model, each) for each in passes]
        yield
        pairs = [
            (output, _fitting(gradient, output))
            for each, found in zip(passes, outputs, strict=True)
            for index, gradient in each.gradients.items()
            if index < len(found) and (output := found[index]) is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _forward(model: Any, each: RecordedPass) -> list[torch.Tensor | None]:
    torch.set_rng_state(each.random["cpu"])
    kind, enabled, dtype = each.autocast
    if "cuda" in each.random:
        torch.cuda.set_rng_state(each.random["cuda"])
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        return outputs_of(model(*each.arguments, **each.keywords))


def _fitting(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Replaces a gradient of another shape than the output's, so that all ranks run the same operations."""
    if gradient.shape == output.shape and gradient.dtype == output.dtype:
        return gradient
    return torch.full_like(output, 1e-3)


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
