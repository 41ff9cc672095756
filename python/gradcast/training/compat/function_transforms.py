"""torch.func (grad, vjp, vmap, functionalize) wraps tensors by functions of C++ that do not ask a tensor's class."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

# WORKAROUND(torch 2.11 to 2.15, private names): where Python calls these functions.
_CALLED_IN = {
    "torch._functorch.eager_transforms": ("_wrap_for_grad", "_wrap_functional_tensor"),
    "torch._functorch.autograd_function": ("_wrap_for_grad", "_add_batch_dim"),
    "torch._functorch.vmap": ("_add_batch_dim",),
}


@functools.cache
def before_wrapping(finish: Callable[[Any], None]) -> None:
    """Calls ``finish(tensor)`` before each tensor that is wrapped from now on."""
    for module_name, names in _CALLED_IN.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(module, name, _finished_first(getattr(module, name), finish))


def _finished_first(wrap: Callable[..., Any], finish: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def wrap_finished(tensor: Any, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling():  # a compiler looks into this function
            finish(tensor)
        return wrap(tensor, *arguments)

    return wrap_finished
