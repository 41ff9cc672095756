"""Flat gradient buffers: one per dtype, laid out in an agreed order, with one view per parameter.

A block of a plan is a byte range of a buffer, so the layout decides which gradients can travel together. The memory is
allocated once; only the order of the views changes.

Each gradient is followed by its **usage flag**, one element: 1 if this rank has used the parameter, a small number if
it could have, 0 if the parameter is frozen. The flag is reduced with the gradient, so the sum tells whether any rank
has used the parameter, without a collective of its own. The flag is followed by the **signature** of the backward pass
(rank_consistency.py), which is the same behind all gradients, so that the first ones that arrive show whether the ranks
are in the same pass; for most sizes it takes elements that the alignment leaves free. That of the largest gradient is
followed by the elements of the **step reports** (step_reports.py). Zeros fill up to the next multiple of
ALIGNMENT_BYTES. Gradients begin at such multiples, and so do blocks that do not cut a gradient.

With 8-bit numbers on the wire, fp32 gradients consist of **groups** of GROUP_ELEMENTS, as do flag and reports behind
them. Blocks cut no group, so the numbers that a group sends do not depend on the plan. What rounding has taken from a
gradient is its **residual** (error feedback), which moves with it.

A program may keep a gradient beyond its step, because DDP gives each step new ones. A gradient that the program keeps
is never overwritten: the buffer moves to other memory, once, and from then on that parameter's ``.grad`` lies **apart**
from the buffer, in memory of its own, as with DDP.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

import torch

from gradcast.training.compat import extension
from gradcast.training.ranks.step_reports import REPORT_ELEMENTS

# NCCL and torch's kernels move 16 bytes at a time where they can; 32 bytes of fp32 are 16 on a 16-bit wire.
ALIGNMENT_BYTES = 32
# Names of tensors that travel with the gradients and are none begin with this.
PASSENGER_PREFIX = "gradcast."
GROUP_ELEMENTS = 128  # kInt8GroupElements in int8_group.h
SIGNATURE_ELEMENTS = 6
# The flags of all ranks that could have used a parameter sum to less than that of one that has; fp16 and bf16 hold it.
_UNUSED = 2.0**-14
_ALL_UNUSED_MAX = 0.5


class Usage(enum.Enum):
    """What all ranks together have done with a parameter in one step."""

    USED = enum.auto()  # by at least one rank
    UNUSED = enum.auto()
    FROZEN = enum.auto()  # on all ranks
    FAILED = enum.auto()  # some rank's backward pass failed before it reached this parameter


@dataclasses.dataclass(frozen=True)
class GradientRange:
    """A gradient in bytes ``[lo_bytes, hi_bytes)`` of a buffer. Its flag, reports and padding end at ``end_bytes``."""

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
        self._wire = wire
        self.dtypes = list(dict.fromkeys(parameter.dtype for parameter in parameters))
        self.buffer_of = [self.dtypes.index(parameter.dtype) for parameter in parameters]
        floating = [index for index, each in enumerate(self.parameters) if each.is_floating_point()]
        self.reports_index = max(floating, key=lambda index: self.parameters[index].numel())

    def has_groups(self, index: int) -> bool:
        return self._wire == "int8" and self.parameters[index].dtype == torch.float32

    def flag_offset_of(self, index: int) -> int:
        """Elements in front of the usage flag."""
        count = self.parameters[index].numel()
        return _multiple(count, GROUP_ELEMENTS) if self.has_groups(index) else count

    def elements_of(self, index: int) -> int:
        """Elements of the gradient, its usage flag, the signature, the step reports (of one parameter), and padding."""
        count = self.flag_offset_of(index) + self._marks_of(index)
        alignment = ALIGNMENT_BYTES // self.parameters[index].element_size()
        return _multiple(count, GROUP_ELEMENTS if self.has_groups(index) else alignment)

    def bytes_of(self, index: int) -> int:
        return self.elements_of(index) * self.parameters[index].element_size()

    def unit_bytes_of(self, index: int) -> int:
        """What a plan must not cut: an element or a group."""
        return self.parameters[index].element_size() * (GROUP_ELEMENTS if self.has_groups(index) else 1)

    def _marks_of(self, index: int) -> int:
        """The usage flag, the signature, and the step reports, if this parameter has them."""
        return 1 + SIGNATURE_ELEMENTS + (REPORT_ELEMENTS if index == self.reports_index else 0)


class GradientBuffers(GradientSizes):
    """``flats[b]`` is the b-th buffer (1-d); ``views[i]`` is the gradient of the i-th parameter, in its buffer.
    ``residuals[b]``: of the b-th buffer, as large, if its gradients have groups; ``with_groups``: the parameters of
    which that is so.

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
        """``allocating``: put around each allocation of a buffer."""
        super().__init__(names, parameters, wire)
        self._allocating = allocating
        self._world_size = world_size
        self._unused = min(_UNUSED, _ALL_UNUSED_MAX / (2 * world_size))
        self.flats = [self._new_flat(buffer) for buffer in range(len(self.dtypes))]
        self.with_groups = [index for index in range(len(self.parameters)) if self.has_groups(index)]
        self.residuals = {
            buffer: torch.zeros_like(self.flats[buffer]) for buffer in {self.buffer_of[i] for i in self.with_groups}
        }
        self.views: list[torch.Tensor] = []
        self.addresses: list[int] = []  # of the views when they were made; `grad.data = ...` gives a view other memory
        self.apart: set[int] = set()  # parameters whose .grad has memory of its own
        self._flag_offsets: list[torch.Tensor] = []  # by buffer: the offsets of its usage flags
        self._mark_offsets: list[torch.Tensor] = []  # by buffer: the same with those of the signatures behind them
        self._marks: dict[tuple[int, tuple[float, ...]], torch.Tensor] = {}  # by buffer and signature: what lies there
        self.offsets = [0] * len(self.parameters)  # by parameter: of its gradient, in elements
        self._members: list[list[int]] = []  # by buffer: its parameters, in the order of the offsets
        self.reports = torch.Tensor()  # REPORT_ELEMENTS elements
        self.layout: tuple[GradientRange, ...] = ()
        self.lay_out(range(len(self.parameters)))

    @property
    def size_bytes(self) -> int:
        return sum(map(self.bytes_of, range(len(self.parameters))))

    def move_out(self) -> None:
        """Moves gradients out of the buffers, except those that the program keeps, and frees the memory. This object
        must not be used afterwards."""
        for index, gradient in self._moving(self._kept()).items():
            self.parameters[index].grad = gradient
        self.flats, self.views, self.reports, self.residuals = [], [], torch.Tensor(), {}
        self.parameters = [torch.empty_like(each, device="meta") for each in self.parameters]  # their sizes

    def flag_all_used(self, signature: Sequence[float] | None = None) -> None:
        """This rank uses every parameter, unless told otherwise. ``signature``: SIGNATURE_ELEMENTS numbers of its
        backward pass; None if it has none. REQUIRES: nothing of the buffers travels."""
        values = 1.0, *(signature or (0.0,) * SIGNATURE_ELEMENTS)
        for buffer, (flat, offsets) in enumerate(zip(self.flats, self._mark_offsets, strict=True)):
            marks = self._marks.get((buffer, values))
            if marks is None:
                marks = torch.tensor(values, dtype=flat.dtype, device=flat.device).repeat(len(offsets) // len(values))
                self._marks[buffer, values] = marks
            flat.index_copy_(0, offsets, marks)

    def signature(self, index: int) -> torch.Tensor:
        """The sum of the ranks' signatures, SIGNATURE_ELEMENTS elements. REQUIRES: this gradient has arrived."""
        behind_flag = self.offsets[index] + self.flag_offset_of(index) + 1
        return self.flats[self.buffer_of[index]][behind_flag : behind_flag + SIGNATURE_ELEMENTS]

    def flag_unused(self, index: int, *, frozen: bool) -> None:
        self._set_flag(index, 0.0 if frozen else self._unused)

    def flag_failed(self, index: int) -> None:
        """This rank's backward pass has failed before it reached this parameter. No sum hides a NaN."""
        self._set_flag(index, float("nan"))

    def _set_flag(self, index: int, value: float) -> None:
        self.flats[self.buffer_of[index]][self.offsets[index] + self.flag_offset_of(index)] = value

    def residual_of(self, index: int) -> torch.Tensor:
        """The residual of a gradient that has groups, like its view."""
        return _view(self.residuals[self.buffer_of[index]], self.offsets[index], self.parameters[index])

    def groups(self, buffer: int) -> list[tuple[int, int, bool, int]]:
        """The segments of a buffer with groups: first element, number of elements, whether they travel exactly, and the
        rank that sums the first group; the next ranks sum the next groups. A gradient has two: its own groups, and
        those of flag and reports.

        Gradients of one dimension (norms, biases) travel exactly: they are few and sensitive. Who sums a group depends
        neither on the layout nor on the plan.
        """
        segments = []
        for index in self._members[buffer]:
            lo, parameter = self.offsets[index], self.parameters[index]
            if parameter.numel() > 0:
                segments.append((lo, parameter.numel(), parameter.dim() < 2, index % self._world_size))
            segments.append((lo + self.flag_offset_of(index), self._marks_of(index), True, index % self._world_size))
        return segments

    def findings(self) -> torch.Tensor:
        """Two elements, 1 or 0, of the reports' dtype: whether a backward pass of any rank has failed, and whether the
        ranks were in different ones. REQUIRES: all gradients have arrived."""
        flags = (flat.index_select(0, at) for flat, at in zip(self.flats, self._flag_offsets, strict=True))
        failed = [each.sum(0, keepdim=True).isnan() for each in flags]  # flags are not negative: nothing else gives NaN
        failed = failed[0] if len(failed) == 1 else torch.cat(failed).any(0, keepdim=True)
        return torch.cat([failed, differ(self.signature(self.reports_index))[None]]).to(self.reports.dtype)

    def usage(self, indices: Sequence[int]) -> list[Usage]:
        """What all ranks together have done with these parameters, the same on every rank. On a device the host waits
        for the answer, once. REQUIRES: these gradients have arrived."""
        if not indices:
            return []
        buffers = sorted({self.buffer_of[index] for index in indices})
        flags = torch.cat([self.flats[buffer][self._flag_offsets[buffer]].double() for buffer in buffers]).tolist()
        sums = dict(zip([index for buffer in buffers for index in self._members[buffer]], flags, strict=True))
        return [_usage(sums[index]) for index in indices]

    def are_in_place(self, indices: Sequence[int] | None) -> bool:
        """Whether these views (None: all) still lie in the buffers."""
        if indices is None:
            return extension.load().lie_at(self.views, self.addresses)
        views, addresses = [self.views[index] for index in indices], [self.addresses[index] for index in indices]
        return extension.load().lie_at(views, addresses)

    def renew(self, index: int) -> None:
        flat = self.flats[self.buffer_of[index]]
        self.views[index] = _view(flat, self.offsets[index], self.parameters[index])

    def is_kept(self) -> bool:
        """Whether the program keeps a gradient that is no longer a ``.grad``, and that the next one would overwrite."""
        held = extension.load().any_view_held(self.views, self.parameters)
        return held or not self.are_in_place(None)

    def keep_apart(self, indices: Iterable[int]) -> None:
        """From now on the gradients of these parameters have memory of their own; the sums are copied there."""
        self.apart.update(indices)

    def lay_out(self, order: Sequence[int]) -> None:
        """Lays the gradients out anew, in this order of parameter indices.

        The step reports and the gradients that are some parameter's ``.grad`` move along. A gradient that the program
        keeps stays, and its buffer gets other memory. Makes new ``views``, zero unless the gradient has moved.

        Needs extra memory for the gradients that move, or for a buffer of which something is kept; it runs at the start
        of backward, when memory use is highest. REQUIRES: nothing of the buffers travels, no update is due, and the
        only references in Python to a view are ``views`` and those of the program.
        """
        kept = self._kept()
        self.keep_apart(kept)
        moving = self._moving(kept)
        residuals = {i: self.residual_of(i).clone() for i in self.with_groups}
        reports = self.reports.clone()
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
        self._members = [[] for _ in self.flats]
        flags: list[list[int]] = [[] for _ in self.flats]
        for index in order:
            parameter, buffer = self.parameters[index], self.buffer_of[index]
            lo = self.offsets[index] = offsets[buffer]
            end = offsets[buffer] = lo + self.elements_of(index)
            flag = lo + self.flag_offset_of(index)
            self.views[index] = _view(self.flats[buffer], lo, parameter)
            if index == self.reports_index:
                reports_lo = flag + 1 + SIGNATURE_ELEMENTS
                self.reports = self.flats[buffer][reports_lo : reports_lo + REPORT_ELEMENTS]
            width = parameter.element_size()
            ends_bytes = (lo + parameter.numel()) * width, end * width
            layout.append(GradientRange(self.names[index], buffer, lo * width, *ends_bytes, parameter.dtype))
            self._members[buffer].append(index)
            flags[buffer].append(flag)
        self.addresses = [view.data_ptr() for view in self.views]
        self.layout = tuple(layout)
        self._flag_offsets = [torch.tensor(at, device=flat.device) for at, flat in zip(flags, self.flats, strict=True)]
        behind = [torch.arange(1 + SIGNATURE_ELEMENTS, device=at.device) for at in self._flag_offsets]
        self._mark_offsets = [(at[:, None] + k).view(-1) for at, k in zip(self._flag_offsets, behind, strict=True)]
        for index, gradient in moving.items():
            self.views[index].copy_(gradient)
            self.parameters[index].grad = self.views[index]
        for index, residual in residuals.items():
            self.residual_of(index).copy_(residual)
        if len(reports) > 0:
            self.reports.copy_(reports)

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


def differ(signature: torch.Tensor) -> torch.Tensor:
    """Whether the ranks' signatures, of which this is the sum, differ: some rank has marked a fact, and another one the
    opposite, which lies beside it. No rounding of a sum hides that."""
    return torch.minimum(signature[::2], signature[1::2]).amax() > 0


def _usage(total: float) -> Usage:
    if total != total:
        return Usage.FAILED
    if total > _ALL_UNUSED_MAX:
        return Usage.USED
    return Usage.UNUSED if total > 0 else Usage.FROZEN


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A view with a storage of its own over the buffer's memory: its owner count shows whether the program keeps it."""
    width = flat.element_size()
    memory = flat.untyped_storage()[offset * width : (offset + parameter.numel()) * width]
    strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.size(), device="meta").stride()
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(memory, 0, parameter.size(), strides)


def _multiple(count: int, unit: int) -> int:
    """The least multiple that is not smaller."""
    return -(-count // unit) * unit


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides visit numel() adjacent elements once each, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
