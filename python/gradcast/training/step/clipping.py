"""Clipping inside a deferred step. The numbers are those of torch.

The options clip every step. The program may also ask for it between backward and ``step()``, and then gradients are
clipped when they are first used (early_clipping.py).

Every rank holds the same averaged gradients, so no rank has to ask another one. The norms of gradients that have
arrived are computed while others are still in flight. If a bound for the others certifies that nothing is clipped
(clip_certificate.py), updates go on as without clipping. Otherwise the first update waits for all gradients.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gradcast.errors import Error, refused
from gradcast.training.compat import clip_calls
from gradcast.training.compat.later_read import LaterRead, to_device
from gradcast.training.compat.module_hooks import UncopiedHook
from gradcast.training.compat.sharding import local_of, whole_of
from gradcast.training.options import Options
from gradcast.training.step import pending
from gradcast.training.step.clip_certificate import CERTIFIED_NORM_TYPES, ClipCertificate
from gradcast.training.step.gradient_buffers import GradientBuffers
from gradcast.training.step.parameter_state import ParameterState
from gradcast.training.step.step_message import StepMessage

_RECORDED_STEPS = 64


def clip_values(gradients: Sequence[torch.Tensor], max_value: float) -> None:
    """``torch.nn.utils.clip_grad_value_`` for these gradients; each element for itself, so parts give the same bits."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        parts = [local_of(each) for each in gradients]
        for (alike,), _ in _group_tensors_by_device_and_dtype([parts]).values():
            torch._foreach_clamp_min_(alike, -max_value)
            torch._foreach_clamp_max_(alike, max_value)


class ClipOnce:
    """torch's own clipping by the options, once per step: before the first of the optimizers updates, or earlier, when
    the program asks for it."""

    def __init__(self, modules: Sequence[nn.Module], options: Options) -> None:
        self._modules, self._options = list(modules), options
        self._due = True
        # A forward pass begins the next step.
        self._hooks = [each.register_forward_pre_hook(UncopiedHook(self._on_forward)) for each in modules]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def before_step(self) -> None:
        if self._due and self._options.clip.unasked:
            clip_as_torch(self._options, self._parameters())
        self._due = False

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool | None:
        """See EarlyClipping.covers; torch clips what it is given, so any parameters count as all."""
        own = set(map(id, self._parameters()))
        return True if any(id(each) in own for each in parameters) else None

    def clip(self, parameters: Sequence[torch.Tensor], *, refuse_nonfinite: bool) -> torch.Tensor | None:
        """See EarlyClipping.clip; this clips at once."""
        self._due = False
        return clip_as_torch(self._options, parameters, refuse_nonfinite)

    def parameters_with(self, _gradients: Sequence[torch.Tensor]) -> None:
        """See EarlyClipping.parameters_with; torch computes the norm."""

    def clip_by(self, _norm: torch.Tensor, _parameters: Sequence[torch.Tensor], own: Callable[[], None]) -> None:
        """See EarlyClipping.clip_by; torch clips."""
        self._due = False
        own()

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for each in self._modules for parameter in each.parameters()]

    def _on_forward(self, _module: nn.Module, _inputs: Any, _compiled: bool) -> None:
        self._due = True


def clip_as_torch(options: Options, parameters: Any, refuse_nonfinite: bool = False) -> torch.Tensor | None:
    """Clips ``.grad`` by torch's own functions. Returns the norm, None if values are clipped."""
    with clip_calls.unnoticed():
        if options.clip.norm is not None:
            max_norm, norm_type = options.clip.norm, options.clip.norm_type
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=refuse_nonfinite)
        nn.utils.clip_grad_value_(parameters, options.clip.value)
        return None


class ValueClipping:
    """``torch.nn.utils.clip_grad_value_`` by part. ``asked``: by the program, before ``step()``. ``done``: no gradient
    of the open step is to be clipped any more."""

    def __init__(self, options: Options) -> None:
        self._max_value, self._unasked = options.clip.value, options.clip.unasked
        self.begin_step()

    def begin_step(self) -> None:
        self.asked = self.done = False

    request = None

    def on_step(self) -> None:
        self.done = self.done or not (self.asked or self._unasked)

    def clip(self, states: Sequence[ParameterState]) -> None:
        """Clips the gradients that the update of these parameters reads."""
        if not self.done:
            clip_values([each.update_grad for each in states if each.update_grad is not None], self._max_value)

    def clip_as_they_are(self, states: Sequence[ParameterState]) -> None:
        """Clips the tensors in ``.grad``, if the program has replaced gradients."""
        if self.asked:  # tensors that have replaced them since stay as they are
            self.clip(states)
        elif not self.done:
            gradients = [state.parameter.grad for state in states if state.parameter.grad is not None]
            clip_values(gradients, self._max_value)


