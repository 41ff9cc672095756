"""The program's calls of torch's clipping functions, however it has imported them.

Each is a wrapper (``_no_grad`` of torch.nn.utils.clip_grad) whose closure holds the function itself. While somebody
listens, the cell holds another one.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

_NAMES = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
_thread = threading.local()  # ``inside``: a listener has the call, or torch's functions call each other
_calls: "weakref.WeakSet[ClipCalls]" = weakref.WeakSet()


class ClipCalls:
    """Has ``listener`` make the calls with tensors that ``concerns`` accepts, until ``remove``, or until this object is
    dropped. It gets the function's name, a function that makes torch's own call, and the arguments, of which the
    tensors are a list, and returns the result. Functions of an unknown torch are left alone: see ``missing``."""

    def __init__(self, concerns: Callable[[Sequence[torch.Tensor]], bool], listener: Callable[..., Any]) -> None:
        self.concerns, self.listener = concerns, listener
        _calls.add(self)
        for name, cell in _cells().items():
            if not isinstance(cell.cell_contents, _Noticed):
                cell.cell_contents = _Noticed(_called, name, cell.cell_contents)

    def remove(self) -> None:
        _calls.discard(self)
        _restore_unless_needed()


class _Noticed(functools.partial[Any]):
    """Is in the cell of one of torch's functions."""


def _restore_unless_needed() -> None:
    for cell in _cells().values() if not _calls else ():
        if isinstance(cell.cell_contents, _Noticed):
            _, cell.cell_contents = cell.cell_contents.args


def missing() -> list[str]:
    """The functions of this torch whose calls are not noticed."""
    return [name for name in _NAMES if name not in _cells()]


def _cells() -> dict[str, Any]:
    found = {}
    for name in _NAMES:
        function: Any = getattr(clip_grad, name, None)
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if "func" in names:
            found[name] = function.__closure__[names.index("func")]
    return found


def _called(name: str, own: Callable[..., Any], tensors: Any, *arguments: Any, **named: Any) -> Any:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    call = functools.partial(own, tensors, *arguments, **named)
    if getattr(_thread, "inside", False):
        return call()
    _restore_unless_needed()  # their modules may have been dropped
    with unnoticed():
        for each in list(_calls):
            if each.concerns(tensors):
                return each.listener(name, call, tensors, *arguments, **named)
        return call()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Context in which torch's functions run as they are."""
    before, _thread.inside = getattr(_thread, "inside", False), True
    try:
        yield
    finally:
        _thread.inside = before
