"""Flat gradient buffers: one per dtype, laid out in an agreed order, with a view per parameter.

A block of a plan is a byte range of a buffer, so the layout decides what can travel together. The memory is allocated
once; only the order of the views changes.

Behind each gradient lies one element more, its **mark**: 1 where this rank has used the parameter, 0 where not. It
travels with the gradient, so the sum tells whether anybody has used it, without an operation of its own. Behind the
mark of the largest gradient lie the **notes**, by which the ranks tell each other how their last step went. Then zeros
up to the next multiple of ALIGNMENT_BYTES: there gradients begin, and blocks that do not cut one.
"""

import dataclasses
from collections.abc import Sequence

import torch

# However many workers there are, so that a plan fits them all.
NOTE_ELEMENTS = 384
# NCCL and torch's kernels move 16 bytes at a time where they can; 32 bytes of fp32 are 16 on a 16-bit wire.
ALIGNMENT_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Place:
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
        self._dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
        self.buffer_of = [self._dtypes.index(parameter.dtype) for parameter in parameters]
        self.notes_at = max(range(len(self._parameters)), key=lambda index: self._parameters[index].numel())

    def elements_of(self, index: int) -> int:
        """What travels: the gradient, its mark, of one the notes, and zeros."""
        count = self._parameters[index].numel() + 1 + (NOTE_ELEMENTS if index == self.notes_at else 0)
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

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters)
        self._names = list(names)
        self.flats = []
        for buffer, dtype in enumerate(self._dtypes):
            members = [index for index, b in enumerate(self.buffer_of) if b == buffer]
            count = sum(self.elements_of(index) for index in members)
            self.flats.append(torch.zeros(count, dtype=dtype, device=parameters[members[0]].device))
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []  # of the views, when they were made: `grad.data = …` gives one other memory
        self._marks: list[torch.Tensor] = []  # by parameter: one element each
        self._marked: list[torch.Tensor] = []  # by buffer: where its marks lie
        self.notes = torch.Tensor()  # NOTE_ELEMENTS elements
        self.layout: tuple[Place, ...] = ()
        self.lay_out(range(len(self._parameters)))

    @property
    def size_bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def mark_all(self) -> None:
        """This rank uses every parameter, but those of ``unmark``. REQUIRES: nothing of the buffers travels."""
        for flat, marked in zip(self.flats, self._marked, strict=True):
            flat.index_fill_(0, marked, 1.0)

    def unmark(self, index: int) -> None:
        """This rank has not used this parameter."""
        self._marks[index].zero_()

    def mark_failed(self, index: int) -> None:
        """This rank's backward pass has failed before it came to this parameter: no sum hides that."""
        self._marks[index].fill_(float("nan"))

    def somebody_failed(self) -> torch.Tensor:
        """Whether any rank has marked that: one element, 1 or 0, of the notes' type. REQUIRES: all have arrived."""
        failed = [flat[marked].isnan().any() for flat, marked in zip(self.flats, self._marked, strict=True)]
        return torch.stack(failed).any().to(self.notes.dtype).unsqueeze(0)

    def used_anywhere(self, index: int) -> bool:
        """Whether any rank has, and no rank's pass has failed before it. REQUIRES: the gradient has arrived."""
        return self._marks[index].item() > 0

    def is_in_place(self, index: int) -> bool:
        """Whether the view still lies in the buffer."""
        with torch._C.DisableTorchFunctionSubclass():  # of a gradient that is pending, too
            return self.views[index].data_ptr() == self.addresses[index]

    def renew(self, index: int) -> None:
        """Makes the view anew, in the buffer."""
        place = next(place for place in self.layout if place.name == self._names[index])
        offset = place.lo_bytes // place.dtype.itemsize
        self.views[index] = _view(self.flats[place.buffer], offset, self._parameters[index])

    def lay_out(self, order: Sequence[int]) -> None:
        """Gives every parameter a new place, in this order of their indices; notes and the gradients that are some
        parameter's ``.grad`` move with them.

        Makes new ``views``, with zeros where the old one is nobody's. Needs once the memory of those that move: it runs
        where backward begins and memory is fullest. REQUIRES: nothing of the buffers travels, no update waits.
        """
        kept = self._held()
        notes = self.notes.clone()
        for flat in self.flats:
            flat.zero_()
        self.views = [torch.Tensor()] * len(self._parameters)
        self._marks = [torch.Tensor()] * len(self._parameters)
        places = []
        offsets = [0] * len(self.flats)
        for index in order:
            parameter, buffer = self._parameters[index], self.buffer_of[index]
            lo, size = offsets[buffer], parameter.numel()
            end = offsets[buffer] = lo + self.elements_of(index)
            self.views[index] = _view(self.flats[buffer], lo, parameter)
            self._marks[index] = self.flats[buffer][lo + size]
            if index == self.notes_at:
                self.notes = self.flats[buffer][lo + size + 1 : lo + size + 1 + NOTE_ELEMENTS]
            width = parameter.element_size()
            ends_bytes = (lo + size) * width, end * width
            places.append(Place(self._names[index], buffer, lo * width, *ends_bytes, parameter.dtype))
        self.addresses = [view.data_ptr() for view in self.views]
        self.layout = tuple(places)
        ends: list[list[int]] = [[] for _ in self.flats]
        for place in places:
            ends[place.buffer].append(place.hi_bytes // place.dtype.itemsize)
        self._marked = [torch.tensor(end, device=flat.device) for end, flat in zip(ends, self.flats, strict=True)]
        for index, gradient in kept.items():
            self.views[index].copy_(gradient)
        if len(notes) > 0:
            self.notes.copy_(notes)

    def _held(self) -> dict[int, torch.Tensor]:
        """By parameter: copies of what lies in the views that are its ``.grad``."""
        pairs = enumerate(zip(self._parameters, self.views, strict=False))  # there are no views at first
        with torch._C.DisableTorchFunctionSubclass():  # of what is pending, too
            return {index: view.clone() for index, (parameter, view) in pairs if parameter.grad is view}


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    if _is_dense(parameter):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides visit each of numel() neighbouring elements once, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