class NormClipping(pending.Owner):
    """``torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)`` in pieces.

    ``message``: with the norms of the gradients that the ranks send. ``done``: the gradients of the open step are
    clipped, or certainly need not be. ``total_norm``: of the last clipped step, before clipping. ``may_certify``:
    otherwise the plan waits for all gradients, because certificates gain nothing.
    """

    def __init__(
        self,
        states: Sequence[ParameterState],
        buffers: GradientBuffers,
        message: StepMessage,
        options: Options,
        world_size: int,
        factor: Callable[[], float],
    ) -> None:
        """``factor``: waits for, and returns, the factor of the sums of the open step."""
        self._states, self._buffers, self.message, self._factor = states, buffers, message, factor
        self._options = options
        self._certificate = None
        # The certificate does not know the residuals of earlier gradients.
        if self.norm_type in CERTIFIED_NORM_TYPES and options.wire != "int8":
            parameters = [local_of(state.parameter) for state in states]
            max_norm, norm_type = options.clip.norm, self.norm_type
            self._certificate = ClipCertificate(parameters, max_norm, norm_type, world_size, options.wire)
        self._norms: dict[int, torch.Tensor] = {}  # by parameter: torch's norm of the arrived gradient
        self.record = ClipRecord(self._certificate, [state.name for state in states], options)
        self._proofs = LaterRead()  # of certified steps: the factor and the norm
        self.total_norm: torch.Tensor | None = None
        self.request: Request | None = None
        self.may_certify = True
        self.begin_step()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that are clipped together."""
        return [state.parameter for state in self._states]

    @property
    def norm_type(self) -> float:
        """The type of the norm, in the notation of torch."""
        return float(self._options.clip.norm_type)

    @property
    def asked(self) -> bool:
        """True if the program has asked for the clipping before ``step()``."""
        return self.request is not None and self.request.clips

    def begin_step(self) -> None:
        """Begins a step, of which gradients are in flight."""
        self._norms.clear()
        if self.request is not None:
            self.request.answer(None)
        self.request = None
        self.done = self.certified = False

    def ask(
        self,
        parameters: Sequence[torch.Tensor],
        refuse_nonfinite: bool,
        finish: Callable[[], None],
        *,
        clips: bool = True,
    ) -> torch.Tensor:
        """Notes that the program asks for clipping before ``step()``, or for the norm only. Returns the norm, which is
        pending until known.

        ``parameters``: all, in the program's order. ``finish``: has the gradients clipped. ``refuse_nonfinite``:
        clipping raises if the norm is NaN or inf.
        """
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
        if self.request is not None:
            self.request.answer(None)
        norm = torch.full((), math.nan, dtype=dtype, device=parameters[0].device)
        pending.mark([norm], self)
        self.request = Request(parameters, finish, refuse_nonfinite, norm, clips)
        return norm

    def agree(self, *, defers: bool) -> None:
        """See ShardedNormClipping; without shards each rank decides for itself."""

    def on_step(self) -> None:
        self.done = self.done or not (self.asked or self._options.clip.unasked)

    @property
    def is_promised(self) -> bool:
        """True if the program has a norm that is not known yet."""
        return self.request is not None and not self.request.is_answered

    def resolve(self, _tensors: list[torch.Tensor]) -> None:
        """Finishes the promised norm, which the program uses."""
        if self.is_promised:
            self.request.finish()

    def receive_norm(self) -> None:
        """See ShardedNormClipping."""

    def take_total(self, norm: torch.Tensor) -> None:
        """Notes the norm of all gradients, before clipping."""
        self.total_norm = whole_of(norm)
        if self.request is not None:
            self.request.answer(self.total_norm)
        refuses = self.request is not None and self.request.refuses_nonfinite
        if refuses and not self.certified and not bool(self.total_norm.isfinite()):
            raise refused(
                f"the norm of the gradients is {float(self.total_norm)}, which the call that clips them refuses "
                "(error_if_nonfinite); no parameter has this step's update: end the training and continue from the "
                "last checkpoint, call handle.detach() and go on without gradcast, or pass error_if_nonfinite=False"
            )

    def compute_norms(self, states: Sequence[ParameterState]) -> None:
        """Computes the norms of gradients that have arrived where the update reads them; they may be pending."""
        missing = [each for each in states if each.index not in self._norms and each.update_grad is not None]
        if not missing:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            gradients = [local_of(state.update_grad).detach() for state in missing]
            # By the kernels that torch's clipping uses: those of a GPU take many tensors, and sum in their own order.
            for (alike,), positions in _group_tensors_by_device_and_dtype([gradients], with_indices=True).values():
                norms = torch._foreach_norm(alike, self.norm_type)
                self._norms |= zip([missing[position].index for position in positions], norms, strict=True)

    @property
    def certifies(self) -> bool:
        """True if a certificate exists for this kind of norm."""
        return self._certificate is not None

    def certify(self) -> None:
        """Sets ``certified`` if clipping certainly changes nothing. On a device the host waits until that is known.
        REQUIRES: the message has arrived, ``compute_norms`` was called for gradients that have, and all updates of the
        step are pending."""
        with torch.no_grad():
            self.certified = self._have_expected_layout() and bool(self._certificate.hold(self._bounds(self._norms)))
        self.done = self.certified

    def finish_certified(self, step: int) -> None:
        """Checks a certified step, of which all gradients have arrived: the factor must be 1, or numbers are wrong. On
        a device the next such step, or ``check_last_certificate``, reads the result, so that the host does not wait."""
        factor = self._total_factor(deferred=True)
        if factor is not None:
            check_proof(self._proofs.exchange(torch.stack([factor.double(), self.total_norm.double()]), step))

    def check_last_certificate(self) -> None:
        check_proof(self._proofs.take())

    def apply(self, *, deferred: bool, replaced: bool = False) -> None:
        """Clips all gradients. ``deferred``: the step is not synchronous. ``replaced``: the tensors in ``.grad``, since
        the program has replaced gradients that have arrived. REQUIRES: all are settled.

        Raises Error, each time if ``deferred``, for a norm that the program does not want clipped.
        """
        if replaced:
            self.done = True
            self.total_norm = clip_as_torch(self._options, self.parameters)
            return
        used = [state for state in self._states if state.update_grad is not None]
        self.compute_norms(used)
        self.done = not deferred
        factor = self._total_factor(deferred)
        self.done = True
        if factor is not None:
            with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                torch._foreach_mul_([state.update_grad for state in used], factor)

    def _total_factor(self, deferred: bool) -> torch.Tensor | None:
        """The factor of the gradients, one element; None if there are none. REQUIRES: all norms are known."""
        used = self._states if self.request is None else _states_of(self.request.parameters, self._states)
        used = [state for state in used if state.index in self._norms]
        if not used:
            if self.request is not None:
                self.request.answer(torch.zeros(()))
            return None
        used = _states_of(in_torch_order([state.parameter for state in used]), used)
        norms = [self._norms[state.index] for state in used]
        self.take_total(torch.linalg.vector_norm(torch.stack(norms), self.norm_type))
        if self._certificate is not None:
            certified, bounds = self.certified if deferred and self.may_certify else None, self._bounds({})
            self.record.steps.append(ClippedStep(bounds, known_norms(self._norms, bounds), certified))
        return factor_of(self.total_norm, self._options)

    def _bounds(self, known: dict[int, torch.Tensor]) -> torch.Tensor:
        """Bounds of all norms: the known ones, and for the others those that follow from the ranks' messages."""
        bounds = self._certificate.bounds(self.message.norms, self._factor())
        for state in self._states:
            # If no rank has used the parameter, its .grad of before the step counts.
            before = state.locally_unused.grad_before if state.locally_unused is not None else None
            if before is not None:
                own = self._certificate.bound_of(
                    state.index, torch.linalg.vector_norm(local_of(before), self.norm_type)
                )
                bounds[state.index] = torch.maximum(bounds[state.index], own)
        return bounds if not known else bounds.index_copy(0, *_indexed(known, bounds))

    def _have_expected_layout(self) -> bool:
        """True if torch computes each norm over memory in the parameter's order, which the bound's rounding assumes."""
        apart = [self._states[index] for index in self._buffers.apart]
        with torch._C.DisableTorchFunctionSubclass():
            return all(
                state.visible_grad is not None
                and local_of(state.visible_grad).stride() == self._buffers.views[state.index].stride()
                for state in apart
            )


