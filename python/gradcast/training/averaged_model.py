"""An AveragedModel of torch that is kept part by part, with the bits of ``averaged.update_parameters(module)`` after
each step, since torch's own code runs on each part.

Parameters are averaged when their updates have run. Buffers and frozen parameters are averaged, and the step is
counted, where ``step()`` returns: the next forward pass changes buffers.
"""

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from gradcast.errors import refused
from gradcast.training.step.update_callbacks import UpdateCallback


def kept_average(averaged: AveragedModel, module: nn.Module) -> UpdateCallback:
    """The callback that keeps ``averaged``, made of ``module``. Raises Error(invalid_use) if it was not."""
    targets = dict(averaged.module.named_parameters())
    if [(n, p.shape) for n, p in targets.items()] != [(n, p.shape) for n, p in module.named_parameters()]:
        raise refused(
            "the averaged model has other parameters than the attached module; make it of the module without DDP's "
            "wrapper: AveragedModel(module)"
        )
    kept = _KeptAverage(averaged, module, targets)
    owned = {name: (tensor,) for name, tensor in targets.items()}
    return UpdateCallback(kept.average_part, owned, kept.after_step)


class _KeptAverage:
    def __init__(self, averaged: AveragedModel, module: nn.Module, targets: dict[str, nn.Parameter]) -> None:
        self._averaged, self._module, self._targets = averaged, module, targets
        self._averaged_first: set[str] = set()  # averaged before their step was counted, as if step() waits
        self._counted: set[str] = set()  # not averaged yet in the last counted step

    def average_part(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        is_counted = self._counted.issuperset(names)
        self._counted.difference_update(names)
        if not is_counted:
            self._averaged_first.update(names)
        count = self._averaged.n_averaged - int(is_counted)
        self._average(_holder([self._targets[name] for name in names]), _holder(parameters), count)

    @torch.no_grad()
    def after_step(self, trained: Sequence[str]) -> None:
        """``trained``: names of the parameters that ``average_part`` gets in each step."""
        self._counted = set(trained) - self._averaged_first
        self._averaged_first = set()
        frozen = [name for name in self._targets if name not in set(trained)]
        values = dict(self._module.named_parameters())
        targets = _holder([self._targets[name] for name in frozen], self._averaged.module.buffers())
        sources = _holder([values[name] for name in frozen], self._module.buffers())
        # torch can average nothing only in its first step.
        is_any = bool(frozen) or (self._averaged.use_buffers and any(True for _ in self._module.buffers()))
        self._average(targets, sources, self._averaged.n_averaged * int(is_any))
        self._averaged.n_averaged += 1

    def _average(self, targets: nn.Module, values: nn.Module, count: torch.Tensor) -> None:
        """``count``: the number of steps before this one. Changes it."""
        part = copy.copy(self._averaged)
        vars(part).update(_modules={"module": targets}, _buffers={"n_averaged": count})
        part.update_parameters(values)


def _holder(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor] = ()) -> nn.Module:
    """A module that has these tensors."""
    module = nn.Module()
    vars(module).update(
        _parameters={str(number): each for number, each in enumerate(parameters)},
        _buffers={str(number): each for number, each in enumerate(buffers)},
    )
    return module
