"""What a step fed into the model and what came back into it, so that the step can be run again without its loop.

A tape holds the inputs of each forward pass and the gradients that the loss sent into its outputs. Run again, it makes
the model compute and send what the step did, without the loss, the data, the loop's counters or its schedulers.
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
class Pass:
    """One forward pass. ``synchronizes``: its backward pass sends gradients; ``backward``: which one that was in the
    step, from 1. ``gradients``: by the place of an output among those that DDP looks for. ``kept``: whether all this is
    remembered, or only that there was a backward pass."""

    kept: bool
    synchronizes: bool
    autocast: Autocast
    random: dict[str, torch.Tensor]
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: dict[int, torch.Tensor | None] = dataclasses.field(default_factory=dict)
    backward: int = 0


@dataclasses.dataclass
class Tape:
    """Of one step."""

    passes: list[Pass] = dataclasses.field(default_factory=list)

    @property
    def used(self) -> list[Pass]:
        """Those that a backward pass came back into."""
        return [each for each in self.passes if each.gradients]

    @property
    def by_backward(self) -> list[list[Pass]]:
        """Several forward passes may end in one backward pass."""
        return [list(group) for _, group in itertools.groupby(self.used, key=lambda each: each.backward)]


def begin_pass(
    ddp: DistributedDataParallel, arguments: tuple[Any, ...], keywords: dict[str, Any], *, keep: bool
) -> Pass:
    kind = ddp.device.type
    autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if not keep:
        return Pass(False, ddp.require_backward_grad_sync, autocast, {})
    random = {"cpu": torch.get_rng_state()}
    if kind == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(ddp.device)
    # Without the graph that they come from: another module's, or a leaf whose gradient is none of ours.
    arguments, keywords = tree_map(_detached, (arguments, keywords))
    return Pass(True, ddp.require_backward_grad_sync, autocast, random, arguments, keywords)


def outputs_of(value: Any) -> list[torch.Tensor | None]:
    """The tensors of what a forward pass returned; None for one through which no gradient comes back."""
    return [tensor if tensor.requires_grad else None for tensor in _find_tensors(value)]


def run_again(model: Any, passes: Sequence[Pass]) -> Iterator[None]:
    """The forward passes of one backward pass, then that: yields in between. What a model draws at random, it draws as
    it did."""
    with contextlib.ExitStack() as stack:
        if not passes[-1].synchronizes:
            stack.enter_context(model.no_sync())
        outputs = [_forward(model, each) for each in passes]
        yield
        pairs = [
            (output, _fitting(gradient, output))
            for each, found in zip(passes, outputs, strict=True)
            for place, gradient in each.gradients.items()
            if place < len(found) and (output := found[place]) is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _forward(model: Any, each: Pass) -> list[torch.Tensor | None]:
    torch.set_rng_state(each.random["cpu"])
    kind, enabled, dtype = each.autocast
    if "cuda" in each.random:
        torch.cuda.set_rng_state(each.random["cuda"])
    with torch.autocast(kind, dtype=dtype, enabled=enabled):
        return outputs_of(model(*each.arguments, **each.keywords))


def _fitting(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """An output may have another shape by chance that is not torch's; all ranks have to go on alike."""
    if gradient.shape == output.shape and gradient.dtype == output.dtype:
        return gradient
    return torch.full_like(output, 1e-3)


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
