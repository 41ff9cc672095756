"""What a training under a framework has to tell its test: one line of JSON on each rank."""

import json
import logging
from collections.abc import Callable
from typing import Any

import torch

from gradcast.training.step import pending
from training import compare

WARMUP_STEPS = 3


class Watch(logging.Handler):
    """Counts the steps of one training, and those whose updates were left to the next forward pass: nothing of the
    framework has read the parameters in between. Keeps what gradcast has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.steps = self.deferred = 0
        self.warnings: list[str] = []
        self.notes: dict = {}
        self._between = False  # step() and forward
        self._steps_before = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def of(self, module: torch.nn.Module) -> torch.nn.Module:
        """From now on this module's."""
        module.register_forward_pre_hook(self._before_forward)
        self._steps_before = self.steps
        return module

    def after_step(self) -> None:
        self.steps += 1
        self._between = True

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        # In the warm-up parameters are pending in forward only so that gradcast sees who reads them.
        warm = self.steps - self._steps_before > WARMUP_STEPS
        if self._between and warm:
            self.deferred += any(pending.is_pending(parameter) for parameter in module.parameters())
        self._between = False


def run(cases: dict[str, Callable[[Watch], torch.nn.Module]]) -> None:
    """Each case trains from the same seed and returns its module."""
    torch.set_num_threads(1)
    for name, train in cases.items():
        watch = Watch()
        logging.getLogger("gradcast").addHandler(watch)
        torch.manual_seed(0)
        module = train(watch)
        logging.getLogger("gradcast").removeHandler(watch)
        told = {"steps": watch.steps, "deferred": watch.deferred, "warnings": watch.warnings, **watch.notes}
        print(json.dumps({"case": name, "digest": compare.digest(module), **told}), flush=True)
