"""Flat gradient buffers: one per dtype, laid out in an agreed order, with a view per parameter.

A block of a plan is a byte range of a buffer, so the layout decides what can travel together. The memory is allocated
once; only the order of the views changes.

Behind each gradient lies one element more, its **mark**: 1 where this rank has used the parameter, a little where it
could have, 0 where it is frozen. It travels with the gradient, so the sum tells whether anybody has used it, without an
operation of its own. Behind the mark of the largest gradient lie the **notes**, by which the ranks tell each other how
their last step went. Then zeros up to the next multiple of ALIGNMENT_BYTES: there gradients begin, and blocks that do
not cut one.

A program may keep a gradient beyond its step, as a value of its own: DDP gives every step new ones. So what somebody
keeps is never overwritten. The buffer moves to other memory, once, and from then on that parameter's ``.grad`` lies
**apart** from the buffer, in memory of its own, as with DDP.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import torch

from gradcast.training.compat import extension
from gradcast.training.ranks.step_reports import REPORT_ELEMENTS

# NCCL and torch's kernels move 16 bytes at a time where they can; 32 bytes of fp32 are 16 on a 16-bit wire.
ALIGNMENT_BYTES = 32
# The marks of all ranks that could have used a parameter stay below that of one that has; fp16 and bf16 hold it.
_UNUSED = 2.0**-14
_ALL_UNUSED_MAX = 0.5


class Usage(enum.Enum):
    """What the ranks have done with a parameter in one step."""

    USED = enum.auto()  # one of them at least
    UNUSED = enum.auto()
    FROZEN = enum.auto()  # on all of them
    FAILED = enum.auto()  # some rank's backward pass failed before it came to this parameter


@dataclasses.dataclass(frozen=True)
class GradientRange:
    """Where a gradient lies: bytes ``[lo_bytes, hi_bytes)`` of a buffer. What travels with it ends at ``end_bytes``."""

    name: str
    buffer: int
    lo_bytes: int
    hi_bytes: int
    end_bytes: int
    dtype: torch.dtype


class Sizes:
    """Which buffer each parameter's gradient belongs to, and how large it is: all that a profile needs to know."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self.dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
        self.buffer_of = [self.dtypes.index(parameter.dtype) for parameter in parameters]
        self.notes_at = max(range(len(self._parameters)), key=lambda index: self._parameters[index].numel())

    def elements_of(self, index: int) -> int:
        """What travels: the gradient, its mark, of one the notes, and zeros."""
        count = self._parameters[index].numel() + 1 + (REPORT_ELEMENTS if index == self.notes_at else 0)
        at_once = ALIGNMENT_BYTES // self._parameters[index].element_size()
        return -(-count // at_once) * at_once

    def bytes_of(self, index: int) -> int:
        return self.elements_of(index) * self.element_bytes_of(index)

    def element_bytes_of(self, index: int) -> int:
        return self._parameters[index].element_size()


class GradientBuffers(Sizes):
    """``flats[b]`` is the b-th buffer, ``views[i]`` the gradient of the i-th parameter given, wherever it lies.

    A view has its parameter's shape, dtype and, where the parameter is dense, its strides, as autograd makes gradients.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], world_size: int) -> None:
        super().__init__(parameters)
        self._names = list(names)
        self._unused = min(_UNUSED, _ALL_UNUSED_MAX / (2 * world_size))
        self.flats = [self._new_flat(buffer) for buffer in range(len(self.dtypes))]
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []  # of the views, when they were made: `grad.data = …` gives one other memory
        self.apart: set[int] = set()  # parameters whose .grad has memory of its own
        self._marks: list[torch.Tensor] = []  # by parameter: one element each
        self._marked: list[torch.Tensor] = []  # by buffer: where its marks lie, and of which parameters
        self._members: list[list[int]] = []
        self.notes = torch.Tensor()  # NOTE_ELEMENTS elements
        self.layout: tuple[GradientRange, ...] = ()
        self.lay_out(range(len(self._parameters)))

    @property
    def size_bytes(self) -> int:
        return sum(map(self.bytes_of, range(len(self._parameters))))

    def move_out(self) -> None:
        """Gradients leave the buffers, but those that somebody keeps, and the memory is given back. Nothing else of
        this object may be used any more."""
        kept = self._kept()
        with torch._C.DisableTorchFunctionSubclass():
            for index, (view, parameter) in enumerate(self._pairs()):
                if parameter.grad is view and index not in kept:
                    parameter.grad = view.clone()
        self.flats, self.views, self._marks, self.notes = [], [], [], torch.Tensor()

    def mark_all(self) -> None:
        """This rank uses every parameter, but those of ``unmark``. REQUIRES: nothing of the buffers travels."""
        for flat, marked in zip(self.flats, self._marked, strict=True):
            flat.index_fill_(0, marked, 1.0)

    def unmark(self, index: int, *, frozen: bool) -> None:
        """This rank has not used this parameter."""
        self._marks[index].fill_(0.0 if frozen else self._unused)

    def mark_failed(self, index: int) -> None:
        """This rank's backward pass has failed before it came to this parameter: no sum hides that."""
        self._marks[index].fill_(float("nan"))

    def somebody_failed(self) -> torch.Tensor:
        """Whether any rank has marked that: one element, 1 or 0, of the notes' type. REQUIRES: all have arrived."""
        failed = [flat[marked].isnan().any() for flat, marked in zip(self.flats, self._marked, strict=True)]
        return torch.stack(failed).any().to(self.notes.dtype).unsqueeze(0)

    def usage(self, indices: Sequence[int]) -> list[Usage]:
        """What all ranks together have done with these, the same on every rank. On a device the host waits for it, once
        for all. REQUIRES: these gradients have arrived."""
        if not indices:
            return []
        sums: dict[int, float] = {}
        for flat, marked, members in zip(self.flats, self._marked, self._members, strict=True):
            sums |= zip(members, flat[marked].tolist(), strict=True)
        return [_usage(sums[index]) for index in indices]

    def is_in_place(self, index: int) -> bool:
        """Whether the view still lies in the buffer."""
        with torch._C.DisableTorchFunctionSubclass():  # of a gradient that is pending, too
            return self.views[index].data_ptr() == self.addresses[index]

    def renew(self, index: int) -> None:
        """Makes the view anew, in the buffer."""
        place = next(place for place in self.layout if place.name == self._names[index])
        offset = place.lo_bytes // place.dtype.itemsize
        self.views[index] = _view(self.flats[place.buffer], offset, self._parameters[index])

    def is_kept(self) -> bool:
        """Whether somebody keeps a gradient that the next one would overwrite, since it is no ``.grad`` any more."""
        with torch._C.DisableTorchFunctionSubclass():
            free = [view for view, parameter in self._pairs() if parameter.grad is not view]
        # Known are the list of views and this one.
        return bool(extension.load().held_elsewhere(free, python_references=1, are_gradients=False))

    def keep_apart(self, indices: Iterable[int]) -> None:
        """From now on the gradients of these have memory of their own, into which the sums are copied."""
        self.apart.update(indices)

    def lay_out(self, order: Sequence[int]) -> None:
        """Gives every parameter a new place, in this order of their indices; notes and the gradients that are some
        parameter's ``.grad`` move with them, but what somebody keeps stays, and its buffer gets other memory.

        Makes new ``views``, with zeros where the old one is nobody's. Needs once the memory of those that move, or of a
        buffer of which something is kept: it runs where backward begins and memory is fullest. REQUIRES: nothing of the
        buffers travels, no update waits; Python's references to a view are those of ``views`` and of who keeps it.
        """
        kept = self._kept()
        self.keep_apart(kept)
        moving = self._moving(kept)
        notes = self.notes.clone()
        left = {self.buffer_of[index] for index in kept}
        self.views = [torch.Tensor()] * len(self._parameters)
        self._marks = [torch.Tensor()] * len(self._parameters)
        for buffer, flat in enumerate(self.flats):
            if buffer in left:
                self.flats[buffer] = self._new_flat(buffer)
            else:
                flat.zero_()
        places = []
        offsets = [0] * len(self.flats)
        for index in order:
            parameter, buffer = self._parameters[index], self.buffer_of[index]
            lo, size = offsets[buffer], parameter.numel()
            end = offsets[buffer] = lo + self.elements_of(index)
            self.views[index] = _view(self.flats[buffer], lo, parameter)
            self._marks[index] = self.flats[buffer][lo + size]
            if index == self.notes_at:
                self.notes = self.flats[buffer][lo + size + 1 : lo + size + 1 + REPORT_ELEMENTS]
            width = parameter.element_size()
            ends_bytes = (lo + size) * width, end * width
            places.append(GradientRange(self._names[index], buffer, lo * width, *ends_bytes, parameter.dtype))
        self.addresses = [view.data_ptr() for view in self.views]
        self.layout = tuple(places)
        self._members = [[index for index in order if self.buffer_of[index] == b] for b in range(len(self.flats))]
        ends: list[list[int]] = [[] for _ in self.flats]
        for place in places:
            ends[place.buffer].append(place.hi_bytes // place.dtype.itemsize)
        self._marked = [torch.tensor(end, device=flat.device) for end, flat in zip(ends, self.flats, strict=True)]
        for index, gradient in moving.items():
            self.views[index].copy_(gradient)
            self._parameters[index].grad = self.views[index]
        if len(notes) > 0:
            self.notes.copy_(notes)

    def _new_flat(self, buffer: int) -> torch.Tensor:
        members = [index for index, each in enumerate(self.buffer_of) if each == buffer]
        count = sum(self.elements_of(index) for index in members)
        return torch.zeros(count, dtype=self.dtypes[buffer], device=self._parameters[members[0]].device)

    def _pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each view and its parameter; none before there are views."""
        return zip(self.views, self._parameters[: len(self.views)], strict=True)

    def _kept(self) -> list[int]:
        """Parameters whose view somebody keeps, as ``.grad`` or without."""
        found: list[int] = []
        with torch._C.DisableTorchFunctionSubclass():  # of what is pending, too
            for are_gradients in (False, True):
                indices = [i for i, (view, p) in enumerate(self._pairs()) if (p.grad is view) == are_gradients]
                held = extension.load().held_elsewhere([self.views[i] for i in indices], 1, are_gradients)
                found += [indices[position] for position in held]
        return found

    def _moving(self, kept: Sequence[int]) -> dict[int, torch.Tensor]:
        """By parameter: copies of what lies in the views that are its ``.grad``."""
        with torch._C.DisableTorchFunctionSubclass():
            pairs = enumerate(self._pairs())
            return {i: view.clone() for i, (view, p) in pairs if p.grad is view and i not in kept}


def _usage(total: float) -> Usage:
    if total != total:
        return Usage.FAILED
    if total > _ALL_UNUSED_MAX:
        return Usage.USED
    return Usage.UNUSED if total > 0 else Usage.FROZEN


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """In a storage of its own over the flat one's memory, so that whoever keeps it is seen by its owners."""
    width = flat.element_size()
    memory = flat.untyped_storage()[offset * width : (offset + parameter.numel()) * width]
    strides = parameter.stride() if _is_dense(parameter) else _contiguous_strides(parameter)
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(memory, 0, parameter.size(), strides)


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.size(), device="meta").stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides visit each of numel() neighbouring elements once, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
