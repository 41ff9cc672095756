"""The ordinary steps of a training, watched from outside: stamps, and tapes of the last ones.

A step runs from the end of one ``optimizer.step()`` to the end of the next; with several optimizers, of the one that
holds most of the model. Its stages, in order: loading (waiting for DataLoaders), forward, backward (from the first
gradient that comes back into the model to ``optimizer.step()``, waiting for the network included), update; what is left
is the loop: the loss, logging, launching, other models.

Stamps are the host's. On a GPU the host runs ahead of the device, so there only the step and the loading mean what they
say; the other stages come from the probes, which wait for the device. (That path has not run on a GPU.)
"""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.loader import LoaderWatch
from gradcast.diagnosis.tape import Pass, Tape, begin_pass, outputs_of

STAGES = ("loader", "forward", "backward", "update", "loop")
_TAPES = 2
_MS = 1e6


class Observer:
    """Of one module, from the construction until ``close()``. ``step_ended()`` is called at the end of each step."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        loader: LoaderWatch,
        step_ended: Callable[[], None],
    ) -> None:
        self.tapes: collections.deque[Tape] = collections.deque(maxlen=_TAPES)
        self.steps: list[dict[str, float]] = []  # ms by stage, and "step"; "exposed": what backward waited at its end
        self._ddp, self._loader, self._step_ended = ddp, loader, step_ended
        self._open: Pass | None = None
        self._handles = [
            ddp.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            ddp.register_forward_hook(self._after_forward),
        ]
        main = max(optimizers, key=lambda each: sum(p.numel() for g in each.param_groups for p in g["params"]))
        self._handles += [each.register_step_pre_hook(self._before_update) for each in optimizers]
        self._handles.append(main.register_step_post_hook(self._after_update))
        self._begin_step()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def resume(self) -> None:
        """After steps that are not the user's: the one that began before them tells nothing."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._tape = Tape()
        self._start_ns = time.perf_counter_ns()
        self._loader.waited_ns = 0
        self._forward_start_ns = self._forward_ns = self._backward_ns = self._exposed_ns = self._update_ns = 0
        self._backward_start_ns = self._computed_ns = self._update_start_ns = 0

    def _before_forward(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._end_backward(time.perf_counter_ns())  # of the micro-batch before
        self._forward_start_ns = time.perf_counter_ns()
        if torch.is_grad_enabled() and self._ddp.training:
            self._open = begin_pass(self._ddp, arguments, keywords)

    def _after_forward(self, _: Any, _inputs: Any, output: Any) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        self._forward_ns += time.perf_counter_ns() - self._forward_start_ns
        self._tape.passes.append(opened)
        for place, leaf in enumerate(outputs_of(output)):
            if leaf is not None:
                leaf.register_hook(lambda gradient, place=place: self._gradient_back(opened, place, gradient))

    def _gradient_back(self, into: Pass, place: int, gradient: torch.Tensor) -> None:
        into.gradients[place] = gradient
        if self._backward_start_ns == 0:
            self._backward_start_ns = time.perf_counter_ns()
            # Before DDP's own, which waits for the network: callbacks run in the order in which they are queued.
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_computed)

    def _backward_computed(self) -> None:
        self._computed_ns = time.perf_counter_ns()

    def _end_backward(self, now_ns: int) -> None:
        if self._backward_start_ns:
            self._backward_ns += now_ns - self._backward_start_ns
            self._exposed_ns += now_ns - self._computed_ns if self._computed_ns else 0
            self._backward_start_ns = self._computed_ns = 0

    def _before_update(self, *_: Any) -> None:
        now_ns = time.perf_counter_ns()
        self._end_backward(now_ns)
        self._update_start_ns = self._update_start_ns or now_ns

    def _after_update(self, *_: Any) -> None:
        end_ns = time.perf_counter_ns()
        self._update_ns = end_ns - self._update_start_ns
        step_ns = end_ns - self._start_ns
        if not self._tape.used:
            return  # of a step without this model
        stages = {
            "loader": self._loader.waited_ns,
            "forward": self._forward_ns,
            "backward": self._backward_ns,
            "update": self._update_ns,
        }
        stages["loop"] = step_ns - sum(stages.values())
        self.steps.append({name: value / _MS for name, value in (stages | {"step": step_ns}).items()})
        self.steps[-1]["exposed"] = self._exposed_ns / _MS
        self.tapes.append(self._tape)
        self._begin_step()
        self._step_ended()
