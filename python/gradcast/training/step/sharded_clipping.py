"""Clipping by the norm of a module that FSDP shards: a rank holds a part of each gradient, and the norm is that of all.

The ranks of a replica decide together, inside ``step()``. Each bounds the norm of its part (clip_certificate.py), and
one small all-reduce adds up the bounds' p-th powers. If nothing is clipped, updates overlap with forward as without
clipping. Otherwise ``step()`` waits for all gradients, and torch's own function clips them.

They do not decide where forward first reads a parameter, as without shards: one rank alone may read it, to log a weight
for example, while the others wait for that rank elsewhere. All of them come to ``step()``.

The norm of a certified step is added up behind its last update; only a program that reads it waits. Both operations use
a process group of gradcast's own, since FSDP uses the mesh's meanwhile. Their order is the same on all ranks: a step's
decision, and if it is certified its norm.

Thread safety: under the session's lock.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcast.training.compat.sharding import local_of
from gradcast.training.ranks.group import Group
from gradcast.training.step.clipping import (
    ClippedStep,
    NormClipping,
    Request,
    check_proof,
    clip_as_torch,
    factor_of,
    in_torch_order,
    known_norms,
)


class ShardedNormClipping(NormClipping):
    """See the module docstring. ``certified``: the same on all ranks of the replica."""

    def __init__(self, shards: "Shards", *parts: Any) -> None:
        """``parts``: the arguments of NormClipping."""
        self._shards = shards
        super().__init__(*parts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._shards.parameters)

    def begin_step(self) -> None:
        super().begin_step()
        self._shards.agreement = None

    def ask(self, *request: Any, **settings: Any) -> torch.Tensor:
        norm: Any = super().ask(*request, **settings)
        # torch's norm is a DTensor, of which a loop asks these.
        norm.full_tensor = norm.to_local = weakref.ref(norm)
        return norm

    def agree(self, *, defers: bool) -> None:
        """Sets ``certified``, once in a step. Collective over the replica. ``defers``: this rank's step could overlap.
        REQUIRES: the step message has arrived."""
        shards = self._shards
        if shards.agreement is not None or not self.certifies:
            return
        self.receive_norm()
        defers = defers and self.may_certify and self._have_expected_layout()
        with torch.no_grad(), shards.waiting("the bounds of the gradients' norm from the other shards"):
            bounds = self._bounds({})
            own = self._certificate.power(bounds, shards.replica.world_size)
            sent = torch.stack([own, torch.full_like(own, not defers)])
            self._add_up(sent).wait()
        total, all_defer = sent[0], not bool(sent[1])
        others = total if self.norm_type == math.inf else (total - own).clamp(min=0.0)
        shards.agreement = _Agreement(bounds, others, all_defer)
        self.certified = self.done = all_defer and bool(self._certificate.holds_power(total))

    def finish_certified(self, step: int) -> None:
        """Begins to add up the norm of a certified step, of which all gradients have arrived."""
        indices = {id(state.parameter): state.index for state in self._states}
        request, self.request = self.request, None
        order = in_torch_order(self.parameters if request is None else request.parameters)
        known = [self._norms.get(indices.get(id(parameter), -1)) for parameter in order]
        with torch.no_grad():
            zeros = [local_of(parameter).new_zeros(()) for parameter in order]
            powers = torch.stack([zero if norm is None else norm for norm, zero in zip(known, zeros, strict=True)])
            if self.norm_type != math.inf:
                powers = powers**self.norm_type
            # A parameter that no rank has used has no gradient; without a part of it this rank does not know.
            used = torch.tensor([norm is not None for norm in known], device=powers.device)
            self._shards.flying = _Flying(step, powers, used, self._add_up(powers), request)
        self._record()

    def receive_norm(self) -> None:
        """Waits for the norm of the last certified step, whose factor must be 1, or numbers are wrong."""
        flying, self._shards.flying = self._shards.flying, None
        if flying is None:
            return
        with torch.no_grad(), self._shards.waiting("the norm of the gradients from the other shards"):
            flying.work.wait()
            norms = flying.powers if self.norm_type == math.inf else flying.powers ** (1.0 / self.norm_type)
            self.total_norm = torch.linalg.vector_norm(norms[flying.used | (norms != 0)], self.norm_type)
            if flying.request is not None:
                flying.request.answer(self.total_norm)
            factor = factor_of(self.total_norm, self._options)
            check_proof(([float(factor), float(self.total_norm)], flying.step))

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        flying = self._shards.flying
        request = None if flying is None else flying.request
        if request is not None and any(each is request.norm for each in tensors):
            request.finish()
        else:
            super().resolve(tensors)

    def check_last_certificate(self) -> None:
        """The next decision checks it: another rank may not have come so far."""

    def apply(self, *, deferred: bool, replaced: bool = False) -> None:
        """Clips all gradients by torch's own function, which waits for the other shards."""
        self.agree(defers=False)
        self.done = True
        self.compute_norms([state for state in self._states if state.update_grad is not None])
        self._record()
        parameters = self.parameters if self.request is None else self.request.parameters
        self.take_total(clip_as_torch(self._options, parameters))

    def _record(self) -> None:
        agreement = self._shards.agreement
        if agreement is not None:
            certified = self.certified if agreement.all_defer else None
            known = known_norms(self._norms, agreement.bounds)
            self.record.steps.append(ClippedStep(agreement.bounds, known, certified, agreement.others))

    def _bounds(self, known: dict[int, torch.Tensor]) -> torch.Tensor:
        bounds = super()._bounds(known)
        for index in self._shards.added():
            gradient = local_of(self._states[index].visible_grad)
            bounds[index] += self._certificate.bound_of(index, torch.linalg.vector_norm(gradient, self.norm_type))
        return bounds

    def _add_up(self, powers: torch.Tensor) -> Any:
        """Begins to add up these p-th powers over the replica, in place."""
        op = dist.ReduceOp.MAX if self.norm_type == math.inf else dist.ReduceOp.SUM
        if self._shards.replica.world_size == 1:
            return _Done()
        return dist.all_reduce(powers, op, self._shards.replica.own, async_op=True)


@dataclasses.dataclass(frozen=True)
class _Flying:
    """The p-th powers of the norms of a certified ``step``, by parameter in torch's order, on their way: 1-d. ``used``:
    those that this rank knows to have a gradient. ``request``: whose answer this is."""

    step: int
    powers: torch.Tensor
    used: torch.Tensor
    work: Any
    request: Request | None


@dataclasses.dataclass(frozen=True)
class _Agreement:
    """The replica's decision about the open step. ``bounds``: this rank's, by parameter; ``others``: the sum of the
    other shards' (ClipCertificate.power). ``all_defer``: the step of each rank could overlap."""

    bounds: torch.Tensor
    others: torch.Tensor
    all_defer: bool


@dataclasses.dataclass
class Shards:
    """The shards of one replica. ``replica``: their ranks. ``parameters``: all that are clipped, in the program's
    order, those without a part on this rank included. ``added``: returns the indices of those whose sum will be added
    to a gradient of an earlier pass. ``waiting``: the watchdog's context. ``agreement``: on the open step. ``flying``:
    the norm of the last certified step, until it is known."""

    replica: Group
    parameters: Sequence[nn.Parameter]
    added: Callable[[], Collection[int]]
    waiting: Callable[[str], Any]
    agreement: _Agreement | None = None
    flying: _Flying | None = None


class _Done:
    """The operation of a single shard."""

    def wait(self) -> None:
        return
