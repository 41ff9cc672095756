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
from gradcast.training.step import pending
from gradcast.training.step.clipping import (
    ClippedStep,
    NormClipping,
    check_proof,
    clip_as_torch,
    factor_of,
    in_torch_order,
)


class ShardedNormClipping(NormClipping):
    """See the module docstring. ``certified``: the same on all ranks of the replica."""

    def __init__(
        self,
        replica: Group,
        parameters: Sequence[nn.Parameter],
        added: Callable[[], Collection[int]],
        waiting: Callable[[str], Any],
        *parts: Any,
    ) -> None:
        """``replica``: the ranks that hold the shards of this replica. ``parameters``: all that are clipped, in the
        program's order, those without a part on this rank included. ``added``: indices of those whose sum will be added
        to a gradient of an earlier pass. ``waiting``: the watchdog's context. ``parts``: the arguments of NormClipping.
        """
        self._replica, self._all, self._added, self._waiting = replica, list(parameters), added, waiting
        self._flying: _Flying | None = None
        super().__init__(*parts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._all

    def begin_step(self) -> None:
        super().begin_step()
        self._is_agreed, self._can_defer = False, False
        self._others: torch.Tensor | float = 0.0

    def ask(self, *request: Any, **settings: Any) -> torch.Tensor:
        norm: Any = super().ask(*request, **settings)
        # torch's norm is a DTensor, of which a loop asks these.
        norm.full_tensor = norm.to_local = weakref.ref(norm)
        return norm

    def agree(self, *, defers: bool) -> None:
        """Sets ``certified``, once in a step. Collective over the replica. ``defers``: this rank's step could overlap.
        REQUIRES: the step message has arrived."""
        if self._is_agreed or not self.certifies:
            return
        self._is_agreed = True
        self.receive_norm()
        defers = defers and self.may_certify and self._have_expected_layout()
        with torch.no_grad(), self._waiting("the bounds of the gradients' norm from the other shards"):
            self._own_bounds = self._bounds({})
            own = self._certificate.power(self._own_bounds, self._replica.world_size)
            sent = torch.stack([own, torch.full_like(own, not defers)])
            self._add_up(sent).wait()
        total, self._can_defer = sent[0], not bool(sent[1])
        self._others = total if self.norm_type == math.inf else (total - own).clamp(min=0.0)
        self.certified = self.done = self._can_defer and bool(self._certificate.holds_power(total))

    def finish_certified(self, step: int) -> None:
        """Begins to add up the norm of a certified step, of which all gradients have arrived."""
        indices = {id(state.parameter): state.index for state in self._states}
        asked, promised = self._asked, None
        order = in_torch_order(self.parameters if asked is None else asked.parameters)
        known = [self._norms.get(indices.get(id(parameter), -1)) for parameter in order]
        with torch.no_grad():
            zeros = [local_of(parameter).new_zeros(()) for parameter in order]
            powers = torch.stack([zero if norm is None else norm for norm, zero in zip(known, zeros, strict=True)])
            if self.norm_type != math.inf:
                powers = powers**self.norm_type
            if asked is not None:
                promised, asked.promised = asked.promised, None
            # A parameter that no rank has used has no gradient; without a part of it this rank does not know.
            used = torch.tensor([norm is not None for norm in known], device=powers.device)
            self._flying = _Flying(step, powers, used, self._add_up(powers), promised)
        self._record()

    def receive_norm(self) -> None:
        """Waits for the norm of the last certified step, whose factor must be 1, or numbers are wrong."""
        flying, self._flying = self._flying, None
        if flying is None:
            return
        with torch.no_grad(), self._waiting("the norm of the gradients from the other shards"):
            flying.work.wait()
            norms = flying.powers if self.norm_type == math.inf else flying.powers ** (1.0 / self.norm_type)
            self.total_norm = torch.linalg.vector_norm(norms[flying.used | (norms != 0)], self.norm_type)
            if flying.promised is not None:
                pending.clear([flying.promised])
                flying.promised.copy_(self.total_norm)
            factor = factor_of(self.total_norm, self._options)
            check_proof(([float(factor), float(self.total_norm)], flying.step))

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        flying = self._flying
        if flying is not None and any(each is flying.promised for each in tensors):
            self._finish()
        else:
            super().resolve(tensors)

    def check_last_certificate(self) -> None:
        """The next decision checks it: another rank may not have come so far."""

    def apply(self, *, deferred: bool) -> None:
        """Clips all gradients by torch's own function, which waits for the other shards."""
        self.agree(defers=False)
        self.done = True
        self.compute_norms([state for state in self._states if state.update_grad is not None])
        self._record()
        parameters = self.parameters if self._asked is None else self._asked.parameters
        self.take_total(clip_as_torch(self._options, parameters))

    def apply_to_replaced(self) -> None:
        self.apply(deferred=False)

    def _record(self) -> None:
        if self.certifies:
            certified = self.certified if self._can_defer else None
            self._recorded.append(ClippedStep(self._own_bounds, self._known_norms(), certified, self._others))

    def _bounds(self, known: dict[int, torch.Tensor]) -> torch.Tensor:
        bounds = super()._bounds(known)
        for index in self._added():
            gradient = local_of(self._states[index].visible_grad)
            bounds[index] += self._certificate.bound_of(index, torch.linalg.vector_norm(gradient, self.norm_type))
        return bounds

    def _add_up(self, powers: torch.Tensor) -> Any:
        """Begins to add up these p-th powers over the replica, in place."""
        op = dist.ReduceOp.MAX if self.norm_type == math.inf else dist.ReduceOp.SUM
        if self._replica.world_size == 1:
            return _Done()
        return dist.all_reduce(powers, op, self._replica.own, async_op=True)


@dataclasses.dataclass(frozen=True)
class _Flying:
    """The p-th powers of the norms of a certified ``step``, by parameter in torch's order, on their way: 1-d. ``used``:
    those that this rank knows to have a gradient. ``promised``: the tensor that the program has."""

    step: int
    powers: torch.Tensor
    used: torch.Tensor
    work: Any
    promised: torch.Tensor | None


class _Done:
    """The operation of a single shard."""

    def wait(self) -> None:
        return