@dataclasses.dataclass
class Request:
    """A request of the program before ``step()``. ``parameters``: in the order in which torch adds up the norms.
    ``finish``: has the gradients clipped. ``norm``: the program has it, a tensor of one element, which is pending until
    the request ``is_answered``. ``clips``: False if the program has only asked for the norm."""

    parameters: Sequence[torch.Tensor]
    finish: Callable[[], None]
    refuses_nonfinite: bool
    norm: torch.Tensor
    clips: bool
    is_answered: bool = False

    def answer(self, norm: torch.Tensor | None) -> None:
        """Writes the norm, unless that has been done. None: it will never be known, and stays NaN."""
        if not self.is_answered:
            self.is_answered = True
            pending.clear([self.norm])
            if norm is not None:
                with torch.no_grad():
                    self.norm.copy_(norm)


@dataclasses.dataclass(frozen=True)
class ClippedStep:
    """One step. ``norms``: of its gradients; ``bounds``: of these norms, before any gradient had arrived. 1-d float64,
    by parameter. ``certified``: None if nothing was to gain: the step was synchronous, or its plan waits. ``others``:
    of the other shards, see ClipCertificate.hold."""

    bounds: torch.Tensor
    norms: torch.Tensor
    certified: bool | None
    others: torch.Tensor | float = 0.0


