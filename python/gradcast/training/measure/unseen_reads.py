"""The module whose forward uses a parameter, for parameters whose reads no hook sees.

C++ extensions read their weights without a call that could be seen, but autograd records the operation: a node that
leads to the parameter's AccumulateGrad. Autograd numbers its nodes as they are made, so the node was made inside the
forward pass of a module if its number lies between the numbers at the beginning and at the end of that pass.

The parameter can be waited for where the module that owns it begins, if all uses lie inside that module's forward and
no other module owns the parameter. Otherwise it is waited for before the whole forward pass begins, which is right
whatever forward does.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gradcast.training.compat.module_hooks import around_forward

_REENTRANT = "CheckpointFunctionBackward"
_HOLDERS = (nn.ParameterList, nn.ParameterDict)  # nobody calls their forward


class UnseenRead(NamedTuple):
    """``module``: the name of the one that waits for the parameter when its forward begins. Empty: that is the whole
    module, and ``why`` says for which reason."""

    module: str
    why: str = ""


def agreed_reads(found: Iterable[Mapping[int, UnseenRead]]) -> dict[int, UnseenRead]:
    """Returns, by parameter, the choice that is safe for the findings of every rank and warm-up."""
    agreed: dict[int, UnseenRead] = {}
    for index, read in (each for reads in found for each in reads.items()):
        before = agreed.setdefault(index, read)
        if before.module and read.module not in ("", before.module):
            agreed[index] = UnseenRead("", "not always the same module uses them")
        elif before.module:
            agreed[index] = read
    return dict(sorted(agreed.items()))


class Owners:
    """The parts of a module by the parameters that they own themselves; those in a ParameterList are its owner's."""

    def __init__(self, module: nn.Module) -> None:
        self._parts: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, part in module.named_modules():
            holders = [part, *(child for child in part.children() if isinstance(child, _HOLDERS))]
            held = [] if isinstance(part, _HOLDERS) else [each for one in holders for each in one._parameters.values()]
            for key in dict.fromkeys(map(id, held)):
                self._parts.setdefault(key, []).append((name, part))

    def place(self, parameter: torch.Tensor) -> tuple[UnseenRead, nn.Module | None]:
        """The part that alone owns the parameter and can wait for it. None, with the reason, if there is no such
        part."""
        parts = self._parts.get(id(parameter), [])
        if len(parts) > 1:
            return UnseenRead("", "several modules own them"), None
        name, part = parts[0] if parts else ("", None)
        if not name:
            return UnseenRead("", "no part of the module owns them, but the module itself"), None
        if isinstance(part, torch.jit.ScriptModule):
            return UnseenRead("", "a script owns them, which takes no hooks"), None
        return UnseenRead(name), part


class ConsumerSearch:
    """Finds, during a warm-up, where this rank's forward uses parameters unseen."""

    def __init__(
        self, module: nn.Module, parameters: Sequence[torch.Tensor], on_start: Callable[[Sequence[int]], None]
    ) -> None:
        """``on_start``: called where a module's first forward of a pass begins, with the parameters it owns that are
        used unseen."""
        self._module, self._parameters, self._on_start = module, parameters, on_start
        self._known: set[int] = set()  # parameters used unseen
        self._found: dict[int, UnseenRead] = {}
        self._owner: dict[int, str] = {}
        self._calls: dict[str, list[list[int]]] = {}  # by module, in this pass: autograd's numbers around each forward
        self._hooks: list[Any] = []
        self._is_forward = False

    def forward_begins(self, unseen: set[int]) -> None:
        """``unseen``: parameters known by now to be used unseen."""
        new, self._known = unseen - self._known, self._known | unseen
        if new:
            self._watch_owners(new)
        self._calls.clear()
        self._is_forward = True

    def forward_ended(self, output: Iterable[torch.Tensor]) -> bool:
        """Searches the graph while parameters are left. Returns whether it searched."""
        left = self._known - self._found.keys()
        if not self._is_forward or not left:
            return False
        self._is_forward = False
        numbers, is_whole = _consumers(output, {id(self._parameters[index]): index for index in left})
        for index in left:
            if not is_whole:
                self._found[index] = UnseenRead("", "reentrant checkpointing hides who uses them (use_reentrant=False)")
            elif index in numbers:
                self._found[index] = self._place(self._owner[index], numbers[index])
        return True

    def results(self, unseen: Iterable[int]) -> dict[int, UnseenRead]:
        unknown = UnseenRead("", "autograd's graph does not show who uses them")
        return {index: self._found.get(index, unknown) for index in sorted(unseen)}

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch_owners(self, unseen: set[int]) -> None:
        owners = Owners(self._module)
        by_part: dict[str, tuple[nn.Module, list[int]]] = {}
        for index in sorted(unseen):
            owner, part = owners.place(self._parameters[index])
            if part is None:
                self._found[index] = owner
            else:
                self._owner[index] = owner.module
                by_part.setdefault(owner.module, (part, []))[1].append(index)
        for name, (part, indices) in by_part.items():
            begin, end = functools.partial(self._on_call, name, indices), functools.partial(self._on_return, name)
            self._hooks += around_forward([part], begin, end)

    def _on_call(self, name: str, indices: Sequence[int], *_: Any) -> None:
        if self._is_forward:
            calls = self._calls.setdefault(name, [])
            if not calls:
                self._on_start(indices)
            calls.append([torch._C._autograd._get_sequence_nr(), -1])

    def _on_return(self, name: str, *_: Any) -> None:
        open_calls = [call for call in self._calls.get(name, ()) if call[1] < 0]
        if self._is_forward and open_calls:
            open_calls[-1][1] = torch._C._autograd._get_sequence_nr()

    def _place(self, owner: str, numbers: Sequence[int]) -> UnseenRead:
        calls = self._calls.get(owner, ())
        # The forward that has just ended may be the owner's own, whose end comes after this.
        if all(any(start <= number and (end < 0 or number < end) for start, end in calls) for number in numbers):
            return UnseenRead(owner)
        return UnseenRead("", "they are used outside of the forward of the module that owns them")


def _consumers(output: Iterable[torch.Tensor], wanted: Mapping[int, int]) -> tuple[dict[int, list[int]], bool]:
    """The numbers of the nodes that use parameters, by index, and whether the graph is known to be whole.

    ``wanted``: indices by the ids of the parameters.
    """
    numbers: dict[int, list[int]] = {}
    is_whole = True
    # Nodes in Python are kept meanwhile: one that is freed could be taken for another.
    left: list[Any] = [tensor.grad_fn for tensor in output if tensor.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        is_whole &= node.name() != _REENTRANT
        for behind, _ in node.next_functions:
            if behind is None:
                continue
            if type(behind).__name__ == "AccumulateGrad":
                index = wanted.get(id(behind.variable))
                if index is not None:
                    numbers.setdefault(index, []).append(node._sequence_nr())
            elif behind not in seen:
                seen.add(behind)
                left.append(behind)
    return numbers, is_whole
