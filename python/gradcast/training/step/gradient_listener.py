"""What the gradients need of the session that they belong to."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from gradcast.training.step import pending


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """The settings of a forward pass, for the backward pass through its output. ``synchronizes``: it ended outside of
    no_sync(). ``training``: the module's flag."""

    synchronizes: bool
    training: bool


class Listener(pending.Owner, Protocol):
    """A session, which also owns pending gradients."""

    @property
    def sends(self) -> bool:
        """False while DDP reduces the gradients, and after a failure that ends the session."""

    def reduces(self, forward: ForwardPass | None) -> bool:
        """Whether the backward pass that runs is reduced. ``forward``: whose output it goes through, if known."""

    def signature(self, fingerprint: int, forward: ForwardPass | None) -> Sequence[float]:
        """The marks of a backward pass that begins. ``fingerprint``: of the parameters."""

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
