"""What the gradients need of the session that they belong to."""

from typing import Protocol

from gradcast.training.step import pending


class Listener(pending.Owner, Protocol):
    """A session, which also owns pending gradients."""

    def is_synchronizing(self) -> bool:
        """Whether the gradients of this backward pass travel: not inside no_sync()."""

    @property
    def times_gradients(self) -> bool:
        """Whether ``on_gradient_sent`` must be called when the gradient is sent."""

    def on_backward_begin(self) -> None:
        """The first gradient of a step exists. Opens an iteration."""

    def on_gradient_sent(self, index: int, *, used: bool) -> None:
        """A gradient, or what travels with the gradients, is in the buffer. ``used``: backward has made it."""

    def on_backward_end(self) -> None:
        """All gradients of the step have been sent."""

    def on_backward_failure(self) -> None:
        """The backward pass of the open step has failed before all gradients existed."""

    def wait_for_gradients(self) -> None:
        """Waits until all gradients of the open step have arrived."""

    def stop_watching_reads(self) -> None:
        """Backward begins: reads of parameters are no longer those of forward."""
