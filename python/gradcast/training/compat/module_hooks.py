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
    """Calls ``function(value, compiled)`` with the last of the hook's arguments, and whether the forward pass runs
    inside torch.compile, which must not look into us. What it returns takes the value's place, unless it is None."""

    def __init__(self, function: Callable[[Any, bool], Any]) -> None:
        self._function = torch.compiler.disable(function)

    def __call__(self, *arguments: Any) -> Any:
        # While torch.compile traces, the first branch is the one that it sees and keeps.
        if torch.compiler.is_compiling():
            return self._function(arguments[-1], True)
        return self._function(arguments[-1], False)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


def around_forward(
    module: nn.Module, before: Callable[[Any, bool], None], after: Callable[[Any, bool], Any]
) -> list[Any]:
    """Calls the functions before and after each forward pass of this module, with its inputs and with its output.

    Returns the handles that remove them.
    """
    return [
        module.register_forward_pre_hook(UncopiedHook(before)),
        module.register_forward_hook(UncopiedHook(after)),
    ]
