"""Waits for parameters that forward reads unseen (measure/unseen_reads.py): where the module that owns them begins its
forward, or before the whole forward pass begins."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from gradcast.training.compat.module_hooks import UncopiedHook, WeakHook
from gradcast.training.measure.unseen_reads import Owners, UnseenRead
from gradcast.training.step import parameter_state
from gradcast.training.step.optimizer_state import Lock
from gradcast.training.step.optimizer_steps import OptimizerSteps
from gradcast.training.step.parameter_state import ParameterState


class UnseenWaits:
    """The waits of one session."""

    def __init__(self, module: nn.Module, steps: OptimizerSteps, lock: Lock, warn_once: Callable[..., None]) -> None:
        self._module, self._states, self._steps, self._lock = module, steps.gradients.states, steps, lock
        self._warn_once = warn_once
        self._reads: Mapping[int, UnseenRead] = {}
        self._hooks: list[Any] = []
        self._waited_first: dict[str, list[ParameterState]] = {}  # before forward begins, by the reason

    def before_forward(self, reads: Mapping[int, UnseenRead], training: bool) -> None:
        """Updates parameters that forward reads unseen and not where a known module begins. The warm-up does not show
        the reads of passes that do not train, so these wait for all."""
        if reads != self._reads:
            self._follow(reads)
            training = False  # hooks of a module that has already been called do not see this pass
        first = [state for states in self._waited_first.values() for state in states]
        if any(state.is_update_due for state in first):
            for why, states in self._waited_first.items():
                self._warn_once(
                    "forward reads %s in a way that gradcast does not see, as C++ extensions do, and waits for them "
                    f"before it begins: {why}",
                    parameter_state.names(states),
                )
        self.complete(first if training else [self._states[index] for index in reads])

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._waited_first.clear()
        self._reads = {}

    def _follow(self, reads: Mapping[int, UnseenRead]) -> None:
        self.release()
        self._reads = dict(reads)
        owners = Owners(self._module)
        by_part: dict[nn.Module, list[ParameterState]] = {}
        for index, read in reads.items():
            state = self._states[index]
            owner, part = owners.place(state.parameter)
            if read.module and part is not None and owner == read:
                by_part.setdefault(part, []).append(state)
            else:
                why = read.why or "another module owns them than when this was measured"
                self._waited_first.setdefault(why, []).append(state)
        for part, states in by_part.items():
            hook = UncopiedHook(functools.partial(WeakHook(self.complete), states))
            self._hooks.append(part.register_forward_pre_hook(hook, prepend=True))

    def complete(self, states: Sequence[ParameterState], *_: Any) -> None:
        with self._lock():  # another thread may be updating some, which are pending no more
            due = [state for state in states if state.is_update_due]
            if due:
                self._steps.stream.on_parameter_read()
                self._steps.complete_updates(due)
