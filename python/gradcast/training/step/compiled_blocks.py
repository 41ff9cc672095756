"""Blocks of a model that are compiled or captured in CUDA graphs: their parameters are finished before they run.

torch.compile guards on the class of each parameter. A pending parameter has another class, for which the block would be
compiled again and again. A graph of torch.cuda.make_graphed_callables reads memory without any check.
"""

from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from gradcast.training.step import pending


class CompiledBlocks:
    """The compiled blocks of a module. Blocks may be compiled at any time: ``find`` runs before each forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._hooks: dict[int, Any] = {}

    def find(self) -> None:
        """Finds blocks that were compiled or captured since the last call."""
        for module in self._modules:
            # block.compile()
            call = module._compiled_call_impl
            if call is not None and type(call) is not _ResolvingCall:
                module._compiled_call_impl = _ResolvingCall(module, call)
            # model.block = torch.compile(block)
            if (isinstance(module, OptimizedModule) or _is_graphed(module)) and id(module) not in self._hooks:
                self._hooks[id(module)] = module.register_forward_pre_hook(_resolve_parameters)

    def release(self) -> None:
        """Gives the blocks back as they were."""
        for hook in self._hooks.values():
            hook.remove()
        for module in self._modules:
            call = module._compiled_call_impl
            if type(call) is _ResolvingCall:
                module._compiled_call_impl = call.call


class _ResolvingCall:
    """Finishes the block's parameters, then calls its compiled code. Copies of a module do not inherit it."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        self.call = call
        self._parameters = list(module.parameters())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        pending.resolve(self._parameters)
        return self.call(*arguments, **named)


def _is_graphed(module: nn.Module) -> bool:
    """Whether the module's forward replays a CUDA graph. torch stores such a forward in the module itself."""
    return getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"


def _resolve_parameters(module: nn.Module, _: Any) -> None:
    pending.resolve(list(module.parameters()))
