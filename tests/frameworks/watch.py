"""What a training under a framework has to tell its test: one line of JSON on each rank."""

import json
import logging
import os
from collections.abc import Callable

import torch

from gradcast.training import pending
from training import compare

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WARMUP_STEPS = 3


class Watch(logging.Handler):
    """Counts the steps of one training, and those after which parameters were left for the next forward pass; keeps
    what gradcast has warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.steps = self.deferred = 0
        self.warnings: list[str] = []
        self.notes: dict = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def after_step(self, module: torch.nn.Module) -> None:
        """Call it where nothing has read a parameter since ``step()``."""
        self.steps += 1
        self.deferred += any(pending.is_pending(parameter) for parameter in module.parameters())


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