class ClipRecord:
    """The last ``steps`` of a clipping by the norm, for plans, statistics and the log. ``certificate``: None if there
    is none, and then no step is recorded. ``names``: of the parameters."""

    def __init__(self, certificate: ClipCertificate | None, names: Sequence[str], options: Options) -> None:
        self._certificate, self._names, self._limit = certificate, names, options.clip.norm
        self.steps: collections.deque[ClippedStep] = collections.deque(maxlen=_RECORDED_STEPS)
        self._told = False

    def certified_share_if(self, arrived: Collection[str]) -> float:
        """The share of the last steps that would have been certified if gradcast had decided when the gradients of
        these parameters (names) had arrived. 0 if no step is known."""
        if self._certificate is None or not self.steps:
            return 0.0
        known = to_device([name in arrived for name in self._names], self.steps[0].norms.device)
        hold = self._certificate.hold
        held = [hold(torch.where(known, step.norms, step.bounds), step.others) for step in self.steps]
        return sum(torch.stack(held).tolist()) / len(held)

    def stats(self) -> dict[str, float | None] | None:
        """For handle.stats(), over the last 64 steps at most."""
        if self._certificate is None or not self.steps:
            return None
        total = self._certificate.total
        decided = [step.certified for step in self.steps if step.certified is not None]
        ratios = [total(step.bounds) / total(step.norms) for step in self.steps]
        return {
            "certified_share": sum(decided) / len(decided) if decided else None,
            "bound_over_norm": torch.stack(ratios).nanmedian().item(),
        }

    def sentence_once(self) -> str | None:
        """The message about the first 64 steps that were not synchronous; None before and afterwards."""
        decided = [step.certified for step in self.steps if step.certified is not None]
        if self._told or len(decided) < _RECORDED_STEPS:
            return None
        self._told = True
        share = sum(decided) / len(decided)
        return f"clipping at {self._limit}: certified in {share:.0%} of {_RECORDED_STEPS} steps; the others waited"


def check_proof(proof: tuple[list[float], int] | None) -> None:
    if proof is not None and proof[0][0] != 1.0:
        (_, norm), step = proof
        raise Error(
            f"in step {step} gradcast certified that the gradients need no clipping, but their norm is {norm:.9g}, "
            "beyond that of Clip(norm=...): a defect of gradcast; updates have run unclipped, so continue from the "
            "last checkpoint without Options(clip=Clip(norm=...))",
            "internal",
        )


def known_norms(norms: dict[int, torch.Tensor], bounds: torch.Tensor) -> torch.Tensor:
    """The norms by parameter, 0 where none is known."""
    found = torch.zeros_like(bounds)
    return found.index_copy(0, *_indexed(norms, bounds)) if norms else found


def _states_of(parameters: Sequence[torch.Tensor], states: Sequence[ParameterState]) -> list[ParameterState]:
    """Those of these parameters, in their order."""
    found = {id(state.parameter): state for state in states}
    return [found[id(each)] for each in parameters if id(each) in found]


def _indexed(norms: dict[int, torch.Tensor], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return to_device(list(norms), like.device), torch.stack(list(norms.values())).to(like.dtype)


def factor_of(norm: torch.Tensor, options: Options) -> torch.Tensor:
    """The factor by which torch clips gradients of this norm."""
    return torch.clamp(options.clip.norm / (norm + 1e-6), max=1.0)


def in_torch_order(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The order in which torch sums: by device and dtype, in the order of torch's own grouping."""
    with torch._C.DisableTorchFunctionSubclass():
        detached = [local_of(each).detach() for each in parameters]  # of the same types as their gradients
        grouped = _group_tensors_by_device_and_dtype([detached], with_indices=True)
    return [parameters[index] for _, indices in grouped.values() for index in indices]
