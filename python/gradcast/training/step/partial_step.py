"""Partial steps: the user's own optimizer updates the parameters whose gradients have arrived.

The hyper-parameters of a step, in groups or attributes, are those at the call of ``step()`` (step_settings.py). The
class's step is called with the optimizer's groups reduced to the part. Another thread than the one that trains calls it
with a stand-in for the optimizer, so that training does not see them. State, foreach and fused forms are the
optimizer's own, so parts give the numbers of a whole step, bit for bit, for every optimizer that updates parameters one
by one. Counters in a group or an attribute (steps) advance once per step, not once per part.
"""

import bisect
import collections
import contextlib
import copy
import functools
import itertools
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _len_torch_function_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

from gradcast.errors import refused
from gradcast.training.compat import extension
from gradcast.training.step.step_settings import CONTAINERS, StepSettings

_NOTHING = object()
_PARTS_KEPT = 64  # of those that recur from step to step
_REASON = "gradcast runs this step itself; call optimizer.step() outside of functions with fullgraph=True"


class Places:
    """Places of an optimizer's parameters. ``index``: their positions, by id, in all groups one after the other."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._in_order = [parameter for group in groups for parameter in group["params"]]
        self._ends = list(itertools.accumulate(len(group["params"]) for group in groups))  # of each group
        self.index = {id(parameter): position for position, parameter in enumerate(self._in_order)}
        self._found: dict[tuple[int, ...], dict[int, list[torch.Tensor]]] = {}  # by ids, what by_group has returned

    def are_those_of(self, groups: list[dict[str, Any]]) -> bool:
        """Returns whether the groups have not changed since."""
        return extension.load().contain([group["params"] for group in groups], self._in_order)

    def by_group(self, parameters: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """These parameters in the optimizer's order, by group. Omits those of other optimizers."""
        ids = tuple(map(id, parameters))
        if ids not in self._found:
            if len(self._found) >= _PARTS_KEPT:
                self._found.clear()
            self._found[ids] = self._by_group(ids)
        return self._found[ids]

    def _by_group(self, ids: Iterable[int]) -> dict[int, list[torch.Tensor]]:
        positions = sorted(place for place in map(self.index.get, ids) if place is not None)
        found: dict[int, list[torch.Tensor]] = {}
        start = 0
        for group, end in enumerate(self._ends):
            stop = bisect.bisect_left(positions, end, start)
            if stop > start:
                found[group] = [self._in_order[position] for position in positions[start:stop]]
            start = stop
        return found

    def without(self, ids: Container[int]) -> list[torch.Tensor]:
        """The parameters whose id is not among these."""
        return [parameter for parameter in self._in_order if id(parameter) not in ids]


