"""On CUDA, the stream that updates run on: that of the last ``step()``, and before the first one that of backward.

If forward runs on that stream, CUDA orders its reads behind the updates. If forward reads parameters on other streams,
the program has ordered them behind its call of ``step()``, in ways that gradcast does not see. A deferred update would
not be waited for there, so updates then have to run inside ``step()``.

A stream that is being captured in a CUDA graph is refused wherever it would be ordered: a replay would not repeat that.

Thread safety: under the session's lock.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradcast.training.compat import graph_capture


class UpdateStream:
    """The stream of one session; not used on the CPU. ``read_elsewhere``: another stream has read a parameter."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self.read_elsewhere = False

    def move_to_caller(self) -> None:
        """Makes the calling thread's stream the one for updates. REQUIRES: no update is pending."""
        if self._stream is None:
            return
        here = self._current_stream()
        if here != self._stream:
            here.wait_stream(self._stream)
            self._stream, self.read_elsewhere = here, False

    def follow_caller(self) -> None:
        """Orders what runs on this stream from now on behind everything on the calling thread's stream."""
        if self._device.type != "cuda":
            return
        here = self._current_stream()
        if self._stream is None:
            self._stream = here
        elif here != self._stream:
            self._stream.wait_stream(here)

    def on_parameter_read(self) -> None:
        if self._stream is not None and self._current_stream() != self._stream:
            self.read_elsewhere = True

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Context in which this is the current stream. The caller's stream is ordered behind it afterwards."""
        return contextlib.nullcontext() if self._stream is None else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        here = self._current_stream()
        with torch.cuda.stream(self._stream):
            yield
        if here != self._stream:
            here.wait_stream(self._stream)

    def _current_stream(self) -> Any:
        graph_capture.refuse_capture(self._device)
        return torch.cuda.current_stream(self._device)
