"""On CUDA, the stream that updates run on: that on which ``step()`` was called first.

A forward pass orders what it reads behind ``step()`` by itself where it uses that stream. Where it reads parameters on
others, it has ordered them behind the call of ``step()``, in ways that gradcast does not see, so an update that runs
later would not be waited for: then updates have to run inside of ``step()``.

Thread safety: under the session's lock.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class HomeStream:
    """Of one session. ``left``: a parameter has been read on another stream. On the CPU nothing here does anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self.left = False

    def step_called(self) -> None:
        """An update may use everything that is on the calling thread's stream by now."""
        if self._device.type != "cuda":
            return
        here = torch.cuda.current_stream(self._device)
        if self._stream is None:
            self._stream = here
        elif here != self._stream:
            self._stream.wait_stream(here)

    def parameter_read(self) -> None:
        if self._stream is not None and torch.cuda.current_stream(self._device) != self._stream:
            self.left = True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around waiting and updating. What the caller's stream is given afterwards runs behind it."""
        if self._stream is None:
            yield
            return
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            yield
        if here != self._stream:
            here.wait_stream(self._stream)
