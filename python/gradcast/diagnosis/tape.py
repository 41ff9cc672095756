"""What a step fed into the model and what came back into it, so that the step can be run again without its loop.

A tape holds the inputs of each forward pass and the gradients that the loss sent into its outputs. Run again, it makes
the model compute and send what the step did, without the loss, the data, the loop's counters or its schedulers.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves


@dataclasses.dataclass
class Pass:
    """One forward pass. ``synchronizes``: its backward pass sends gradients. ``gradients``: by the place of an output
    among the output's leaves."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    synchronizes: bool
    autocast: tuple[str, bool, torch.dtype]
    gradients: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Tape:
    """Of one step."""

    passes: list[Pass] = dataclasses.field(default_factory=list)

    @property
    def used(self) -> list[Pass]:
        """Those that a backward pass came back into."""
        return [each for each in self.passes if each.gradients]


def begin_pass(ddp: DistributedDataParallel, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Pass:
    kind = ddp.device.type
    autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return Pass(arguments, keywords, ddp.require_backward_grad_sync, autocast)


def outputs_of(value: Any) -> list[torch.Tensor | None]:
    """The leaves of what a forward pass returned; None for one through which no gradient comes back."""
    leaves = tree_leaves(value)
    return [leaf if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None for leaf in leaves]


def forward(model: Any, each: Pass) -> list[torch.Tensor | None]:
    kind, enabled, dtype = each.autocast
    with torch.autocast(kind, dtype=dtype) if enabled else contextlib.nullcontext():
        return outputs_of(model(*each.arguments, **each.keywords))


def backward(each: Pass, outputs: list[torch.Tensor | None]) -> None:
    pairs = [(outputs[place], gradient) for place, gradient in each.gradients.items() if outputs[place] is not None]
    torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


@contextlib.contextmanager
def synchronizing(model: Any, each: Pass) -> Iterator[None]:
    """As the pass was: inside of ``no_sync()`` or not."""
    if each.synchronizes:
        yield
        return
    with model.no_sync():
        yield
