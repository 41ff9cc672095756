"""The ordinary steps of a training, watched from outside: stamps, and tapes of the last ones.

A step runs from the end of one ``optimizer.step()`` to the end of the next; with several optimizers, of the one that
holds most of the model. Its stages: loading (waiting for DataLoaders), forward, backward (from the first gradient that
comes back into the model to DDP's end, waiting for the network included), update (of all optimizers); what is left is
the loop: the loss, clipping, logging, launching, other models.

Stamps are the host's. On a GPU the host runs ahead of the device, so there only the step and the loading mean what they
say; the other stages come from the probes, which wait for the device, and the loop's own work is not known: it stays in
what is left. (That path has not run on a GPU.)
"""

import collections
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.observe.loader import LoaderWatch
from gradcast.diagnosis.observe.recorded_step import Pass, Tape, begin_pass, outputs_of

TAPES = 2
_LOOKED_AT = 8  # gradients
_MS = 1e6


class Observer:
    """Of one module, from the construction until ``close()``. ``step_ended()`` is called at the end of each step that
    used the module; from the step ``keep_from`` on what it did is kept."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        loader: LoaderWatch,
        step_ended: Callable[[], None],
        *,
        keep_from: int = 0,
    ) -> None:
        self.tapes: collections.deque[Tape] = collections.deque(maxlen=TAPES)
        self.steps: list[dict[str, float]] = []  # ms by stage, and "step"; "exposed": what backward waited at its end
        self.optimizer_steps = 0  # also those without the module
        self.all_used = True  # every parameter had a gradient of this rank in every step
        # Between backward and step() the loop has written into gradients, as clipping and a GradScaler do.
        self.gradients_used = False
        self._ddp, self._loader, self._step_ended, self._keep_from = ddp, loader, step_ended, keep_from
        self._trainable = [each for each in ddp.module.parameters() if each.requires_grad]
        self._open: Pass | None = None
        self._output_handles: list[Any] = []
        self._handles = [
            ddp.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            ddp.register_forward_hook(self._after_forward),
        ]
        main = max(optimizers, key=lambda each: sum(p.numel() for g in each.param_groups for p in g["params"]))
        for each in optimizers:
            after = each.register_step_post_hook(functools.partial(self._after_update, each is main))
            before = each.register_step_pre_hook(functools.partial(self._before_update, after.id))
            self._handles += [before, after]
        # Only where DDP itself looks for parameters without gradients: it costs a call per gradient.
        self._used: set[int] = set()
        if ddp.find_unused_parameters or ddp.static_graph:
            for each in self._trainable:
                self._handles.append(each.register_hook(functools.partial(self._note_use, id(each))))
        self._scaler_step = torch.amp.GradScaler.step
        torch.amp.GradScaler.step = self._noting(self._scaler_step)
        self._begin_step()

    def close(self) -> None:
        torch.amp.GradScaler.step = self._scaler_step
        for handle in [*self._handles, *self._output_handles]:
            handle.remove()
        self._handles, self._output_handles = [], []

    def _noting(self, scaler_step: Callable[..., Any]) -> Callable[..., Any]:
        """A scaler's writing into gradients is not counted in their versions."""

        @functools.wraps(scaler_step)
        def step(scaler: Any, *arguments: Any, **keywords: Any) -> Any:
            self.gradients_used |= scaler.is_enabled()
            return scaler_step(scaler, *arguments, **keywords)

        return step

    def _begin_step(self) -> None:
        for handle in self._output_handles:
            handle.remove()
        self._output_handles = []
        self._tape = Tape()
        self._used.clear()
        self._start_ns = time.perf_counter_ns()
        self._loader.waited_ns = 0
        self._forward_ns = self._backward_ns = self._exposed_ns = self._update_ns = 0
        self._backward_start_ns = self._computed_ns = self._backwards = 0
        self._forward_start_ns = 0
        self._written: list[tuple[int, int] | None] | None = None  # as backward has left them

    def _before_forward(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._open = None
        if torch.is_grad_enabled():
            keep = len(self.steps) >= self._keep_from
            self._open = begin_pass(self._ddp, arguments, keywords, keep=keep)
        self._forward_start_ns = time.perf_counter_ns()

    def _after_forward(self, _: Any, _inputs: Any, output: Any) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        self._forward_ns += time.perf_counter_ns() - self._forward_start_ns
        self._tape.passes.append(opened)
        for place, tensor in enumerate(outputs_of(output)):
            if tensor is not None:
                hook = functools.partial(self._gradient_back, opened, place)
                self._output_handles.append(tensor.register_hook(hook))

    def _gradient_back(self, into: Pass, place: int, gradient: torch.Tensor) -> None:
        if self._backward_start_ns == 0:
            self._backward_start_ns = time.perf_counter_ns()
            self._backwards += 1
            # Before DDP's own, which waits for the network: callbacks run in the order in which they are queued.
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_computed)
        into.gradients[place] = gradient.detach() if into.kept else None
        into.backward = self._backwards

    def _backward_computed(self) -> None:
        self._computed_ns = time.perf_counter_ns()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)  # behind DDP's

    def _backward_ended(self) -> None:
        now_ns = time.perf_counter_ns()
        self._backward_ns += now_ns - self._backward_start_ns
        self._exposed_ns += now_ns - self._computed_ns
        self._backward_start_ns = 0
        self._written = self._gradient_versions()

    def _note_use(self, parameter: int, _: torch.Tensor) -> None:
        self._used.add(parameter)

    def _gradient_versions(self) -> list[tuple[int, int] | None]:
        """Of some parameters: whoever writes into gradients writes into all."""
        gradients = [each.grad for each in self._trainable[:_LOOKED_AT]]
        return [None if each is None else (id(each), each._version) for each in gradients]

    def _before_update(self, after: int, optimizer: Optimizer, *_: Any) -> None:
        # The last of this step's hooks, so that it may be taken away while torch calls them.
        if after in optimizer._optimizer_step_post_hooks:
            optimizer._optimizer_step_post_hooks.move_to_end(after)
        if self._written is not None:
            self.gradients_used |= self._gradient_versions() != self._written
            self._written = None
        # With a closure the passes run inside of the step.
        self._update_start_ns = time.perf_counter_ns()
        self._passes_before_ns = self._forward_ns + self._backward_ns

    def _after_update(self, is_main: bool, *_: Any) -> None:
        end_ns = time.perf_counter_ns()
        inside_ns = self._forward_ns + self._backward_ns - self._passes_before_ns
        self._update_ns += end_ns - self._update_start_ns - inside_ns
        if not is_main:
            return
        self.optimizer_steps += 1
        if self._tape.used:
            self._end_step(end_ns - self._start_ns)
            self._step_ended()
        else:
            self._begin_step()

    def _end_step(self, step_ns: int) -> None:
        stages = {
            "loader": self._loader.waited_ns,
            "forward": self._forward_ns,
            "backward": self._backward_ns,
            "update": self._update_ns,
        }
        on_host = self._ddp.device.type == "cpu"
        stages["loop"] = max(0, step_ns - sum(stages.values())) if on_host else 0
        found = stages | {"step": step_ns, "exposed": self._exposed_ns}
        self.steps.append({name: value / _MS for name, value in found.items()})
        self.all_used &= len(self._used) == len(self._trainable)
        self.tapes.append(self._tape)
        self._begin_step()
