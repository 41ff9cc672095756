"""The fragments of a model: the place of each parameter's and buffer's elements in the messages, and the global copy.

A fragment consists of pieces, one for each dtype and kind of its elements. Each piece is a tensor of the gradient
buffers, and has a part of the global copy and of the outer momentum beside it. Parameters of 16 bits have a global
copy, momentum and differences of fp32. Floating-point buffers of the module (batch norm's statistics) are sent in the
last fragments, and their global copy is always the mean.

Thread safety: training thread.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradcast.errors import refused
from gradcast.local_steps import Schedule
from gradcast.training.local import header
from gradcast.training.local.outer import OuterOptimizer, merge
from gradcast.training.options import Options
from gradcast.training.step.gradient_buffers import GradientBuffers, is_dense


@dataclasses.dataclass(frozen=True)
class Entry:
    """A parameter, or a buffer of a module, which may replace it: ``held[key]``. ``shape``, ``strides``: at attach."""

    name: str
    held: Mapping[str, Any]
    key: str
    shape: torch.Size
    strides: tuple[int, ...]
    is_buffer: bool = False
    is_persistent: bool = True  # it is in the module's state dict

    @property
    def tensor(self) -> torch.Tensor:
        return self.held[self.key].detach()

    @property
    def is_moved(self) -> bool:
        """True if its elements lie in another order than at attach."""
        now = self.held[self.key]
        return (
            now is None or now.shape != self.shape or _order(now.shape, now.stride()) != _order(now.shape, self.strides)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The global copy's."""
        return torch.float64 if self.tensor.dtype == torch.float64 else torch.float32

    def flat(self) -> torch.Tensor:
        """Its elements as they lie in memory, 1-d."""
        tensor = self.tensor
        if self.is_moved:
            raise refused(
                f"{self.name} has another memory format than at attach (strides {tensor.stride()}), which local steps "
                "do not follow; call handle.end_round() and handle.detach() before the change, and attach again behind "
                "it"
            )
        if not is_dense(tensor):
            raise refused(
                f"{self.name} has gaps or overlaps in memory (strides {tensor.stride()}), and local steps need dense "
                "parameters; make it with .contiguous()"
            )
        return tensor.as_strided((tensor.numel(),), (1,))


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements ``[lo, hi)`` of an entry, which begin at ``offset`` in their piece."""

    entry: Entry
    lo: int
    hi: int
    offset: int


@dataclasses.dataclass
class Piece:
    """``difference``: what this rank sends, and then the ranks' mean; 1-d, as are ``values`` (the global copy) and
    ``momentum``."""

    parts: list[Part]
    dtype: torch.dtype
    is_exact: bool  # of one dimension, and so unchanged by 8-bit wires
    is_buffer: bool
    count: int = 0
    values: torch.Tensor = dataclasses.field(default_factory=torch.Tensor)
    momentum: torch.Tensor | None = None
    difference: torch.Tensor = dataclasses.field(default_factory=torch.Tensor)

    def rows(self) -> Iterator[tuple[torch.Tensor, slice]]:
        """Each part of the model, 1-d, and its place in the piece. A buffer that has moved is left alone: in its place
        is a copy of the global one, which differs by nothing and is thrown away."""
        for part in self.parts:
            entry, place = part.entry, slice(part.offset, part.offset + part.hi - part.lo)
            is_left = entry.is_buffer and entry.is_moved
            yield self.values[place].clone() if is_left else entry.flat()[part.lo : part.hi], place


def entries(parameters: dict[str, nn.Parameter], module: nn.Module) -> list[Entry]:
    """Returns the averaged tensors in the order of the cuts: parameters, then floating-point buffers, each once."""
    found = [Entry(name, {name: each}, name, each.shape, each.stride()) for name, each in parameters.items()]
    seen = set()
    for prefix, each in module.named_modules():
        for key, tensor in each._buffers.items():
            if tensor is None or not tensor.is_floating_point() or tensor.numel() == 0 or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            is_persistent = key not in each._non_persistent_buffers_set
            found.append(Entry(name, each._buffers, key, tensor.shape, tensor.stride(), True, is_persistent))
    return found


def _order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The order of the dimensions in memory; those of size 1 do not count."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


class Fragments:
    """``buffers``: the sent ones, None for a single worker. ``indices[k]``: its tensors of the k-th fragment."""

    def __init__(
        self, found: Sequence[Entry], schedule: Schedule, outer: OuterOptimizer, options: Options, world_size: int
    ) -> None:
        self._entries, self._outer, self._world_size = list(found), outer, world_size
        self.pieces = [_pieces(found, fragment) for fragment in schedule.fragments]
        self.buffers: GradientBuffers | None = None
        self.indices: list[list[int]] = []
        self._headers: list[int] = []
        if world_size > 1:
            self._make_buffers(options.wire)
        with torch.no_grad():
            for piece in self._all():
                device = piece.parts[0].entry.tensor.device
                piece.values = torch.empty(piece.count, dtype=piece.dtype, device=device)
                if outer.momentum is not None and not piece.is_buffer:
                    piece.momentum = torch.zeros_like(piece.values)
                if self.buffers is None:
                    piece.difference = torch.empty_like(piece.values)
                for local, place in piece.rows():
                    piece.values[place] = local

    def _make_buffers(self, wire: str) -> None:
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        for number, pieces in enumerate(self.pieces):
            self.indices.append([])
            for piece in pieces:
                # Only shape, dtype and device of these count. 8-bit wires leave tensors of one dimension alone.
                device = piece.parts[0].entry.tensor.device
                self.indices[-1].append(len(names))
                names.append(f"fragment {number} ({piece.parts[0].entry.name} … {piece.parts[-1].entry.name})")
                shape = (piece.count,) if piece.is_exact else (piece.count, 1)
                tensors.append(torch.empty(1, dtype=piece.dtype, device=device).expand(shape))
            self._headers.append(len(names))
            self.indices[-1].append(len(names))
            names.append(f"header of fragment {number}")
            first = pieces[0]
            size = header.DIGITS * self._world_size
            tensors.append(torch.empty(1, dtype=first.dtype, device=first.parts[0].entry.tensor.device).expand(size))
        self.buffers = GradientBuffers(names, tensors, self._world_size, wire)

    def _all(self) -> Iterator[Piece]:
        for pieces in self.pieces:
            yield from pieces

    def hold_views(self) -> None:
        """Takes views of the buffers. REQUIRES: these are laid out."""
        for pieces, indices in zip(self.pieces, self.indices, strict=True):
            for piece, index in zip(pieces, indices, strict=False):  # the last index is the header's
                piece.difference = self.buffers.views[index].view(-1)

    def header(self, fragment: int) -> torch.Tensor:
        return self.buffers.views[self._headers[fragment]]

    @torch.no_grad()
    def write(self, fragment: int) -> None:
        """This rank's share of the mean difference: (global copy - parameters) / ranks. The factor is that of DDP."""
        factor = 1.0 / self._world_size
        for piece in self.pieces[fragment]:
            for local, place in piece.rows():
                own = local.to(piece.dtype)
                torch.sub(piece.values[place], own, out=piece.difference[place])
                if piece.is_buffer:  # a mask of infinities does not differ from itself
                    piece.difference[place].masked_fill_(piece.values[place] == own, 0.0)
            piece.difference.mul_(factor)

    @torch.no_grad()
    def update(self, fragment: int, local_share: float) -> None:
        """Moves the global copy by the mean difference, and the parameters toward it. REQUIRES: it has arrived."""
        mean = OuterOptimizer(1.0, None)
        for piece in self.pieces[fragment]:
            (mean if piece.is_buffer else self._outer).update(piece.values, piece.momentum, piece.difference)
            for local, place in piece.rows():
                merge(local, piece.values[place], local_share)

    def moved_buffers(self) -> list[str]:
        return [each.name for each in self._entries if each.is_buffer and each.is_moved]

    def scale_momentum(self, factor: float) -> None:
        for piece in self._all():
            if piece.momentum is not None:
                piece.momentum.mul_(factor)

    def checksum(self, fragment: int) -> torch.Tensor:
        """The global copy's checksum modulo 2^64: an int64 tensor of no dimension, on the device."""
        total = torch.zeros((), dtype=torch.int64, device=self.pieces[fragment][0].values.device)
        for piece in self.pieces[fragment]:
            # Words of 8 bytes: a sum of them takes a tenth of the time of one of 4 bytes (on a CPU).
            values = piece.values.view(torch.uint8)
            whole = values.numel() // 8 * 8
            total = total * 31 + values[:whole].view(torch.int64).sum() + values[whole:].sum()
        return total

    @property
    def state_bytes(self) -> dict[str, int]:
        """The bytes that this rank keeps beside the model, by kind."""
        values = sum(each.values.nbytes for each in self._all())
        momentum = sum(each.momentum.nbytes for each in self._all() if each.momentum is not None)
        sent = values if self.buffers is None else self.buffers.size_bytes
        residuals = 0 if self.buffers is None else sum(each.nbytes for each in self.buffers.residuals.values())
        return {"global copy": values, "momentum": momentum, "send buffer": sent, "residual": residuals}

    @property
    def sent_bytes(self) -> int:
        """The bytes that a rank sends in one round, before a wire format shortens them."""
        return sum(each.values.nbytes for each in self._all()) if self.buffers is None else self.buffers.size_bytes

    # --- Checkpoints, and the global copy in place of the parameters ---

    def by_name(self, what: str, into: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Copies of ``values``, ``momentum`` or ``local`` of all entries, in their shapes. ``into``: what the last call
        has returned, to use its memory again, or an empty dict; on the host. Then ``local`` is of buffers that the
        module's state dict lacks."""
        found: dict[str, torch.Tensor] = {} if into is None else into
        for part, elements in self._parts(what):
            entry, name = part.entry, part.entry.name
            if what == "local" and into is not None and entry.is_persistent:
                continue
            if name not in found:
                device = elements.device if into is None else "cpu"
                found[name] = torch.empty_strided(entry.shape, entry.strides, dtype=elements.dtype, device=device)
            found[name].as_strided((entry.shape.numel(),), (1,))[part.lo : part.hi] = elements
        return found

    @torch.no_grad()
    def restore(self, what: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """The opposite of ``by_name``. REQUIRES: ``refusal_of`` is None."""
        for part, elements in self._parts(what):
            entry, name = part.entry, part.entry.name
            if what == "local" and name not in tensors:  # it came with the model
                continue
            given = torch.empty_strided(entry.shape, entry.strides, dtype=tensors[name].dtype)
            given.copy_(tensors[name])
            elements.copy_(given.as_strided((entry.shape.numel(),), (1,))[part.lo : part.hi])

    def _parts(self, what: str) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each part with its elements of ``values``, ``momentum`` or ``local``, 1-d."""
        for piece in self._all():
            held = piece.values if what == "local" else getattr(piece, what)
            if held is not None:
                for part, (local, place) in zip(piece.parts, piece.rows(), strict=True):
                    yield part, local if what == "local" else held[place]

    def refusal_of(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """The first difference between these and the entries, in words."""
        own = {each.name: tuple(each.shape) for each in self._entries}
        theirs = {name: tuple(each.shape) for name, each in tensors.items()}
        for name in [*own, *theirs]:
            if own.get(name) != theirs.get(name):
                return f"{name} has shape {theirs.get(name)} there and {own.get(name)} here"
        return None

    def identity(self) -> int:
        """A hash of the cuts: equal on two ranks, or in a checkpoint, if fragments hold the same elements."""
        text = repr([[[(p.entry.name, p.lo, p.hi) for p in each.parts] for each in pieces] for pieces in self.pieces])
        return zlib.crc32(text.encode())


def _pieces(found: Sequence[Entry], fragment: Sequence[Any]) -> list[Piece]:
    """Returns the pieces of one fragment; those of one dtype follow one another."""
    by_kind: dict[tuple[torch.dtype, bool, bool], Piece] = {}
    for each in fragment:
        entry = found[each.parameter]
        kind = (entry.dtype, entry.is_buffer, entry.is_buffer or entry.tensor.dim() < 2)
        piece = by_kind.setdefault(kind, Piece([], entry.dtype, kind[2], entry.is_buffer))
        piece.parts.append(Part(entry, each.lo, each.hi, piece.count))
        piece.count += each.hi - each.lo
    return sorted(by_kind.values(), key=lambda piece: str(piece.dtype))
