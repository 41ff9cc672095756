"""On CUDA, the stream that updates run on: that of the last ``step()``, and before the first one that of backward.

A forward pass orders what it reads behind ``step()`` by itself where it uses that stream. Where it reads parameters on
others, it has ordered them behind the call of ``step()``, in ways that gradcast does not see, so an update that runs
later would not be waited for: then updates have to run inside of ``step()``.

A stream that is being captured in a CUDA graph is refused wherever it would be ordered: no replay would know of it.

Thread safety: under the session's lock.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradcast.training.compat import graph_capture


class UpdateStream:
    """Of one session. ``left``: a parameter has been read on another stream. On the CPU nothing here does anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self.left = False

    def move(self) -> None:
        """Home is from now on where the calling thread is. REQUIRES: no update is still to run."""
        if self._stream is None:
            return
        here = self._here()
        if here != self._stream:
            here.wait_stream(self._stream)
            self._stream, self.left = here, False

    def called(self) -> None:
        """What runs at home from now on may use everything that is on the calling thread's stream by now."""
        if self._device.type != "cuda":
            return
        here = self._here()
        if self._stream is None:
            self._stream = here
        elif here != self._stream:
            self._stream.wait_stream(here)

    def parameter_read(self) -> None:
        if self._stream is not None and self._here() != self._stream:
            self.left = True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around waiting and updating. What the caller's stream is given afterwards runs behind it."""
        if self._stream is None:
            yield
            return
        here = self._here()
        with torch.cuda.stream(self._stream):
            yield
        if here != self._stream:
            here.wait_stream(self._stream)

    def _here(self) -> Any:
        graph_capture.refuse_capture(self._device)
        return torch.cuda.current_stream(self._device)
