"""Refuses a Python whose reference counts are not those that gradcast relies on.

From them ``csrc/transport/torch/owners.cc`` and the guard of an optimizer's state see what the program keeps and
gradcast must not overwrite. No version promises them: CPython 3.14, for one, no longer counts what a function's stack
borrows. So objects whose owners are known are counted once, in the same ways.

Thread safety: any thread that holds the GIL.
"""

import platform
import sys
from types import ModuleType, SimpleNamespace

import torch

from gradcast.errors import Error


def is_kept(owner: object, name: str) -> bool:
    """Returns whether anybody but this owner refers to the value of this attribute."""
    return sys.getrefcount(getattr(owner, name)) > 2  # the second one is the argument


def check(native: ModuleType) -> None:
    """Raises Error unless ``native``, the module `_c10d`, and ``is_kept`` find exactly what is kept."""
    if not _finds_what_is_kept(native):
        version = f"{platform.python_implementation()} {platform.python_version()} with torch {torch.__version__}"
        raise Error(
            f"reference counts in this Python ({version}) do not show which gradients a program keeps, so training "
            "could overwrite them; train with CPython 3.10 to 3.14 and torch 2.11 to 2.15",
            "environment",
        )


@torch.inference_mode(False)
def _finds_what_is_kept(native: ModuleType) -> bool:
    """Returns whether of two objects of each kind only the second one, which a variable keeps, is found."""
    parameters = [torch.empty(1, device="cpu", requires_grad=True) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.empty(1, device="cpu")
    tensors = [torch.empty(1, device="cpu") for _ in range(2)]
    tensors[0].untyped_storage()  # keeps the Python object of the storage, to which nobody refers
    optimizer = SimpleNamespace(state={each: {"sum": torch.empty(1, device="cpu")} for each in parameters})
    kept = parameters[1].grad, tensors[1], optimizer.state[parameters[1]]
    found = [
        native.held_elsewhere([each.grad for each in parameters], 0, True),
        native.held_elsewhere(tensors, 0, False),
        [i for i, each in enumerate(parameters) if id(each) in native.entries_held(vars(optimizer))],
    ]
    state_kept = [is_kept(optimizer, "state")]
    kept_state = optimizer.state
    state_kept.append(is_kept(optimizer, "state"))
    del kept, kept_state
    return found == [[1]] * 3 and state_kept == [False, True]
