"""Defects that gradcast once had, put back on purpose: random programs must find each of them.

Each is the code that mended it taken out again, in the processes of the ranks, while one program runs.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from unittest import mock

from fuzz_training import generate, rank
from fuzz_training.program import Program
from gradcast.training import acceptance, attachment, model_layout
from gradcast.training.step import gradient_buffers, optimizer_state, optimizer_steps
from training.needs import torch

DDP = torch.nn.parallel.DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Defect:
    """``features``, ``fields`` (of Program): what a program needs to meet it."""

    features: tuple[str, ...]
    replaced: tuple[tuple[object, str, Callable], ...]
    fields: dict[str, str] = dataclasses.field(default_factory=dict)

    def programs(self) -> Iterator[Program]:
        """Without end."""
        for seed in itertools.count():
            made = dataclasses.replace(generate.program(seed, self.features), **self.fields)
            if made.is_coherent:
                yield made


def _nothing(*_, **__) -> None:
    return None


def _outermost(module: torch.nn.Module) -> DDP | None:
    return module if isinstance(module, DDP) else None


_OVERLOOKED = (
    (acceptance, "the_ddp", _outermost),
    (sys.modules["gradcast.training.attach"], "check_hooks", _nothing),  # beside the function of that name
    (attachment.Attachment, "_refuse_other_ddp", _nothing),
)

DEFECTS = {
    "a DDP inside of a wrapper is overlooked": Defect((), _OVERLOOKED, {"wrapper": "holder"}),
    "a DDP inside of torch.compile() is overlooked": Defect((), _OVERLOOKED, {"wrapper": "compiled ddp"}),
    "kept gradients are overwritten": Defect(
        ("keep gradients",), ((gradient_buffers.GradientBuffers, "_kept", lambda self: []),)
    ),
    "an optimizer's previous gradients are overwritten": Defect(
        (), ((gradient_buffers.GradientBuffers, "_kept", lambda self: []),), {"optimizer": "previous", "form": ""}
    ),
    "a failed update is forgotten": Defect(
        ("a failed update",), ((optimizer_steps.OptimizerSteps, "_fail", _nothing),)
    ),
    "edited state is overwritten": Defect(
        ("state changed",), ((optimizer_state.OptimizerStateGuard, "guard", _nothing),)
    ),
    "other weights are taken for a changed model": Defect(
        ("fast weights on one rank",),
        (
            (attachment, "in_functional_call", lambda: False),
            (attachment, "holds_other_tensors", lambda module: False),
        ),
    ),
    "converted parameters keep their buffers": Defect(
        ("to double",), ((model_layout.ModelLayout, "_kinds", lambda self: []),)
    ),
    "memory that the program holds is read before its update": Defect(
        ("an alias kept",), ((optimizer_steps.OptimizerSteps, "_complete_held", _nothing),)
    ),
}


@contextlib.contextmanager
def put_back(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, attribute, old in DEFECTS[name].replaced:
            stack.enter_context(mock.patch.object(owner, attribute, old))
        yield


def run(each, source: str, name: str) -> dict:
    """The program on one rank, with the defect."""
    with put_back(name):
        return rank.run(each, source)
