"""Compiled modules, and those captured in CUDA graphs: their parameters are finished before they run.

torch.compile guards on the class of each parameter. A pending parameter has another class, for which the module would
be compiled again and again. A graph of torch.cuda.make_graphed_callables reads memory without any check.

Options(split_compiled=True) splits compiled code instead: a hook that no compiler looks into breaks the graph before
each part of the model, and waits there for the part's own parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.step import pending

# A module with a larger share of all parameters is not one part; its children are.
_PART_SHARE_MAX = 0.25


class CompiledBlocks:
    """The compiled blocks of a module. Blocks may be compiled at any time: ``find`` runs before each forward pass."""

    def __init__(self, module: nn.Module, split: bool, measuring: Callable[[], bool]) -> None:
        """``measuring``: returns whether this is a warm-up, in which every value is finished, pending or not."""
        self._modules, self._measuring = list(module.modules()), measuring
        self._hooks: dict[int, Any] = {}
        self._part_hooks: list[Any] = []
        self._in_parts: set[int] = set()  # ids of parameters
        self._waiting: set[int] = set()  # those of parts that have begun: their code has the hook
        if split:
            self._split(module)

    def find(self) -> None:
        """Finds blocks that were compiled or captured since the last call."""
        # torch stores compiled or captured code in the module's own __dict__, where few have any.
        marked = [each for each in self._modules if "forward" in (own := each.__dict__) or "_compiled_call_impl" in own]
        for module in marked:
            # block.compile()
            call = module._compiled_call_impl
            if call is not None and type(call) is not _ResolvingCall:
                module._compiled_call_impl = _ResolvingCall(self, module, call)
            # model.block = torch.compile(block)
            if (isinstance(module, OptimizedModule) or _is_graphed(module)) and id(module) not in self._hooks:
                self._hooks[id(module)] = module.register_forward_pre_hook(UncopiedHook(self.resolve_first))

    def is_split(self, module: nn.Module) -> bool:
        """Returns whether parts of this compiled module wait for their parameters in the pass that begins. Passes that
        do not train may run code that was compiled before there were hooks."""
        return bool(self._left_to_parts) and module.training and torch.is_grad_enabled()

    @property
    def _left_to_parts(self) -> set[int]:
        # In a warm-up that is all: code of an equal module, without the hooks, does not fit pending parameters.
        return self._in_parts if self._measuring() else self._waiting

    def resolve_first(self, module: nn.Module, *_: Any) -> None:
        """Finishes the parameters of a compiled module for which none of its parts waits."""
        left = self._left_to_parts if self.is_split(module) else ()
        pending.resolve([parameter for parameter in module.parameters() if id(parameter) not in left])

    def release(self) -> None:
        for hook in (*self._hooks.values(), *self._part_hooks):
            hook.remove()
        for module in self._modules:
            call = module._compiled_call_impl
            if type(call) is _ResolvingCall:
                module._compiled_call_impl = call.call

    def _before_part(self, part: nn.Module, _: Any, __: bool) -> None:
        own = list(part.parameters())
        self._waiting.update(map(id, own))
        pending.resolve(own)

    def _split(self, module: nn.Module) -> None:
        if any(
            isinstance(each, OptimizedModule) and getattr(each.dynamo_ctx, "fullgraph", False) for each in self._modules
        ):
            return  # where a break is an error
        for part in parts(module):
            self._in_parts.update(map(id, part.parameters()))
            self._part_hooks.append(part.register_forward_pre_hook(UncopiedHook(self._before_part)))


class _ResolvingCall:
    """Finishes the block's parameters, then calls its compiled code. Copies of a module do not inherit it."""

    def __init__(self, blocks: CompiledBlocks, module: nn.Module, call: Any) -> None:
        self.call = call
        self._blocks, self._module = blocks, module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._blocks.resolve_first(self._module)
        return self.call(*arguments, **named)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether the module itself is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def parts(module: nn.Module) -> list[nn.Module]:
    """Modules before which to split this one: each with no more than a share of its parameters, if it has children that
    hold parameters. Parameters that a larger module holds itself are in no part."""
    sizes = {each: sum(p.nbytes for p in each.parameters()) for each in module.modules()}
    found, left = [], [module]
    while left:
        each = left.pop(0)
        children = [child for child in each.children() if sizes[child]]
        # The forward of a container is never called, and a script takes no hooks.
        if children and (sizes[each] > _PART_SHARE_MAX * sizes[module] or type(each).forward is nn.Module.forward):
            left += children
        elif each is not module and not isinstance(each, torch.jit.ScriptModule):
            found.append(each)
    return found


def _is_graphed(module: nn.Module) -> bool:
    """True if the module's forward replays a CUDA graph. torch stores such a forward in the module itself."""
    return getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"
