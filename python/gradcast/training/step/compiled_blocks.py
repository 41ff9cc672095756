"""Compiled blocks of a model, and those captured in CUDA graphs: their parameters are finished before such code runs.

torch.compile decides by the class of each parameter which code may run. One that is pending has another class, for
which it would compile again, and again. A graph of torch.cuda.make_graphed_callables reads memory and asks nobody.
"""

from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from gradcast.training.step import pending


class CompiledBlocks:
    """Of one module; blocks may be compiled at any time, so ``find`` is called before each forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._hooks: dict[int, Any] = {}

    def find(self) -> None:
        for module in self._modules:
            # block.compile()
            call = module._compiled_call_impl
            if call is not None and type(call) is not _Finishing:
                module._compiled_call_impl = _Finishing(module, call)
            # model.block = torch.compile(block)
            if (isinstance(module, OptimizedModule) or _is_graphed(module)) and id(module) not in self._hooks:
                self._hooks[id(module)] = module.register_forward_pre_hook(_finish)

    def release(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        for module in self._modules:
            call = module._compiled_call_impl
            if type(call) is _Finishing:
                module._compiled_call_impl = call.call


class _Finishing:
    """The block's compiled call, after its parameters are finished. Copies of a module do not inherit it."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        self.call = call
        self._parameters = list(module.parameters())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        pending.finish((self._parameters,), "a compiled block")
        return self.call(*arguments, **named)


def _is_graphed(module: nn.Module) -> bool:
    """Whether its forward replays a CUDA graph: torch puts that into the module itself."""
    return getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"


def _finish(module: nn.Module, _: Any) -> None:
    pending.finish((list(module.parameters()),), "a compiled block")
