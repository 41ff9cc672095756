"""Hooks on the user's module, which copies of the module do not inherit.

``deepcopy`` and ``pickle`` copy a module's hooks with it. A copy must be an ordinary module, also where gradcast is not
installed: what is copied of these hooks is a function of the standard library that takes anything and does nothing.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class UncopiedHook:
    """Calls ``function(compiled)``: whether the forward pass runs inside torch.compile, which must not look into us."""

    def __init__(self, function: Callable[[bool], None]) -> None:
        self._function = torch.compiler.disable(function)

    def __call__(self, *_: Any) -> None:
        # While torch.compile traces, the first branch is the one that it sees and keeps.
        if torch.compiler.is_compiling():
            self._function(True)
        else:
            self._function(False)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


def around_forward(module: nn.Module, before: Callable[[bool], None], after: Callable[[bool], None]) -> list[Any]:
    """Calls the functions before and after each forward pass of this module. Returns the handles that remove them."""
    return [
        module.register_forward_pre_hook(UncopiedHook(before)),
        module.register_forward_hook(UncopiedHook(after)),
    ]
