"""Gradients of a module that FSDP shards: what its reduce-scatters have made is sent to the other replicas.

FSDP hands over one group after the other. ``.grad`` keeps FSDP's memory; the mean over the replicas is copied there
when it has arrived, or added to the ``.grad`` of before the pass, as native HSDP adds each pass's mean. A pass without
all-reduce (set_requires_all_reduce(False), no_sync()) leaves its gradients with the replica until the next one with it
that uses the same parameters.
"""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradcast.errors import refused
from gradcast.training.compat import extension
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.compat.sharding import Reduced, ShardGroup, local_of
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.backward_passes import NO_TASK, BackwardPasses
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.parameter_state import ParameterState

_log = logging.getLogger("gradcast")


class ShardedGradients(GradientHooks):
    """``shards``: FSDP's groups. ``parts``: the arguments of GradientHooks."""

    def __init__(self, shards: Sequence[ShardGroup], *parts: Any) -> None:
        super().__init__(*parts)
        self.passes = BackwardPasses(behind_others=True)  # FSDP hands over some groups where it ends a pass
        self._sharded = _ReducedGroups(self, shards)
        self.exchange.buffers.keep_apart(range(len(self.states)))

    def install(self, listener: Any) -> list[Any]:
        return [*super().install(listener), *self._sharded.install()]

    def before_forward(self) -> None:
        super().before_forward()
        if self._hooked_by_program:
            raise refused(
                f"{parameter_state.names(self._hooked_by_program)} has a hook of the program's "
                "(register_post_accumulate_grad_hook), which FSDP would call before the replicas' mean exists; remove "
                "the hook, or train without gradcast"
            )

    def end_step_inside(self) -> None:
        """Ends the open step inside of its backward pass, of which the rest makes another one: FSDP reduces a group
        again, as it does in some programs with activation checkpointing, and its first mean has to be complete."""
        self._clear_unsent()
        self._send_missing()
        self.listener.on_backward_end()
        if self.open:
            self.listener.wait_for_gradients()

    def _on_timed(self, index: int) -> None:
        used = self.states[index].locally_unused is None
        self.listener.on_gradient_sent(index, used=used, together_with=self._sharded.first)

    def _substitute(self, state: ParameterState) -> None:
        earlier, state.parameter.grad = state.parameter.grad, torch.zeros_like(state.parameter, requires_grad=False)
        self._sharded.earlier[state.index] = earlier

    def _place(self, state: ParameterState) -> None:
        super()._place(state)
        earlier = self._sharded.earlier.pop(state.index, None)
        if earlier is not None:
            pending.clear([state.parameter.grad])
            state.parameter.grad = state.visible_grad = state.update_grad = earlier
            pending.mark([earlier], self.listener)
            self.arrived.adds.add(state.index)


class _ReducedGroups:
    """FSDP's groups, as backward passes reduce-scatter them.

    ``earlier``: by the parameter's index, the ``.grad`` of before the pass that runs. ``kept``: by parameter, also one
    that this rank has no part of, the sum of the passes that are not all-reduced.
    """

    def __init__(self, gradients: ShardedGradients, shards: Sequence[ShardGroup]) -> None:
        self._gradients, self._shards = weakref.ref(gradients), shards
        self.earlier: dict[int, torch.Tensor | None] = {}
        self.kept: dict[nn.Parameter, torch.Tensor] = {}
        self._kept_task = NO_TASK  # the last of these passes
        self.first: int | None = None  # the first parameter of the group that is handed over

    def install(self) -> Sequence[Any]:
        for group in self._shards:
            group.take_over(WeakHook(self._before_read), WeakHook(self._on_reduced), self.kept)
        return [*self._shards, self]

    def remove(self) -> None:
        """Called where gradcast leaves the module."""
        if self.kept:
            _log.warning(
                "the gradients that passes without all-reduce have left of %d parameters are dropped, since FSDP "
                "cannot take them; call detach() behind the step whose last pass is all-reduced",
                len(self.kept),
            )

    def _before_read(self, group: ShardGroup) -> None:
        pending.resolve(group.parameters)

    @torch.no_grad()
    def _on_reduced(self, group: ShardGroup, reduced: Sequence[Reduced]) -> None:
        """Sends the gradients of this pass, or keeps them on this replica."""
        gradients = self._gradients()
        passes = gradients.passes
        sends = group.all_reduces and passes.reduces(gradients.listener, passes.forward)
        is_opened = gradients.open and passes.running == passes.opened != NO_TASK
        if passes.task == NO_TASK:
            raise refused(
                "FSDP reduces gradients outside of backward(), and gradcast has sent the pass; omit "
                "set_manual_backward_finalization()"
            )
        if (is_opened and not sends) or (sends and self._kept_task == passes.task):
            raise refused(
                "one backward pass is all-reduced for some of FSDP's modules and not for others; call "
                "set_requires_all_reduce() on the root module, for all of them"
            )
        states = [gradients.table.of(each.parameter) for each in reduced]
        idle = extension.load().Phase.IDLE
        if is_opened and any(state is not None and state.phase != idle for state in states):
            gradients.end_step_inside()
        for (parameter, earlier), state in zip(reduced, states, strict=True):
            kept = self.kept.pop(parameter, None)
            if kept is not None:
                local_of(parameter.grad).add_(kept)
            if not sends:
                self.kept[parameter] = local_of(parameter.grad)
                parameter.grad = earlier
                continue
            if state is None:  # this rank has no part of it
                parameter.grad = parameter.grad if earlier is None else earlier
                continue
            self.first = state.index if self.first is None else self.first
            if not group.averages:
                local_of(parameter.grad).mul_(gradients.exchange.buffers.world_size)
            self.earlier[state.index] = earlier
            gradients._on_gradient(state.index)
        self.first = None
        if not sends:
            self._kept_task = passes.task