class PartialStep:
    """One call of ``optimizer.step()``, carried out in parts. REQUIRES: ``step()`` was called just now."""

    def __init__(
        self, optimizer: Optimizer, settings: StepSettings | None = None, places: Places | None = None
    ) -> None:
        """``settings``, ``places``: of the optimizer as it is, if known."""
        self._optimizer = optimizer
        self._step = step_without_hooks(optimizer)
        settings = settings or StepSettings(optimizer)
        self._attributes, self._scalars = settings.attributes, settings.groups
        self._changed: dict[str, Any] = {}  # attributes that the step itself has set
        self._state = optimizer.state  # the program may replace it before the last part
        self._known_count = dict.__len__(self._state)  # entries; those of new parameters are added behind them
        self._live_groups = list(optimizer.param_groups)
        self._places = places or Places(self._live_groups)
        self.is_compared: bool | None = None  # by whoever runs the parts (part_comparison.py); None: not decided
        self._after: dict[int, dict[str, Any]] = {}  # by group: its scalars after the last part

    def run(self, parameters: Iterable[torch.Tensor], *, last: bool, elsewhere: bool = False) -> None:
        """Updates these parameters from their ``.grad``. ``last``: this is the last part of the step. ``elsewhere``: on
        another thread than the one that trains."""
        members = self._places.by_group(parameters)
        # A group of which no parameter is updated has its turn all the same, as in a whole step.
        turn = [n for n in range(len(self._live_groups)) if n in members or (last and n not in self._after)]
        settings = [self._attributes, *(self._scalars[index] for index in turn)]
        for each in settings:
            each.before_part()
        for index in turn:
            self._after[index] = self._scalars[index].for_part() | {"params": list(members.get(index, ()))}
        values = {**self._attributes.values, "state": self._state}
        values |= _no_hooks(values)
        self._changed |= self._run(values, [self._after[index] for index in turn], elsewhere)
        for each in settings:
            each.after_part()
        if last:
            for index, after in self._after.items():
                _carry_over(self._live_groups[index], self._scalars[index].values, after)
            live, before = vars(self._optimizer), self._attributes.values
            for key, value in self._changed.items():
                if live.get(key, _NOTHING) is before.get(key, _NOTHING):  # else the program has changed it since
                    live[key] = value
            self._order_state()

    @property
    def name(self) -> str:
        """The optimizer's class, for messages."""
        return type(self._optimizer).__name__

    def updated_alone(self, parameter: torch.Tensor) -> torch.Tensor:
        """The value that this step would give the parameter, with its ``.grad``, in a part of its own. Afterwards all
        is as before; random numbers are drawn as if it had not run. REQUIRES: nobody reads the parameter meanwhile."""
        value, gradient, own = parameter.detach().clone(), parameter.grad, dict(vars(parameter))
        (index,) = self._places.by_group([parameter])
        attributes = self._attributes.copies()
        # The parameter itself, since an optimizer may look up what it has for it by its identity; but copies of all
        # else that a step may change, wherever the optimizer keeps it.
        kept = {id(each): each for group in self._live_groups for each in group["params"]}
        settings, entry = self._scalars[index].copies(), dict.get(self._state, parameter)
        settings, entry, changing, changing_own = copy.deepcopy(
            (settings, entry, _changing(attributes), _changing(own)), kept
        )
        state: collections.defaultdict[Any, dict] = collections.defaultdict(dict)
        if entry is not None:
            state[parameter] = entry
        values = {**attributes, **changing, "state": state}
        values |= _no_hooks(values)
        devices = [parameter.device] if parameter.is_cuda else []
        try:
            vars(parameter).update(changing_own)
            parameter.grad = gradient.clone()
            with torch.random.fork_rng(devices):
                self._run(values, [{**settings, "params": [parameter]}], elsewhere=True)
            return parameter.detach().clone()
        finally:
            vars(parameter).clear()
            vars(parameter).update(own)
            parameter.grad = gradient
            parameter.detach().copy_(value)

    def _run(self, attributes: dict[str, Any], groups: list[dict[str, Any]], elsewhere: bool) -> dict[str, Any]:
        """Runs the class's step with these attributes and groups. Returns the attributes that it has set."""
        target = self._optimizer
        if elsewhere:
            target = object.__new__(type(self._optimizer))
            attributes = {key: _rebound(value, self._optimizer, target) for key, value in attributes.items()}
        whole, own = self._optimizer.param_groups, vars(target)
        live = dict(own)
        own.update(attributes)
        given = dict(own)
        target.param_groups = groups
        try:
            self._step(target)
        finally:
            changed = {key: value for key, value in own.items() if given.get(key, _NOTHING) is not value}
            changed.pop("param_groups", None)
            target.param_groups = whole  # also of a stand-in: a property may set those of an optimizer that both share
            for key in own.keys() - live.keys():
                del own[key]
            own.update(live)
        return changed

    def _order_state(self) -> None:
        """Puts the entries of parameters that were updated for the first time into the order of a whole step."""
        state = self._state
        if dict.__len__(state) == self._known_count:
            return
        new = set(itertools.islice(dict.keys(state), self._known_count, None))
        for parameter in itertools.chain(*(group["params"] for group in self._live_groups)):
            if parameter in new:
                dict.__setitem__(state, parameter, dict.pop(state, parameter))


def _changing(values: dict[str, Any]) -> dict[str, Any]:
    """The values that may be changed in place."""
    kinds = (torch.Tensor, *CONTAINERS)
    return {key: value for key, value in values.items() if isinstance(value, kinds) and not key.endswith("_hooks")}


def _rebound(value: Any, optimizer: Optimizer, target: Optimizer) -> Any:
    """The value; for a method bound to the optimizer, that of its stand-in."""
    is_bound = isinstance(value, types.MethodType) and value.__self__ is optimizer
    return types.MethodType(value.__func__, target) if is_bound else value


def _carry_over(live: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    """Copies the step's own changes in its group into the user's group."""
    for key, value in after.items():
        if key == "params":
            continue
        if isinstance(value, torch.Tensor):
            current = live.get(key)
            # A value that the step has not changed may have been changed or replaced by a scheduler since. Compared on
            # the device, so that the host does not wait.
            if isinstance(current, torch.Tensor) and current.device == value.device:
                with torch.no_grad():
                    current.copy_(torch.where(value == before[key], current, value))
        elif value is not before.get(key) and live.get(key) is before.get(key):  # not if the user has changed it since
            live[key] = value


def rounds_otherwise(optimizer: Optimizer) -> bool:
    """Returns whether parts of the next step of torch's SGD, with parameters of 16 bits, may round otherwise than the
    whole: with foreach it takes another kernel for all momenta as long as one parameter has none."""
    for group in optimizer.param_groups:
        params, foreach = group["params"], group["foreach"]
        is_foreach = any(each.is_cuda for each in params) and not group["fused"] if foreach is None else foreach
        if group["momentum"] == 0 or not is_foreach:
            continue
        updated = [each for each in params if each.requires_grad or each.grad is not None]
        have = {dict.get(dict.get(optimizer.state, each, {}), "momentum_buffer") is not None for each in updated}
        if len(have) == 2:
            return True
    return False


def default_context() -> contextlib.AbstractContextManager[None]:
    """Undoes the modes that a forward pass may have entered, so that an update runs as in the user's call of step()."""
    return contextlib.nullcontext() if _is_default_context() else _without_modes()


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())  # torch.func.grad, jvp, vmap, ...
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_disable_current_modes())  # selective checkpointing, torch.device(...)
        while _len_torch_function_stack() > 0:
            stack.enter_context(_pop_mode_temporarily())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _is_default_context() -> bool:
    """Returns whether default_context() would change nothing, which is usual; asking costs a tenth of changing."""
    return (
        torch.is_grad_enabled()
        and torch._C._is_fwd_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and _len_torch_dispatch_stack() == 0
        and _len_torch_dispatch_stack_pre_dispatch() == 0
        and _len_torch_function_stack() == 0
        and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    )


