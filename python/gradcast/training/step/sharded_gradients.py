"""Gradients of a module that FSDP shards: what its reduce-scatters have made is sent to the other replicas.

FSDP hands over one group after the other. ``.grad`` keeps FSDP's memory; the mean over the replicas is copied there
when it has arrived, or added to the ``.grad`` of before the pass, as native HSDP adds each pass's mean. A pass without
all-reduce (set_requires_all_reduce(False), no_sync()) leaves its gradients with the replica until the next one with it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gradcast.errors import refused
from gradcast.training.compat.module_hooks import WeakHook
from gradcast.training.compat.sharding import Reduced, ShardGroup, local_of
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.backward_passes import NO_TASK, current
from gradcast.training.step.gradient_hooks import GradientHooks
from gradcast.training.step.parameter_state import ParameterState


class ShardedGradients(GradientHooks):
    """``shards``: FSDP's groups."""

    def __init__(self, shards: Sequence[ShardGroup], *parts: Any) -> None:
        """``parts``: the arguments of GradientHooks."""
        super().__init__(*parts)
        self._shards = shards
        self._earlier: dict[int, torch.Tensor | None] = {}  # by parameter: its .grad of before the pass that runs
        self._kept: dict[int, torch.Tensor] = {}  # by parameter: the sum of passes without all-reduce
        self._kept_task = NO_TASK  # the last of these passes
        self.exchange.buffers.keep_apart(range(len(self.states)))

    def install(self, listener: Any) -> list[Any]:
        handles = super().install(listener)
        for group in self._shards:
            group.take_over(WeakHook(self._before_read), WeakHook(self._on_reduced))
        return [*handles, *self._shards]

    def before_forward(self) -> None:
        super().before_forward()
        if self._hooked_by_program:
            raise refused(
                f"{parameter_state.names(self._hooked_by_program)} has a hook of the program's "
                "(register_post_accumulate_grad_hook), which FSDP would call before the replicas' mean exists; remove "
                "the hook, or train without gradcast"
            )

    def _before_read(self, group: ShardGroup) -> None:
        pending.resolve(group.parameters)

    def _await_end(self, task: int) -> None:
        # FSDP ends its pass in such a callback, too, and hands over groups there. This one runs after that.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        self.passes.running = task
        end = self._end_of(task)
        queue(lambda: queue(end))

    def _on_reduced(self, group: ShardGroup, reduced: Sequence[Reduced]) -> None:
        """Sends the gradients of this pass, or keeps them on this replica."""
        sends = group.all_reduces and self.listener.reduces(self.passes.forward)
        is_opened = self.open and self.passes.running == self.passes.opened != NO_TASK
        if (is_opened and not sends) or (sends and self._kept_task == current()):
            raise refused(
                "one backward pass is all-reduced for some of FSDP's modules and not for others; call "
                "set_requires_all_reduce() on the root module, for all of them"
            )
        with torch.no_grad():
            for parameter, earlier in reduced:
                self._reduced(group, parameter, earlier, sends=sends)
        if not sends:
            self._kept_task = current()

    def _reduced(
        self, group: ShardGroup, parameter: torch.nn.Parameter, earlier: torch.Tensor | None, *, sends: bool
    ) -> None:
        state, made = self.table.of(parameter), local_of(parameter.grad)
        if state is None:  # this rank has no part of it
            parameter.grad = parameter.grad if earlier is None else earlier
            return
        kept = self._kept.pop(state.index, None)
        if kept is not None:
            made.add_(kept)
        if not sends:
            self._kept[state.index] = made
            self.used_unsynchronized.add(state.index)
            parameter.grad = earlier
            return
        if not group.averages:
            made.mul_(self.exchange.buffers.world_size)
        self._earlier[state.index] = earlier
        self._on_gradient(state.index)

    def _substitute(self, state: ParameterState) -> None:
        self._earlier[state.index] = state.parameter.grad
        state.parameter.grad = torch.zeros_like(state.parameter, requires_grad=False)
        kept = self._kept.pop(state.index, None)
        if kept is not None:
            local_of(state.parameter.grad).add_(kept)

    def _place(self, state: ParameterState) -> None:
        super()._place(state)
        earlier = self._earlier.pop(state.index, None)
        if earlier is not None:
            pending.clear([state.parameter.grad])
            state.parameter.grad = state.visible_grad = state.update_grad = earlier
            pending.mark([earlier], self.listener)
            self.arrived.adds.add(state.index)
