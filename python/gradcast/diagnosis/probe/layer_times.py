"""Times each layer's forward and backward pass with hooks, to tell in which layer a rank is slow."""

from collections.abc import Callable
from typing import Any

import torch

from gradcast.diagnosis.probe.prober import Prober


def layers_ms(prober: Prober, model: Any, module: torch.nn.Module, steps: int) -> dict[str, float]:
    """Returns the computing time of each module that has parameters of its own: ms per step, by module name.

    Forward lasts from a module's call to its return. Backward lasts from the previous gradient, which is that of the
    module behind, to the last gradient of the module. Collective, like all steps of ``prober``.
    """
    owners = {
        f"{name}.{parameter}" if name else parameter: name or type(module).__name__
        for name, each in module.named_modules()
        for parameter, _ in each.named_parameters(recurse=False)
    }
    found = dict.fromkeys(owners.values(), 0.0)
    with _LayerHooks(module, owners, found, prober.now_ns):
        prober.steps(model, steps)
    return {name: ms / steps for name, ms in found.items()}


class _LayerHooks:
    """Hooks on modules and parameters that add their times to ``found``."""

    def __init__(
        self, module: torch.nn.Module, owners: dict[str, str], found: dict[str, float], now_ns: Callable[[], int]
    ) -> None:
        self._found, self._now_ns = found, now_ns
        self._last_ns = 0
        self._handles: list[Any] = []
        names = set(owners.values())
        for name, each in module.named_modules():
            if (name or type(module).__name__) in names and not any(True for _ in each.children()):
                self._time_forward(name or type(module).__name__, each)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook = self._ready_hook(owners[name])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _time_forward(self, name: str, module: torch.nn.Module) -> None:
        started: list[int] = []

        def begin(*_: Any) -> None:
            started.append(self._now_ns())

        def end(*_: Any) -> None:
            self._last_ns = self._now_ns()
            if started:  # empty if the begin was in a pass that failed
                self._found[name] += (self._last_ns - started.pop()) / 1e6

        self._handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def _ready_hook(self, name: str) -> Callable[[Any], None]:
        def ready(_: Any) -> None:
            now_ns = self._now_ns()
            self._found[name] += (now_ns - self._last_ns) / 1e6
            self._last_ns = now_ns

        return ready