def _no_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes that hide step hooks, which a base class's step would run around a part."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return {name: collections.OrderedDict() for name in names if attributes.get(name)}


def step_without_hooks(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's step without torch's wrapper that calls step hooks; gradcast runs those once per step."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def runs_hooks_inside(optimizer: Optimizer) -> bool:
    """Returns whether the class's step may run step hooks itself, in the middle of the whole step, of which they may
    read or change anything: torch runs them around a base class's step, too, once an optimizer of that class exists."""
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if not (own_hooks or _global_optimizer_pre_hooks or _global_optimizer_post_hooks):
        return False
    own = step_without_hooks(optimizer)
    steps: list[Any] = [vars(each).get("step") for each in type(optimizer).__mro__]
    return any(getattr(each, "hooked", False) and each.__wrapped__ is not own for each in steps)


def require_own_step(optimizer: Optimizer) -> None:
    """Raises Error(invalid_use) if ``optimizer.step`` was replaced by anything but an LR scheduler."""
    replaced = optimizer.__dict__.get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise refused(
            f"step() of this {type(optimizer).__name__} has been replaced by {replaced!r}, which gradcast would "
            "bypass; call gradcast.attach() before step() is replaced"
        )


class StepInterception:
    """Replaces ``optimizer.step``: step hooks and the closure run as before, and ``on_step`` in place of the update.
    LR schedulers made before or after work as usual. ``is_paused``: ``step()`` is the optimizer's own meanwhile; the
    function stays, since the program may have kept it.

    REQUIRES: ``require_own_step`` accepts the optimizer.
    """

    def __init__(self, optimizer: Optimizer, on_step: Callable[[], None]) -> None:
        before = optimizer.__dict__.get("step")
        self._optimizer = optimizer
        self._before = before
        self._active, self.is_paused = True, False
        self._state_hooks: list[Any] = []

        def step(self_: Any, closure: Callable[[], Any] | None = None) -> Any:
            if not self._active or self.is_paused:
                own = self._before or types.MethodType(type(self_).step, self_)
                return own(closure) if closure is not None else own()
            self_._opt_called = True
            for hook in [*_global_optimizer_pre_hooks.values(), *self_._optimizer_step_pre_hooks.values()]:
                hook(self_, (self_,), {})
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._active and not self.is_paused:
                on_step()
            else:  # in the closure gradcast has left, has begun anew with a changed model, or DDP has taken over
                step_without_hooks(self_)(self_)
            for hook in [*self_._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
                hook(self_, (self_,), {})
            return loss

        # An LR scheduler checks this attribute. Without it, it would wrap (or warn about) the replaced step.
        vars(step)["_wrapped_by_lr_sched"] = True
        # A compiled function may call step().
        self._method = types.MethodType(torch.compiler.disable(step, reason=_REASON), optimizer)
        optimizer.step = self._method

    @property
    def replaced(self) -> bool:
        """True if other code has replaced our function by one that need not call it."""
        return self._optimizer.__dict__.get("step") is not self._method

    def run_whole(self) -> None:
        step_without_hooks(self._optimizer)(self._optimizer)

    def flush_before_state(self, flush: Callable[[], None]) -> None:
        """Calls ``flush`` before state_dict() and load_state_dict(), so that the state is that of a completed step."""
        self._state_hooks = [
            self._optimizer.register_state_dict_pre_hook(lambda _: flush()),
            self._optimizer.register_load_state_dict_pre_hook(lambda _optimizer, _state: flush()),
        ]

    def remove(self) -> None:
        """Gives the optimizer its own ``step`` again. Idempotent."""
        if not self._active:
            return
        self._active = False
        for hook in self._state_hooks:
            hook.remove()
        if self._optimizer.__dict__.get("step") is self._method:
            if self._before is None:
                del self._optimizer.__dict__["step"]
            else:
                self._optimizer.step = self._before
        del self._optimizer, self._method  # the function refers to this object, which must not keep the optimizer


def intercepted(optimizers: Sequence[Optimizer], on_step: Callable[[int], None]) -> list[StepInterception]:
    """Makes ``step()`` of optimizer k call ``on_step(k)`` from now on."""
    return [StepInterception(each, functools.partial(on_step, number)) for number, each in enumerate(optimizers)]


def is_called_by_scaler() -> bool:
    """Returns whether a GradScaler has called the ``step()`` of an optimizer to which this call belongs."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
        frame = frame.f_back
    return False
