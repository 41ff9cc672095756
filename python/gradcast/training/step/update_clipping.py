"""Clipping of a step's gradients before its updates: by the norm of all before the first one, by value with each part.

Thread safety: under the session's lock.
"""

from collections.abc import Sequence

from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.training.compat import extension
from gradcast.training.step.clipping import ValueClipping
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.sharded_clipping import ShardedNormClipping
from gradcast.training.step.update_stream import UpdateStream


class UpdateClipping:
    """The clipping of one session. ``norm``, ``values``: by the norm of all gradients, and of each element. ``kinds``:
    those of the two that are in use."""

    def __init__(self, gradients: GradientHooks, stream: UpdateStream, values: ValueClipping | None) -> None:
        self._gradients, self._stream = gradients, stream
        self.norm, self.values = gradients.clipping, values
        self.kinds = [each for each in (self.norm, values) if each is not None]

    def begin_step(self) -> None:
        for each in self.kinds:
            each.begin_step()

    def on_step(self, optimizer: Optimizer, *, may_certify: bool) -> None:
        """Begins a ``step()``. ``may_certify``: updates need not wait for all gradients if nothing is clipped."""
        for each in self.kinds:
            each.on_step()
        if self.norm is not None:
            self.norm.may_certify = may_certify
        if self.kinds and getattr(optimizer, "grad_scale", None) is not None:
            raise refused(
                "gradcast would clip gradients that a GradScaler has not unscaled yet; call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )

    @property
    def is_norm_missing(self) -> bool:
        """True if the open step still needs the norm of all gradients."""
        return self.norm is not None and not self.norm.done

    def may_defer(self) -> bool:
        """Returns whether the norm leaves it open that the updates of this step wait. Of a module that FSDP shards all
        ranks of a replica decide that here."""
        if not isinstance(self.norm, ShardedNormClipping) or self.norm.done:
            return True
        self._gradients.arrived.wait_for([])  # the step message
        self.norm.agree(defers=True)
        return self.norm.certified

    @property
    def can_certify(self) -> bool:
        """True if the ranks' norms, in the step message, may show that nothing is to be clipped."""
        if not self.is_norm_missing or not (self.norm.certifies and self.norm.may_certify):
            return False
        states = self._gradients.states
        return len(extension.load().due(states)) == len(states)

    def certify(self) -> None:
        """Certifies the step if possible. REQUIRES: the step message has arrived."""
        if not self.norm.done:
            self.take_norms(self._gradients.states)
            self.norm.certify()

    def take_norms(self, states: Sequence[ParameterState]) -> None:
        """Computes the norms of those gradients that have arrived. If this rank has not used a parameter, it is not
        known yet whether another one has."""
        known = [each for each in self._gradients.table.arrived(states) if each.locally_unused is None]
        self._gradients.arrived.finish(known)
        for state in known:
            self._gradients.arrived.copy_arrived(state)
        self.norm.compute_norms(known)

    def clip_all(self, *, as_they_are: bool = False) -> None:
        """Clips by norm, once per step. ``as_they_are``: the tensors in ``.grad``, which the program may have
        replaced."""
        norm, states = self.norm, self._gradients.states
        if norm is None or norm.done:
            return
        replaced = as_they_are and not norm.asked and not self._gradients.are_in_place(states)
        norm.apply(deferred=not as_they_are, replaced=replaced)

    def clip_part(self, part: Sequence[ParameterState]) -> None:
        """Clips a part before its update. REQUIRES: its gradients are settled."""
        if self.norm is not None and self.norm.certified:
            self.norm.compute_norms(part)
        if self.values is not None:
            self.values.clip(part)

    def clip_as_they_are(self, states: Sequence[ParameterState]) -> None:
        """Clips before a synchronous step of an optimizer of these parameters."""
        self.clip_all(as_they_are=True)
        if self.values is not None:
            self.values.clip_as_they_are(states)

    def clip_asked(self) -> None:
        """Clips if requested: the program uses gradients before ``step()``. REQUIRES: all are settled."""
        with self._stream.entered():
            if self.norm is not None and self.norm.asked:
                self.clip_all(as_they_are=True)
            if self.values is not None and self.values.asked:
                self.values.clip(self._gradients.states)
                self.values.done = True

    def end_step(self, step: int) -> None:
        """Ends a step, of which all updates have run. REQUIRES: there is a norm."""
        if self.norm.certified:
            self.norm.finish_certified(step)

    @property
    def grad_norm(self) -> float | None:
        """The norm before clipping of the last step that was clipped."""
        if self.norm is not None:
            self.norm.receive_norm()
        norm = None if self.norm is None else self.norm.total_norm
        return None if norm is None else norm.item()
