"""Flat gradient buffers: one per dtype, laid out in an agreed order, with one view per parameter.

A block of a plan is a byte range of a buffer, so the layout decides which gradients can be sent together. The memory is
allocated once; only the order of the views changes.

Gradients begin at multiples of ALIGNMENT_BYTES, with zeros between them, and so do blocks that do not cut a gradient.
Other tensors that are sent with them (step_message.py, module_buffers.py) have places of the same kind.

With 8-bit numbers on the wire, fp32 gradients consist of **groups** of GROUP_ELEMENTS. Blocks cut no group, so the
numbers that a group sends do not depend on the plan. The rounding error of a gradient is its **residual** (error
feedback), which moves with it.

A program may keep a gradient beyond its step, because DDP gives each step new ones. A gradient that the program keeps
is never overwritten: the buffer moves to other memory, once, and from then on that parameter's ``.grad`` is
**separate** from the buffer, in memory of its own, as with DDP.
"""

import contextlib
import dataclasses
from array import array
from collections.abc import Callable, Iterable, Sequence

import torch

from gradcast import _core
from gradcast.training.compat import extension
from gradcast.training.compat.sharding import local_of
from gradcast.training.ranks.group import Message

# NCCL and torch's kernels move 16 bytes at a time where they can; 32 bytes of fp32 are 16 on a 16-bit wire.
ALIGNMENT_BYTES = 32
# Tensors that are sent with the gradients, but are none, have names that begin with this.
PASSENGER_PREFIX = "gradcast."
GROUP_ELEMENTS = 128  # kInt8GroupElements in int8_group.h


@dataclasses.dataclass(frozen=True)
class GradientRange:
    """A gradient in bytes ``[lo_bytes, hi_bytes)`` of a buffer. Its padding ends at ``end_bytes``."""

    name: str
    buffer: int
    lo_bytes: int
    hi_bytes: int
    end_bytes: int
    dtype: torch.dtype


