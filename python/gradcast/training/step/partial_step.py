"""Updating parameters in parts: the user's own optimizer, on the parameters whose gradients have arrived.

The step's hyper-parameters are those of the moment when the user called ``step()``; a scheduler that runs afterwards
does not reach it. The optimizer's step is called with its own groups, each reduced to the part: state, foreach and
fused forms are the optimizer's own, so parts give the numbers of a whole step, bit for bit, for every optimizer that
treats its parameters one by one. Scalars that an optimizer keeps in a group (a count of steps) move once per step, not
once per part.
"""

import collections
import contextlib
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _len_torch_function_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from gradcast.errors import Error


class PartialStep:
    """One call of ``optimizer.step()``, carried out in parts. REQUIRES: ``step()`` was called just now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = step_without_hooks(optimizer)
        self._known = len(optimizer.state)  # entries; those of new parameters come behind them
        self._live_groups = list(optimizer.param_groups)
        self._scalars = [_copied(group) for group in self._live_groups]
        self._begun = False
        self._after: dict[int, dict[str, Any]] = {}  # by group: its scalars as the last part left them

    def run(self, parameters: Iterable[torch.Tensor], *, last: bool) -> None:
        """Updates these parameters, each of which has its gradient in ``.grad``. ``last``: none of the step remain."""
        part = {id(parameter) for parameter in parameters}
        reduced = []
        for index, live in enumerate(self._live_groups):
            members = [parameter for parameter in live["params"] if id(parameter) in part]
            # A group of which nothing is updated still has its turn, as in a whole step.
            if members or (last and index not in self._after):
                group = {**_copied(self._scalars[index]), "params": members}
                self._after[index] = group
                reduced.append(group)
        whole, self._optimizer.param_groups = self._optimizer.param_groups, reduced
        try:
            with _plain_context(), _inner_hooks(self._optimizer, before=not self._begun, after=last):
                self._begun = True
                self._step(self._optimizer)
        finally:
            self._optimizer.param_groups = whole
        if last:
            for index, after in self._after.items():
                _carry_over(self._live_groups[index], self._scalars[index], after)
            self._order_state()

    def _order_state(self) -> None:
        """The entries of parameters that are updated for the first time, in the order of a whole step."""
        state = self._optimizer.state
        new = set(itertools.islice(dict.keys(state), self._known, None))
        for parameter in itertools.chain(*(group["params"] for group in self._live_groups)) if new else ():
            if parameter in new:
                dict.__setitem__(state, parameter, dict.pop(state, parameter))


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """The group's scalars as they are now. A tensor (a capturable learning rate) may be changed in place: copied."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _carry_over(live: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    """What the step itself has changed in its group, into the user's group."""
    for key, value in after.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            current = live.get(key)
            # What the step has left as it was, a scheduler may have changed since, or replaced by something else. Asked
            # on the device, so that the host does not wait for it.
            if isinstance(current, torch.Tensor) and current.device == value.device:
                with torch.no_grad():
                    current.copy_(torch.where(value == before[key], current, value))
        elif value is not before.get(key) and live.get(key) is before.get(key):  # the user's own change comes after
            live[key] = value


@contextlib.contextmanager
def _plain_context():
    """As if at the user's own call of step(): a forward pass may have switched any of these."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_disable_current_modes())  # selective checkpointing, torch.device(...)
        while _len_torch_function_stack() > 0:
            stack.enter_context(_pop_mode_temporarily())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextlib.contextmanager
def _inner_hooks(optimizer: Optimizer, *, before: bool, after: bool):
    """Where a class's step calls that of its base class, torch may run the step's hooks around that one, too: around
    all parts together, then, as around a whole step."""
    hidden = [] if before else ["_optimizer_step_pre_hooks"]
    hidden += [] if after else ["_optimizer_step_post_hooks"]
    hooks = {name: vars(optimizer)[name] for name in hidden if vars(optimizer).get(name)}
    vars(optimizer).update({name: collections.OrderedDict() for name in hooks})
    try:
        yield
    finally:
        vars(optimizer).update(hooks)


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's step, without what torch wraps around it to call step hooks: those run once per step."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def run_pre_hooks(optimizer: Optimizer) -> None:
    for hook in [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]:
        hook(optimizer, (optimizer,), {})


def run_without_hooks(optimizer: Optimizer) -> None:
    """A whole step."""
    step_without_hooks(optimizer)(optimizer)


def run_post_hooks(optimizer: Optimizer) -> None:
    for hook in [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
        hook(optimizer, (optimizer,), {})


def require_own_step(optimizer: Optimizer) -> None:
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise Error(
            f"step() of this {type(optimizer).__name__} has been replaced by {replaced!r}, which gradcast would "
            "bypass; call gradcast.attach() before whatever replaces it",
            "invalid_use",
        )


class StepInterception:
    """Puts a function in the place of ``optimizer.step``, between the step's hooks and after its closure; LR schedulers
    made before or after see what they expect.

    REQUIRES: ``require_own_step`` has let the optimizer pass.
    """

    def __init__(self, optimizer: Optimizer, on_step: Callable[[], None]) -> None:
        before = optimizer.__dict__.get("step")
        self._optimizer = optimizer
        self._before = before
        self._active = True
        self._state_hooks: list[Any] = []

        def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if not self._active:
                return type(self_).step(self_, closure) if closure is not None else type(self_).step(self_)
            self_._opt_called = True
            run_pre_hooks(self_)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            on_step()
            run_post_hooks(self_)
            return loss

        # A scheduler asks for this mark; without it, it wraps (or warns about) a step that was replaced.
        step._wrapped_by_lr_sched = True
        self._method = types.MethodType(step, optimizer)
        optimizer.step = self._method

    @property
    def replaced(self) -> bool:
        """Whether somebody has put another function into the place of ours, which need not call it."""
        return self._optimizer.__dict__.get("step") is not self._method

    def run_whole(self) -> None:
        """The optimizer's own step on everything."""
        run_without_hooks(self._optimizer)

    def flush_before_state(self, flush: Callable[[], None]) -> None:
        """The optimizer's state, given away or replaced, is that of a finished step."""
        self._state_hooks = [
            self._optimizer.register_state_dict_pre_hook(lambda _: flush()),
            self._optimizer.register_load_state_dict_pre_hook(lambda _optimizer, _state: flush()),
        ]

    def remove(self) -> None:
        self._active = False
        for hook in self._state_hooks:
            hook.remove()
        if self._optimizer.__dict__.get("step") is self._method:
            if self._before is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.step = self._before
