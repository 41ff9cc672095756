"""The step message: the small numbers of a step, which the ranks add up in one tensor beside the gradients.

    elements            what a rank writes                              what the sum shows
    one by parameter    usage flag: 1 if this rank has used the         whether any rank has used the parameter; no sum
                        parameter, a small number if it could have, 0   hides a NaN
                        if it is frozen, NaN if its pass failed before
    SIGNATURE_ELEMENTS  signature of the pass (rank_consistency.py)     whether the ranks are in the same pass
    REPORT_ELEMENTS     step reports (step_reports.py)                  timings of all ranks
    with clipping       norm by parameter, and a request for a plan     see clipping.py

The message is complete where backward ends, so it is the last tensor that is ready. It has the dtype of the first
parameter, whose gradient is ready last in most models: then one block carries both, and the message needs no operation
of its own. Updates wait for it (optimizer_steps.py): before, this rank does not know whether the sums are those of one
pass, or whether a parameter that it has not used has a gradient.

Thread safety: under the session's lock, ``begin_pass`` and ``flag_unused`` also from autograd's threads.
"""

from collections.abc import Sequence

import torch

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


class StepMessage:
    """``index``: of its tensor, behind the parameters in the buffers. ``is_written``: in the open pass.
    ``own_reports``: this rank's, REPORT_ELEMENTS elements in host memory. ``asks_for_plan``: this rank asks all ranks
    to plan again. ``has_flagged_unused``: in some step this rank has not used all parameters."""

    def __init__(self, buffers: GradientBuffers, parameter_count: int, world_size: int) -> None:
        self.index, self.is_written = parameter_count, False
        self.asks_for_plan = self.has_flagged_unused = False
        self._buffers = buffers
        self._unused = min(_UNUSED, _ALL_UNUSED_MAX / (2 * world_size))
        self._norms_at = parameter_count + SIGNATURE_ELEMENTS + REPORT_ELEMENTS
        own = torch.zeros(self._norms_at, dtype=self._sums.dtype)  # what this rank sends, without its norms
        self._own_flags, self._own_signature, self.own_reports = own.split(
            [parameter_count, SIGNATURE_ELEMENTS, REPORT_ELEMENTS]
        )
        self._own = own

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
        # Pinned, so that the host does not wait for the device, and a copy, as the host may be a step ahead.
        own = self._own.pin_memory() if self._sums.is_cuda else self._own
        self._sums[: self._norms_at].copy_(own, non_blocking=True)
        if own_norms:
            norms = self.norms
            norms[:-1].copy_(torch.stack([own_norms[index] for index in range(self.index)]))
            norms[-1].fill_(float(self.asks_for_plan))
            self.asks_for_plan = False

    # --- Reading. REQUIRES: the message has arrived ---

    @property
    def norms(self) -> torch.Tensor:
        """The sums of the norms, and one more element."""
        return self._sums[self._norms_at :]

    @property
    def any_asks_for_plan(self) -> bool:
        """True if a rank has asked for a plan; the same on all ranks. On a device the host waits for the answer."""
        return bool(self.norms[-1] > 0)

    def usage(self, indices: Sequence[int]) -> list[tuple[bool, bool]]:
        """By parameter, whether some rank has used it, and whether it is frozen on all; the same on every rank. If some
        rank's pass failed before a parameter, neither. On a device the host waits for the answer, once."""
        flags = self._sums[: self.index].tolist() if indices else []
        return [(flags[index] > _ALL_UNUSED_MAX, flags[index] == 0) for index in indices]

    def findings(self) -> torch.Tensor:
        """Two elements, 1 or 0: whether a backward pass of any rank has failed, and whether the ranks were in different
        ones: some rank has marked a fact, and another one the opposite, which lies beside it. No rounding of a sum
        hides that."""
        sums = self._sums
        failed = sums[: self.index].sum().isnan()  # flags are not negative: nothing else gives NaN
        signature = sums[self.index : self.index + SIGNATURE_ELEMENTS]
        differing = torch.minimum(signature[::2], signature[1::2]).amax() > 0
        return torch.stack([failed, differing])

    def reports(self) -> torch.Tensor:
        """The sums of the step reports."""
        return self._sums[self.index + SIGNATURE_ELEMENTS : self._norms_at]

    @property
    def _sums(self) -> torch.Tensor:
        # Not kept: whoever refers to a view, keeps it.
        return self._buffers.views[self.index]
