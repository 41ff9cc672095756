"""Buffers of bare modules: all ranks get those of rank 0, as with DDP. (A DDP module sends its own.)

Forward changes buffers, so they are sent with the gradients of the backward pass behind it: one more tensor of the plan
holds their bytes, as whole numbers of 64 bits. Rank 0 contributes its bytes and every other rank zeros, so the sum is
exact for any dtype and wire. The next forward pass copies them in, which is when DDP sends them.

Where no backward pass has sent them (before the first forward pass, or between two in a row), rank 0 sends and all
wait.
"""

import operator
from collections.abc import Sequence

import torch
from torch import nn

from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_exchange import GradientExchange

# The name of the tensor in profiles and plans that holds rank 0's buffers.
BUFFERS_NAME = "gradcast.module_buffers"
WHAT = "the module's buffers"
_SLOT_BYTES = 16  # no element is wider


def buffers_tensor(modules: Sequence[nn.Module], device: torch.device) -> torch.Tensor | None:
    """A tensor with the size and type of the one that is sent. None if there are no buffers."""
    size_bytes = sum(_slot_bytes(each) for module in modules for each in _Part(module).tensors)
    return torch.empty(size_bytes // 8, dtype=torch.int64, device=device) if size_bytes else None


class ModuleBuffers:
    """The buffers of all modules. ``index``: of the tensor that is sent, behind the parameters in the gradient buffers;
    None if there is none. ``is_written``: in the open step."""

    def __init__(
        self, modules: Sequence[nn.Module], index: int | None, exchange: GradientExchange, group: Group
    ) -> None:
        """``modules``: those whose forward is called."""
        self.index = index
        self._parts = {module: _Part(module) for module in modules}
        self._buffers, self._exchange, self._group = exchange.buffers, exchange, group
        self._layout: object = None  # that of the parts' slots
        self.is_written = False
        self._unchanged: dict[int, torch.Tensor] = {}  # before the borrowed forward pass that runs
        # Checkpoints run forward again inside backward. Until the first pass has shown whether they do: None.
        self._changes_in_backward: bool | None = None

    def on_backward_begin(self) -> bool:
        """Returns whether the buffers are in their tensor, to be sent now. REQUIRES: nothing is in flight."""
        self.is_written = False
        for part in self._parts.values():
            part.look()
        if self._changes_in_backward is False:
            self._write()
        return self.is_written

    def on_backward_end(self) -> bool:
        """The same as ``on_backward_begin`` if the tensor has not been sent yet; otherwise False."""
        changed = [part.look() for part in self._parts.values()]
        self._changes_in_backward = bool(self._changes_in_backward) or any(changed)
        if self.is_written:
            return False
        self._write()
        return True

    def before_forward(self, module: nn.Module, *, synchronizing: bool, needed: bool) -> None:
        """Copies rank 0's values for the forward pass of ``module`` that begins; not after a pass in no_sync() or
        without gradients, as with DDP. Collective if no backward pass has sent them. Passes in evaluation or without
        gradients, which one rank may run alone, leave that to the next one.

        ``needed``: backward of an earlier pass still needs this rank's values, so they stay. (With DDP that backward
        raises.)
        """
        part = self._parts[module]
        arriving, due = part.arriving, part.due
        if not arriving and not (module.training and torch.is_grad_enabled()):
            return
        if module.training:
            part.arriving, part.due = False, synchronizing
        is_first = self._group.rank == 0
        if arriving and not needed and not is_first:
            self._exchange.wait([self.index])
            # What the program has changed since backward, on all ranks alike (load_state_dict), stays.
            self._follow_layout()
            tensors = part.unchanged()
            _copy([(each, part.slots[position]) for position, each in tensors.items()])
            part.still_unchanged(tensors)
        elif due and not arriving:
            current = part.current()
            if current:
                self._exchange.wait_until_idle()
                with self._exchange.watch.waiting(f"{WHAT} from rank 0"):
                    keeps = needed and not is_first
                    self._group.copy_from_first([each.clone() for each in current] if keeps else current, WHAT)

    def before_borrowed_forward(self, module: nn.Module) -> None:
        """Prepares a forward pass with other tensors in place of the module's own (functional_call)."""
        self._unchanged = self._parts[module].unchanged()

    def after_borrowed_forward(self, module: nn.Module) -> None:
        """Marks that pass's changes as not the program's, so that rank 0's values replace them."""
        self._parts[module].still_unchanged(self._unchanged)
        self._unchanged = {}

    def send_before_forward(self) -> None:
        """Drops values that have been sent: the next forward pass begins with sending."""
        for part in self._parts.values():
            part.due, part.arriving = part.due or part.arriving, False

    def on_sent(self) -> None:
        """Notes that all ranks have rank 0's buffers."""
        for part in self._parts.values():
            part.due = part.arriving = False

    def release(self) -> None:
        """Drops the references to the gradient buffers."""
        self._layout = None
        self._parts.clear()

    def _write(self) -> None:
        self.is_written = True
        self._follow_layout()
        if self._group.rank != 0:
            self._buffers.views[self.index].zero_()
        for part in self._parts.values():
            if not part.fits:
                continue
            part.due, part.arriving = False, True
            if self._group.rank == 0:
                _copy(list(zip(part.slots, part.tensors, strict=True)))

    def _follow_layout(self) -> None:
        if self._layout is self._buffers.layout:
            return
        self._layout = self._buffers.layout
        where = next(each for each in self._buffers.layout if each.name == BUFFERS_NAME)
        memory, at = self._buffers.flats[where.buffer].view(torch.uint8), where.lo_bytes
        for part in self._parts.values():
            part.slots = []
            for shape, dtype in part.kinds:
                size_bytes = shape.numel() * dtype.itemsize
                part.slots.append(memory[at : at + size_bytes].view(dtype).view(shape))
                at += _slot_bytes(part.slots[-1])


class _Part:
    """The buffers of one module that is called.

    ``arriving``: a backward pass has sent them, and they are not copied in yet. ``tensors``: at the last look.
    ``kinds``: shapes and types for which the sent tensor has room, and ``slots`` where.
    """

    def __init__(self, module: nn.Module) -> None:
        # The dicts, not the buffers themselves: a module may replace a buffer by another tensor.
        self._held = [each._buffers for each in module.modules()]
        # Of a module that has none, DDP never sends one that is registered later.
        self._has_any = any(buffer is not None for held in self._held for buffer in held.values())
        # due: rank 0 has to send them before the next forward pass.
        self.due, self.arriving, self.fits = True, False, True
        self.tensors = self.current()
        self._versions = [each._version for each in self.tensors]
        self.kinds = self._kinds()
        self.slots: list[torch.Tensor] = []

    def current(self) -> list[torch.Tensor]:
        """The buffers as they are now, each once."""
        if not self._has_any:
            return []
        found = [buffer for held in self._held if held for buffer in held.values() if buffer is not None]
        return list({id(each): each for each in found if each.numel() > 0}.values())

    def look(self) -> bool:
        """Returns whether the buffers have changed since the last look."""
        before, versions = self.tensors, self._versions
        self.tensors = self.current()
        self._versions = [each._version for each in self.tensors]
        if len(before) != len(self.tensors) or not all(map(operator.is_, before, self.tensors)):
            self.fits = self._kinds() == self.kinds
            return True
        return self._versions != versions

    def unchanged(self) -> dict[int, torch.Tensor]:
        """By position, the buffers that are as at the last look."""
        seen = zip(self.current(), self.tensors, self._versions, strict=False)
        return {n: now for n, (now, then, version) in enumerate(seen) if now is then and now._version == version}

    def still_unchanged(self, before: dict[int, torch.Tensor]) -> None:
        """The buffers at the positions of ``before`` count as unchanged as they are now, if they are alike."""
        for position, now in enumerate(self.current()):
            then = before.get(position)
            if then is not None and (now.shape, now.dtype) == (then.shape, then.dtype):
                self.tensors[position], self._versions[position] = now, now._version

    def _kinds(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(each.shape, each.dtype) for each in self.tensors]


def _slot_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _SLOT_BYTES) * _SLOT_BYTES


@torch.no_grad()
def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair into the first; a GPU takes many of one dtype at once."""
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in pairs:
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for alike in by_dtype.values():
        torch._foreach_copy_([into for into, _ in alike], [value for _, value in alike])
