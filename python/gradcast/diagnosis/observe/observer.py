"""Times the ordinary steps of a training with hooks, and records the last ones for replay.

A step runs from the end of one ``optimizer.step()`` to the end of the next. With several optimizers, the one that holds
most of the model counts. Stages of a step:

* loading: waiting for DataLoaders.
* forward: of the DistributedDataParallel module.
* backward: from the first gradient that enters the model to the end of DDP's reduction, including waits for the
  network.
* update: of all optimizers.
* loop: everything else, such as the loss, clipping, logging, launch overhead and other models.

All times are taken on the host. On a GPU the host runs ahead of the device, so there only the step and the loading are
meaningful. The other stages then come from the probes, which synchronize with the device, and the loop's own work stays
in the unattributed time. (The GPU path is untested.)
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradcast.diagnosis.observe.loader import LoaderTimer
from gradcast.diagnosis.observe.recorded_step import RecordedPass, RecordedStep, begin_pass, outputs_of
from gradcast.training.observe import EarlyUses

RECORDED_STEPS_MAX = 2
_CHECKED_GRADIENTS = 8  # a sample: code that writes into gradients writes into all of them
_MS = 1e6


@dataclasses.dataclass
class _OpenStep:
    """``versions``: of gradients at the end of backward. ``passes_before_ns``: of the passes before an update; with a
    closure, others run inside, and their time is subtracted."""

    start_ns: int
    recorded: RecordedStep = dataclasses.field(default_factory=list)
    used: set[int] = dataclasses.field(default_factory=set)  # parameters with a gradient, if DDP searches for others
    ns: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("forward", "backward", "update", "exposed"), 0)
    )
    forward_start_ns: int = 0
    backward_start_ns: int = 0
    computed_ns: int = 0
    backwards: int = 0
    versions: list[tuple[int, int] | None] | None = None
    in_update: bool = False
    update_start_ns: int = 0
    passes_before_ns: int = 0
    output_handles: list[Any] = dataclasses.field(default_factory=list)


class Observer:
    """Observes one module until ``close()``. Calls ``step_ended()`` at the end of each step that used the module.

    Records steps for a replay from step number ``keep_from`` on.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizers: Sequence[Optimizer],
        loader: LoaderTimer,
        step_ended: Callable[[], None],
        *,
        keep_from: int = 0,
    ) -> None:
        self.recorded_steps: collections.deque[RecordedStep] = collections.deque(maxlen=RECORDED_STEPS_MAX)
        self.steps: list[dict[str, float]] = []  # ms by stage; "step"; "exposed": the wait at the end of backward
        self.optimizer_steps = 0  # includes steps that did not use the module
        self.all_used = True  # every parameter had a local gradient in every step
        # The loop wrote into gradients between backward and step(), as clipping and a GradScaler do.
        self.gradients_used = False
        self._ddp, self._loader, self._step_ended, self._keep_from = ddp, loader, step_ended, keep_from
        self._trainable: list[torch.nn.Parameter] = [each for each in ddp.module.parameters() if each.requires_grad]
        self.early_uses = EarlyUses(self._trainable)  # in the recorded steps
        self._open: RecordedPass | None = None
        self._step = _OpenStep(0)
        self._handles = [
            ddp.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            ddp.register_forward_hook(self._after_forward),
            ddp.module.register_forward_pre_hook(lambda *_: self.early_uses.stop()),
        ]
        main = max(optimizers, key=lambda each: sum(p.numel() for g in each.param_groups for p in g["params"]))
        for optimizer in optimizers:
            after = optimizer.register_step_post_hook(functools.partial(self._after_update, optimizer is main))
            before = optimizer.register_step_pre_hook(functools.partial(self._before_update, after.id))
            self._handles += [before, after]
        # Only if DDP itself searches for parameters without gradients, because it costs a call per gradient.
        if ddp.find_unused_parameters or ddp.static_graph:
            for each in self._trainable:
                self._handles.append(each.register_hook(functools.partial(self._mark_used, id(each))))
        self._scaler_step = torch.amp.GradScaler.step
        torch.amp.GradScaler.step = self._watching_scaler(self._scaler_step)
        self._begin_step()

    def close(self) -> None:
        self.early_uses.stop()
        torch.amp.GradScaler.step = self._scaler_step
        for handle in [*self._handles, *self._step.output_handles]:
            handle.remove()
        self._handles, self._step.output_handles = [], []
        # The owner's: with it the observer would be a cycle, which keeps the training's DDP until garbage is collected.
        self._step_ended = lambda: None

    def _watching_scaler(self, scaler_step: Callable[..., Any]) -> Callable[..., Any]:
        """Watches a GradScaler's calls, since it writes into gradients without changing their versions."""

        @functools.wraps(scaler_step)
        def step(scaler: Any, *arguments: Any, **keywords: Any) -> Any:
            self.gradients_used |= scaler.is_enabled()
            return scaler_step(scaler, *arguments, **keywords)

        return step

    @property
    def _records(self) -> bool:
        return len(self.steps) >= self._keep_from

    def _begin_step(self) -> None:
        for handle in self._step.output_handles:
            handle.remove()
        self._loader.waited_ns = 0
        self._step = _OpenStep(time.perf_counter_ns())

    def _before_forward(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._open = None
        self.early_uses.stop()
        if torch.is_grad_enabled():
            keep = self._records
            self._open = begin_pass(self._ddp, arguments, keywords, keep=keep)
        self._step.forward_start_ns = time.perf_counter_ns()

    def _after_forward(self, _: Any, _inputs: Any, output: Any) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        self._step.ns["forward"] += time.perf_counter_ns() - self._step.forward_start_ns
        self._step.recorded.append(opened)
        for index, tensor in enumerate(outputs_of(output)):
            if tensor is not None:
                hook = functools.partial(self._on_output_gradient, opened, index)
                self._step.output_handles.append(tensor.register_hook(hook))

    def _on_output_gradient(self, into: RecordedPass, index: int, gradient: torch.Tensor) -> None:
        if self._step.backward_start_ns == 0:
            self._step.backward_start_ns = time.perf_counter_ns()
            self._step.backwards += 1
            # This runs before DDP's callback, which waits for the network: autograd calls back in queue order.
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_computed)
        into.gradients[index] = gradient.detach() if into.kept else None
        into.backward = self._step.backwards

    def _on_backward_computed(self) -> None:
        self._step.computed_ns = time.perf_counter_ns()
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)  # runs after DDP's callback

    def _on_backward_end(self) -> None:
        now_ns = time.perf_counter_ns()
        self._step.ns["backward"] += now_ns - self._step.backward_start_ns
        self._step.ns["exposed"] += now_ns - self._step.computed_ns
        self._step.backward_start_ns = 0
        self._step.versions = self._gradient_versions()
        if self._records and not self._step.in_update:
            self.early_uses.watch_gradients()

    def _mark_used(self, parameter: int, _: torch.Tensor) -> None:
        self._step.used.add(parameter)

    def _gradient_versions(self) -> list[tuple[int, int] | None]:
        gradients = [each.grad for each in self._trainable[:_CHECKED_GRADIENTS]]
        return [None if each is None else (id(each), each._version) for each in gradients]

    def _before_update(self, after: int, optimizer: Optimizer, *_: Any) -> None:
        # Moved behind the step's other hooks, so that removing it while torch calls them is safe.
        if after in optimizer._optimizer_step_post_hooks:
            cast(Any, optimizer._optimizer_step_post_hooks).move_to_end(after)
        self.early_uses.stop()
        self._step.in_update = True
        if self._step.versions is not None:
            self.gradients_used |= self._gradient_versions() != self._step.versions
            self._step.versions = None
        self._step.update_start_ns = time.perf_counter_ns()
        self._step.passes_before_ns = self._step.ns["forward"] + self._step.ns["backward"]

    def _after_update(self, is_main: bool, *_: Any) -> None:
        end_ns = time.perf_counter_ns()
        self._step.in_update = False
        inside_ns = self._step.ns["forward"] + self._step.ns["backward"] - self._step.passes_before_ns
        self._step.ns["update"] += end_ns - self._step.update_start_ns - inside_ns
        if not is_main:
            return
        self.optimizer_steps += 1
        if any(each.gradients for each in self._step.recorded):
            self._end_step(end_ns - self._step.start_ns)
            self._step_ended()
            if self._records and self._handles:  # not closed in between
                self.early_uses.watch_parameters()
        else:
            self._begin_step()

    def _end_step(self, step_ns: int) -> None:
        exposed_ns = self._step.ns.pop("exposed")
        stages = {"loader": self._loader.waited_ns} | self._step.ns
        on_host = self._ddp.device.type == "cpu"
        stages["loop"] = max(0, step_ns - sum(stages.values())) if on_host else 0
        found = stages | {"step": step_ns, "exposed": exposed_ns}
        self.steps.append({name: value / _MS for name, value in found.items()})
        self.all_used &= len(self._step.used) == len(self._trainable)
        self.recorded_steps.append(self._step.recorded)
        self._begin_step()
