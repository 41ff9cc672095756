"""Times each layer's forward and backward pass with hooks, to find the layer in which a rank is slow."""

import functools
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
    last_ns = 0

    def begin(started: list[int], *_: Any) -> None:
        started.append(prober.now_ns())

    def end(name: str, started: list[int], *_: Any) -> None:
        nonlocal last_ns
        last_ns = prober.now_ns()
        if started:  # empty if the begin was in a pass that failed
            found[name] += (last_ns - started.pop()) / 1e6

    def ready(name: str, _: Any) -> None:
        nonlocal last_ns
        now_ns = prober.now_ns()
        found[name] += (now_ns - last_ns) / 1e6
        last_ns = now_ns

    handles = []
    for path, each in module.named_modules():
        name = path or type(module).__name__
        if name in found and not any(True for _ in each.children()):
            started: list[int] = []
            handles.append(each.register_forward_pre_hook(functools.partial(begin, started)))
            handles.append(each.register_forward_hook(functools.partial(end, name, started)))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(functools.partial(ready, owners[name])))
    try:
        prober.steps(model, steps)
    finally:
        for handle in handles:
            handle.remove()
    return {name: ms / steps for name, ms in found.items()}
