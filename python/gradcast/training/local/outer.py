"""The outer optimizer, which moves the global copy by the ranks' mean difference, and the merge with local parameters.

Thread safety: pure; any thread.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from gradcast.training.options import LocalSteps

LR, MOMENTUM, MERGE = 0.7, 0.9, 0.5


@dataclasses.dataclass(frozen=True)
class OuterOptimizer:
    """``momentum``: None for local SGD, where the global copy becomes the mean of the ranks' parameters."""

    lr: float
    momentum: float | None

    @classmethod
    def of(cls, local: LocalSteps) -> "OuterOptimizer":
        if local.averages:
            return cls(1.0, None)
        lr = LR if local.lr is None else local.lr
        return cls(lr, MOMENTUM if local.momentum is None else local.momentum)

    def update(self, values: torch.Tensor, momentum: torch.Tensor | None, difference: torch.Tensor) -> None:
        """Moves ``values`` in place, with the bits of ``torch.optim.SGD(nesterov=True)`` whose gradient is
        ``difference`` (DiLoCo, arXiv 2311.08105, algorithm 1). All are 1-d and of one dtype; ``difference`` is
        overwritten. ``momentum``: None if this optimizer has none."""
        if self.momentum is not None:
            momentum.mul_(self.momentum).add_(difference)
            difference.add_(momentum, alpha=self.momentum)
        values.add_(difference, alpha=-self.lr)

    def settings(self) -> dict[str, Any]:
        """The settings by the names of the options."""
        if self.momentum is None:
            return {"outer": "average", "lr": None, "momentum": None}
        return {"outer": "nesterov", "lr": self.lr, "momentum": self.momentum}

    def describe(self) -> str:
        if self.momentum is None:
            return "the mean of the ranks' parameters"
        return f"Nesterov momentum, lr {self.lr:g}, momentum {self.momentum:g}"


def with_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a saved state: an older one has None for the defaults of Nesterov momentum."""
    settings = {name.replace("sync_every", "every").removeprefix("outer_"): each for name, each in settings.items()}
    if settings.get("outer") == "average":
        return settings
    defaults = {"outer": "nesterov", "lr": LR, "momentum": MOMENTUM}
    return defaults | {name: each for name, each in settings.items() if each is not None or name not in defaults}


def merge(local: torch.Tensor, values: torch.Tensor, share: float) -> None:
    """``local`` becomes ``share * local + (1 - share) * values`` (Streaming DiLoCo, arXiv 2501.18512, algorithm 2).
    Both are 1-d; ``values`` may have a wider dtype."""
    if share == 0:
        local.copy_(values)
    elif local.dtype == values.dtype:
        local.mul_(share).add_(values, alpha=1 - share)
    else:
        local.copy_(local.to(values.dtype).mul_(share).add_(values, alpha=1 - share))
