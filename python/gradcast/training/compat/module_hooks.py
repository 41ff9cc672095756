"""Hooks that do not keep their owner alive, and hooks on the user's module that copies of the module do not inherit.

``deepcopy`` and ``pickle`` copy a module's hooks with it. A copy must be an ordinary module, even without gradcast
installed. So in a copy these hooks become a function of the standard library that accepts anything and does nothing.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

# Part of the error of a compiler that must not break the graph.
_REASON = (
    "gradcast waits here, around forward; give attach the compiled module, torch.compile(module, fullgraph=True), or "
    "omit fullgraph=True"
)


class WeakHook:
    """Calls a method while its object lives: a tensor or a module must not keep its session alive. ``first``: its first
    arguments."""

    def __init__(self, method: Callable[..., Any], *first: Any) -> None:
        self._method, self._first = weakref.WeakMethod(method), first

    def __call__(self, *arguments: Any) -> Any:
        method = self._method()
        return None if method is None else method(*self._first, *arguments)


class UncopiedHook:
    """A hook that calls ``function(module, value, compiled)``, hidden from torch.compile.

    ``value``: the last of the hook's arguments. ``compiled``: True if the forward pass runs inside torch.compile. A
    return value other than None replaces ``value``.
    """

    def __init__(self, function: Callable[[nn.Module, Any, bool], Any]) -> None:
        self._function = torch.compiler.disable(function, reason=_REASON)

    def __call__(self, *arguments: Any) -> Any:
        # torch.compile sees and keeps the first branch when it traces.
        if torch.compiler.is_compiling():
            return self._function(arguments[0], arguments[-1], True)
        return self._function(arguments[0], arguments[-1], False)

    def __deepcopy__(self, memo: dict) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        return (getattr, (contextlib.nullcontext(), "__exit__"))


class InputsHook(UncopiedHook):
    """A forward pre-hook with keywords: ``value`` is (positional inputs, keyword inputs)."""

    def __call__(self, *arguments: Any) -> None:
        super().__call__(arguments[0], arguments[1:])


def around_forward(
    modules: Iterable[nn.Module],
    before: Callable[[nn.Module, Any, bool], None],
    after: Callable[[nn.Module, Any, bool], Any],
    *,
    first: bool = False,
) -> list[Any]:
    """Registers functions that are called before and after each forward pass, with its inputs and with its output.
    ``first``: before any other function that is called before it.

    Returns the handles that remove them.
    """
    handles = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(UncopiedHook(before), prepend=first))
        handles.append(module.register_forward_hook(UncopiedHook(after)))
    return handles
