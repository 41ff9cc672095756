"""Values of a device that the host reads without waiting: a call later, when they have been copied meanwhile.

Thread safety: one thread at a time.
"""

from typing import Any

import torch


class LaterRead:
    """Reads one tensor per call, with a note of the caller's on it."""

    def __init__(self) -> None:
        self._before: tuple[torch.Tensor, Any, Any] | None = None

    def exchange(self, values: torch.Tensor, note: Any) -> tuple[list[float], Any] | None:
        """Returns these values (1-d) and the note; on a device those of the last call, None at the first."""
        if not _is_on_device(values):
            return values.tolist(), note
        before = self.take()
        self._before = (*_begin_copy(values), note)
        return before

    def take(self) -> tuple[list[float], Any] | None:
        """Waits for what the next call would return, and forgets it."""
        before, self._before = self._before, None
        if before is None:
            return None
        host, copied, note = before
        copied.synchronize()
        return host.tolist(), note


def _is_on_device(values: torch.Tensor) -> bool:
    return values.device.type != "cpu"


def _begin_copy(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Host memory, and the event after which it is filled."""
    host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host, torch.cuda.current_stream(values.device).record_event()


def to_device(values: list[int], device: torch.device) -> torch.Tensor:
    """A tensor of these values; the host does not wait for the device. From memory that is not pinned it would."""
    host = torch.tensor(values, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
