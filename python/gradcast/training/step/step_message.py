"""The step message: the small numbers of a step, which the ranks add up in one tensor beside the gradients.

    elements            what a rank writes                              what the sum shows
    one by parameter    usage flag: 1 if this rank has used the         whether any rank has used the parameter; no sum
                        parameter, a small number if it could have, 0   hides a NaN
                        if it is frozen, NaN if its pass failed before
    SIGNATURE_ELEMENTS  signature of the pass (rank_consistency.py)     whether the ranks are in the same pass
    REPORT_ELEMENTS     step reports (step_reports.py)                  timings of all ranks
    with clipping       a request for a plan, and norm by parameter     see clipping.py

The message is complete where backward ends, so it is the last tensor that is ready. It has the dtype of the first
parameter, whose gradient is ready last in most models: then one block carries both, and the message needs no operation
of its own. Updates wait for it (optimizer_steps.py): before, this rank does not know whether the sums are those of one
pass, or whether a parameter that it has not used has a gradient.

On a device a step copies the message there once, and all but its norms back once; the host waits for neither, and has
the sums a step later.

Thread safety: under the session's lock, ``begin_pass`` and ``flag_unused`` also from autograd's threads.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from gradcast.training.compat.later_read import LaterRead
from gradcast.training.ranks.step_reports import REPORT_ELEMENTS
from gradcast.training.step.gradient_buffers import GradientBuffers

MESSAGE_NAME = "gradcast.step_message"  # in profiles and plans
SIGNATURE_ELEMENTS = 6
# The flags of all ranks that could have used a parameter sum to less than that of one that has; fp16 and bf16 hold it.
_UNUSED = 2.0**-14
_ALL_UNUSED_MAX = 0.5


def message_tensor(parameters: Sequence[torch.Tensor], *, with_norms: bool) -> torch.Tensor:
    """A tensor of the message's size and type."""
    count = len(parameters) + SIGNATURE_ELEMENTS + REPORT_ELEMENTS + (len(parameters) + 1 if with_norms else 0)
    return torch.empty(count, dtype=parameters[0].dtype, device=parameters[0].device)


@dataclasses.dataclass(frozen=True)
class Received:
    """The sums of a message, on the host. ``note``: given with it."""

    flags: Sequence[float]
    signature: Sequence[float]
    reports: Sequence[float]
    note: Any

    @property
    def has_failed(self) -> bool:
        """True if a backward pass of any rank has failed."""
        return math.isnan(sum(self.flags))  # flags are not negative: nothing else gives NaN

    @property
    def differs(self) -> bool:
        """True if the ranks were in different passes: some rank has marked a fact, and another one the opposite, which
        lies beside it. No rounding of a sum hides that."""
        return any(min(pair) > 0 for pair in zip(self.signature[::2], self.signature[1::2], strict=True))


class StepMessage:
    """``index``: of its tensor, behind the parameters in the buffers. ``is_written``: in the open pass.
    ``own_reports``: this rank's, REPORT_ELEMENTS elements in host memory. ``asks_for_plan``: this rank asks all ranks
    to plan again. ``has_flagged_unused``: in some step this rank has not used all parameters. ``received``: the last
    message that is known."""

    def __init__(self, buffers: GradientBuffers, parameter_count: int, world_size: int) -> None:
        self.index, self.is_written = parameter_count, False
        self.asks_for_plan = self.has_flagged_unused = False
        self._buffers = buffers
        self._unused = min(_UNUSED, _ALL_UNUSED_MAX / (2 * world_size))
        self._parts = [parameter_count, SIGNATURE_ELEMENTS, REPORT_ELEMENTS]
        self._norms_at = sum(self._parts) + (self._sums.numel() > sum(self._parts))
        own = torch.zeros(self._norms_at, dtype=self._sums.dtype)  # what this rank sends, without its norms
        self._own_flags, self._own_signature, self.own_reports, self._own_request = own.tensor_split(
            [parameter_count, parameter_count + SIGNATURE_ELEMENTS, sum(self._parts)]
        )
        self._own = own
        self._later = LaterRead()
        self.received: Received | None = None

    # --- Sending ---

    def begin_pass(self, signature: Sequence[float] | None) -> None:
        """Begins a pass. Unflagged parameters count as used on this rank. ``signature``: None of a pass without any."""
        self.is_written = False
        self._own_flags.fill_(1.0)
        self._own_signature.copy_(torch.tensor(signature or (0.0,) * SIGNATURE_ELEMENTS))

    def flag_unused(self, index: int, *, frozen: bool) -> None:
        self._own_flags[index] = 0.0 if frozen else self._unused
        self.has_flagged_unused = True

    def flag_failed(self, index: int) -> None:
        """Notes that this rank's backward pass has failed before it reached this parameter."""
        self._own_flags[index] = float("nan")

    def write(self, own_norms: dict[int, torch.Tensor]) -> None:
        """Writes the message into the buffer. ``own_norms``: by parameter, of what this rank has sent, if a norm is
        clipped; else empty. REQUIRES: the message is not in flight, and all gradients have been sent."""
        self.is_written = True
        if own_norms:
            self._own_request.fill_(float(self.asks_for_plan))
            self.asks_for_plan = False
        # Pinned, so that the host does not wait for the device, and a copy, as the host may be a step ahead.
        own = self._own.pin_memory() if self._sums.is_cuda else self._own
        self._sums[: self._norms_at].copy_(own, non_blocking=True)
        if own_norms:
            self.norms.copy_(torch.stack([own_norms[index] for index in range(self.index)]))

    # --- Reading. REQUIRES: the message has arrived ---

    @property
    def norms(self) -> torch.Tensor:
        """The sums of the norms."""
        return self._sums[self._norms_at :]

    @property
    def any_asks_for_plan(self) -> bool:
        """True if a rank has asked for a plan; the same on all ranks. On a device the host waits for the answer."""
        return bool(self._sums[self._norms_at - 1] > 0)

    def usage(self, indices: Sequence[int]) -> list[tuple[bool, bool]]:
        """By parameter, whether some rank has used it, and whether it is frozen on all; the same on every rank. If some
        rank's pass failed before a parameter, neither. On a device the host waits for the answer, once."""
        flags = self._sums[: self.index].tolist() if indices else []
        return [(flags[index] > _ALL_UNUSED_MAX, flags[index] == 0) for index in indices]

    def receive(self, note: Any) -> Received | None:
        """Returns this message and the note; on a device those of the last call, None at the first."""
        found = self._later.exchange(self._sums[: sum(self._parts)], note)
        if found is not None:
            values, note = found
            signature_at, reports_at = self.index, self.index + SIGNATURE_ELEMENTS
            flags, signature = values[:signature_at], values[signature_at:reports_at]
            self.received = Received(flags, signature, values[reports_at:], note)
        return None if found is None else self.received

    def reports(self) -> Sequence[float] | None:
        """The sums of the step reports of ``received``."""
        return None if self.received is None else self.received.reports

    @property
    def _sums(self) -> torch.Tensor:
        # Not kept: whoever refers to a view, keeps it.
        return self._buffers.views[self.index]