class GradientSizes:
    """The buffer that each parameter's gradient belongs to, and its size there: all that a profile needs to know.

    ``names[i]``, ``parameters[i]``: the i-th parameter. ``wire``: the wire format of fp32 gradients.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor], wire: str = "fp32") -> None:
        self.names, self.parameters = list(names), list(parameters)
        self.wire = wire
        self.dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
        self.buffer_of = [self.dtypes.index(parameter.dtype) for parameter in parameters]

    @property
    def order_of_warmup(self) -> list[int]:
        """The order in a warm-up: other tensors before gradients, as they may be ready only where backward ends."""
        return sorted(range(len(self.names)), key=self.is_gradient)

    def shape_of(self, index: int) -> torch.Tensor:
        """A tensor like what is sent: the parameter, or its part on this rank."""
        return local_of(self.parameters[index])

    def is_gradient(self, index: int) -> bool:
        return not self.names[index].startswith(PASSENGER_PREFIX)

    def has_groups(self, index: int) -> bool:
        return self.wire == "int8" and self.parameters[index].dtype == torch.float32

    def elements_of(self, index: int) -> int:
        """Elements of the gradient and its padding. No plan has an empty tensor."""
        shape = self.shape_of(index)
        unit = GROUP_ELEMENTS if self.has_groups(index) else ALIGNMENT_BYTES // shape.element_size()
        return -(-max(1, shape.numel()) // unit) * unit

    def bytes_of(self, index: int) -> int:
        return self.elements_of(index) * self.parameters[index].element_size()

    def unit_bytes_of(self, index: int) -> int:
        """Size of the unit that a plan must not cut: an element or a group."""
        return self.parameters[index].element_size() * (GROUP_ELEMENTS if self.has_groups(index) else 1)

    def messages(self, blocks: Iterable[_core.Block]) -> list[Message]:
        """Returns the messages of these blocks on a device."""
        narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.wire)
        found = []
        for block in blocks:
            dtype = self.dtypes[block.buffer]
            is_narrow = block.op == "all_reduce" and dtype == torch.float32
            found.append(Message(block.op, dtype, block.size_bytes, narrow if is_narrow else None))
        return found


class GradientBuffers(GradientSizes):
    """``flats[b]`` is the b-th buffer (1-d); ``views[i]`` is the gradient of the i-th parameter, in its buffer.
    ``residuals[b]``: of the b-th buffer, as large, if its gradients have groups; ``with_groups``: those gradients.

    A view has its parameter's shape and dtype and, if the parameter is dense, its strides, as autograd makes gradients.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        world_size: int,
        wire: str = "fp32",
        allocating: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """``allocating``: the context of each allocation of a buffer."""
        super().__init__(names, parameters, wire)
        self._allocating = allocating
        self.world_size = world_size
        self.flats = self._new_flats()
        self.with_groups = [i for i in range(len(self.names)) if self.has_groups(i) and self.is_gradient(i)]
        self.residuals = {
            buffer: torch.zeros_like(self.flats[buffer]) for buffer in {self.buffer_of[i] for i in self.with_groups}
        }
        self.views: list[torch.Tensor] = []
        self.addresses = array("Q")  # of the views when they were made; `grad.data = ...` gives a view other memory
        self.apart: set[int] = set()  # parameters whose .grad has memory of its own
        self.offsets = [0] * len(self.parameters)  # by parameter: of its gradient, in elements
        self.layout: tuple[GradientRange, ...] = ()
        self.lay_out(range(len(self.parameters)))

    @property
    def size_bytes(self) -> int:
        return sum(map(self.bytes_of, range(len(self.parameters))))

    def move_out(self) -> None:
        """Moves gradients out of the buffers, except those that the program keeps, and frees the memory, until
        ``lay_out``."""
        for index, gradient in self._moving(self._kept()).items():
            self.parameters[index].grad = gradient
        self.flats, self.views, self.addresses = [], [], array("Q")

    def release(self) -> None:
        """Moves gradients out, and refers to no parameter any more. This object must not be used afterwards."""
        self.move_out()
        self.residuals = {}
        self.parameters = [torch.empty_like(local_of(each), device="meta") for each in self.parameters]

    def residual_of(self, index: int) -> torch.Tensor:
        """The residual of a gradient that has groups, like its view."""
        return _view(self.residuals[self.buffer_of[index]], self.offsets[index], self.shape_of(index))

    def groups(self, buffer: int) -> list[tuple[int, int, bool, int]]:
        """The segments of a buffer with groups, one by gradient: first element, number of elements, whether they are
        sent exactly, and the rank that sums the first group; the next ranks sum the next groups.

        Gradients of one dimension (norms, biases) are sent exactly: they are few and sensitive. The rank of a group
        depends neither on the layout nor on the plan.
        """
        return sorted(
            (self.offsets[index], each.numel(), each.dim() < 2, index % self.world_size)
            for index, each in enumerate(map(local_of, self.parameters))
            if self.buffer_of[index] == buffer and each.numel() > 0
        )

    def are_in_place(self, indices: Sequence[int] | None) -> bool:
        """Returns whether these views (None: all) still lie in the buffers."""
        if indices is None:
            return extension.load().lie_at(self.views, self.addresses)
        addresses = array("Q", [self.addresses[index] for index in indices])
        return extension.load().lie_at([self.views[index] for index in indices], addresses)

    def renew(self, index: int) -> None:
        flat = self.flats[self.buffer_of[index]]
        self.views[index] = _view(flat, self.offsets[index], self.shape_of(index))

    def is_kept(self) -> bool:
        """True if the program keeps a gradient that is no longer a ``.grad``, which the next one would overwrite."""
        held = extension.load().any_view_held(self.views, self.parameters)
        return held or not self.are_in_place(None)

    def keep_apart(self, indices: Iterable[int]) -> None:
        """Gives the gradients of these parameters memory of their own from now on; the sums are copied there."""
        self.apart.update(indices)

    def lay_out(self, order: Sequence[int]) -> None:
        """Lays the gradients out anew, in this order of parameter indices.

        The gradients that are some parameter's ``.grad`` move along. A gradient that the program keeps stays, and its
        buffer gets other memory. Makes new ``views``, zero unless the gradient has moved.

        Needs extra memory for the gradients that move, or for a buffer of which something is kept; it runs at the start
        of backward, when memory use is highest. REQUIRES: nothing of the buffers is in flight, no update is pending,
        and the only references in Python to a view are ``views`` and those of the program.
        """
        self.flats = self.flats or self._new_flats()
        kept = self._kept()
        self.keep_apart(kept)
        moving = self._moving(kept)
        residuals = {i: self.residual_of(i).clone() for i in self.with_groups}
        left_behind = {self.buffer_of[index] for index in kept}
        self.views = [torch.Tensor()] * len(self.parameters)
        for buffer, flat in enumerate(self.flats):
            if buffer in left_behind:
                self.flats[buffer] = self._new_flat(buffer)
            else:
                flat.zero_()
        for residual in self.residuals.values():
            residual.zero_()
        layout = []
        offsets = [0] * len(self.flats)
        for index in order:
            shape, buffer = self.shape_of(index), self.buffer_of[index]
            lo = self.offsets[index] = offsets[buffer]
            end = offsets[buffer] = lo + self.elements_of(index)
            self.views[index] = _view(self.flats[buffer], lo, shape)
            width = shape.element_size()
            ends_bytes = (lo + shape.numel()) * width, end * width
            layout.append(GradientRange(self.names[index], buffer, lo * width, *ends_bytes, shape.dtype))
        self.addresses = array("Q", [view.data_ptr() for view in self.views])
        self.layout = tuple(layout)
        for index, gradient in moving.items():
            self.views[index].copy_(gradient)
            self.parameters[index].grad = self.views[index]
        for index, residual in residuals.items():
            self.residual_of(index).copy_(residual)

    def _new_flats(self) -> list[torch.Tensor]:
        return [self._new_flat(buffer) for buffer in range(len(self.dtypes))]

    def _new_flat(self, buffer: int) -> torch.Tensor:
        members = [index for index, each in enumerate(self.buffer_of) if each == buffer]
        count = sum(self.elements_of(index) for index in members)
        with self._allocating():
            return torch.zeros(count, dtype=self.dtypes[buffer], device=self.parameters[members[0]].device)

    def _pairs(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Each view with its parameter; empty before the first layout."""
        return zip(self.views, self.parameters[: len(self.views)], strict=True)

    def _kept(self) -> list[int]:
        """Parameters whose view the program keeps, whether it is the ``.grad`` or not."""
        # A conversion of the module gives views other memory; who holds the old one is not known.
        all_indices = () if self.are_in_place(None) else range(len(self.views))
        found = [index for index in all_indices if not self.are_in_place([index])]
        with torch._C.DisableTorchFunctionSubclass():  # views may be pending
            for are_gradients in (False, True):
                indices = [i for i, (view, p) in enumerate(self._pairs()) if (p.grad is view) == are_gradients]
                held = extension.load().held_elsewhere([self.views[i] for i in indices], 1, are_gradients)
                found += [indices[position] for position in held]
        return found

    def _moving(self, kept: Sequence[int]) -> dict[int, torch.Tensor]:
        """Copies of the views that are their parameter's ``.grad``, by parameter; without those in ``kept``."""
        with torch._C.DisableTorchFunctionSubclass():
            pairs = enumerate(self._pairs())
            return {i: view.clone() for i, (view, p) in pairs if p.grad is view and i not in kept}


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A view with a storage of its own over the buffer's memory: its owner count shows whether the program keeps it."""
    width = flat.element_size()
    memory = flat.untyped_storage()[offset * width : (offset + parameter.numel()) * width]
    strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.size(), device="meta").stride()
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(memory, 0, parameter.size(), strides)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the strides visit numel() adjacent elements once each, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
