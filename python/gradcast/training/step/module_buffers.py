"""Module buffers: all ranks get those of rank 0, as with DDP. In overlap mode also those of a DDP module, which would
send them in forward, beside gradcast's blocks. (In hook mode nothing is in flight then, and DDP sends its own.)

Forward changes buffers, so they are sent with the gradients of the backward pass behind it: one more tensor of the plan
holds their bytes, as whole numbers of 64 bits. Rank 0 contributes its bytes and every other rank zeros, so the sum is
exact for any dtype and wire. The next forward pass copies them in, which is when DDP sends them.

Where no backward pass has sent them (before the first forward pass, or between two in a row), rank 0 sends and all
wait. DDP sends rank 0's values of forward's beginning, and in the warm-up gradcast does so, too. If the program of
some rank changes buffers of a DDP module between backward and forward, it goes on so for a while; a first change after
the warm-up stays on its rank for one pass.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradcast.training.compat.later_read import LaterRead
from gradcast.training.compat.sharding import local_of
from gradcast.training.ranks.group import Group
from gradcast.training.step.gradient_exchange import GradientExchange

# The name of the tensor in profiles and plans that holds rank 0's buffers.
BUFFERS_NAME = "gradcast.module_buffers"
WHAT = "the module's buffers"
_SLOT_BYTES = 16  # no element is wider
# So many forward passes of DDP send buffers once the program has changed some itself.
_PASSES_AFTER_CHANGE = 100


def buffers_tensor(modules: Sequence[nn.Module], device: torch.device) -> torch.Tensor | None:
    """A tensor with the size and type of the one that is sent. None if there are no buffers."""
    size_bytes = sum(_slot_bytes(each) for module in modules for each in _Part(module).tensors)
    if size_bytes == 0:
        return None
    return torch.empty((size_bytes + _SLOT_BYTES) // 8, dtype=torch.int64, device=device)


class ModuleBuffers:
    """The buffers of all modules. ``index``: of the tensor that is sent, behind the parameters in the gradient buffers;
    None if there is none. ``is_written``: in the open step."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        index: int | None,
        exchange: GradientExchange,
        group: Group,
        warn_once: Callable[..., None],
    ) -> None:
        """``modules``: those whose forward is called, or the one inside of DDP."""
        self.index = index
        self._parts = {module: _Part(module) for module in modules}
        self._buffers, self._exchange, self._group = exchange.buffers, exchange, group
        self._layout: object = None  # that of the parts' slots
        self._changes = _ChangesByProgram(warn_once)
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
            self._receive()
            self._copy_in(part)
        elif due and not arriving:
            self._send_now(part, keeps=needed and not is_first)

    def in_place_of_ddp(self, *, now: bool) -> None:
        """Copies rank 0's values where DDP's forward sends them. ``now``: the values of now, as where no backward pass
        has sent any, or the program changes buffers itself. All ranks wait then."""
        ((module, part),) = self._parts.items()
        part.follow(module)  # as DDP does
        arriving, part.arriving = part.arriving, False
        if not arriving:
            self._send_now(part, keeps=False)
            return
        self._receive()
        if self._changes.found_by_any(here=part.is_changed()) or now or not part.has_same_kinds():
            self._send_now(part, keeps=False)
        else:
            self._copy_in(part)

    def _receive(self) -> None:
        self._exchange.wait([self.index])
        self._follow_layout()

    def _copy_in(self, part: "_Part") -> None:
        # What the program has changed since backward, on all ranks alike (load_state_dict), stays.
        tensors = part.unchanged()
        if self._group.rank == 0:
            torch.autograd.graph.increment_version(list(tensors.values()))  # as if DDP had written
        else:
            _copy([(each, part.slots[position]) for position, each in tensors.items()])
        part.still_unchanged(tensors)

    def _send_now(self, part: "_Part", *, keeps: bool) -> None:
        """``keeps``: this rank's values stay."""
        current = part.current()
        if current:
            self._exchange.wait_until_idle()
            with self._exchange.watch.waiting(f"{WHAT} from rank 0"):
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

    def leave(self) -> None:
        """Drops the references to the gradient buffers, and values that have been sent."""
        self.send_before_forward()
        self._layout = self._changes.slot = None
        for part in self._parts.values():
            part.slots = []

    def release(self) -> None:
        self.leave()
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
        self._changes.write()

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
        self._changes.slot = memory[at : at + 8].view(torch.int64)


class _ChangesByProgram:
    """Changes of buffers by the program between backward and the next forward pass, on any rank. ``slot``: the element,
    among the buffers that are sent, to which each rank adds 1 if it has found some."""

    def __init__(self, warn_once: Callable[..., None]) -> None:
        self._warn_once = warn_once
        self.slot: torch.Tensor | None = None
        self._later = LaterRead()
        self._here = False
        self._passes_left = 0

    def write(self) -> None:
        """Writes what this rank has found last. Otherwise the slot is 0, or on rank 0 what has arrived last."""
        if self._here or self._passes_left > 0:
            self.slot.fill_(int(self._here))

    def found_by_any(self, *, here: bool) -> bool:
        """Returns whether some rank has found changes lately, the same on all ranks. ``here``: this rank finds some.
        REQUIRES: the slot has arrived."""
        self._here = here
        self._passes_left = max(0, self._passes_left - 1)
        found = self._later.exchange(self.slot, None)
        if found is not None and found[0][0] > 0:
            self._passes_left = _PASSES_AFTER_CHANGE
            self._warn_once(
                "the program changes buffers of the module between backward and forward: DDP sends rank 0's before "
                "forward, so forward waits for all gradients now; change buffers inside forward, or keep in another "
                "attribute what need not be sent"
            )
        return self._passes_left > 0


class _Part:
    """The buffers of one module that is called.

    ``arriving``: a backward pass has sent them, and they are not copied in yet. ``tensors``: at the last look.
    ``kinds``: shapes and types for which the sent tensor has room, and ``slots`` where.
    """

    def __init__(self, module: nn.Module) -> None:
        self.follow(module)
        # Of a module that has none, DDP never sends one that is registered later.
        self._has_any = any(buffer is not None for held in self._held for buffer in held.values())
        # due: rank 0 has to send them before the next forward pass.
        self.due, self.arriving, self.fits = True, False, True
        self.tensors = self.current()
        self._versions = [each._version for each in self.tensors]
        self.kinds = _kinds(self.tensors)
        self.slots: list[torch.Tensor] = []

    def follow(self, module: nn.Module) -> None:
        """Finds the module's parts again."""
        # The dicts, not the buffers themselves: a module may replace a buffer by another tensor.
        self._held = [each._buffers for each in module.modules()]

    def current(self) -> list[torch.Tensor]:
        """The buffers as they are now, each once."""
        if not self._has_any:
            return []
        found = [local_of(each) for held in self._held if held for each in held.values() if each is not None]
        return list({id(each): each for each in found if each.numel() > 0}.values())

    def look(self) -> bool:
        """Returns whether the buffers have changed since the last look."""
        before, versions = self.tensors, self._versions
        self.tensors = self.current()
        self._versions = [each._version for each in self.tensors]
        if len(before) != len(self.tensors) or not all(map(operator.is_, before, self.tensors)):
            self.fits = self.has_same_kinds()
            return True
        return self._versions != versions

    def is_changed(self) -> bool:
        """Returns whether a buffer is not as at the last look."""
        return not len(self.unchanged()) == len(self.current()) == len(self.tensors)

    def has_same_kinds(self) -> bool:
        """Returns whether the buffers have the shapes and types of what is sent."""
        return _kinds(self.current()) == self.kinds

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


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in tensors]


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
