"""Clocks for measuring what a device does, or the host.

On CUDA, stamps are events on the current stream, since the host runs ahead of the device.
"""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def stamp(self) -> Any: ...
    def between(self, start: Any, end: Any) -> float:
        """Returns ns."""


class HostClock:
    def stamp(self) -> int:
        return time.perf_counter_ns()

    def between(self, start: int, end: int) -> float:
        return float(end - start)


class DeviceClock:
    """``device``: the module's, which may differ from the thread's current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Returns ns. Waits for the device where it has not come so far."""
        end.synchronize()
        return start.elapsed_time(end) * 1e6


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
