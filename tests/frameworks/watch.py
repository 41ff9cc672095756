"""What trainings under a framework share, and what each has to tell its test: one line of JSON on each rank."""

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import gradcast
from gradcast.training.step import pending
from training import compare

WARMUP_STEPS = 3
EPOCHS, BATCHES, BATCH = 2, 6, 4


def options(**more: Any) -> gradcast.Options:
    return gradcast.Options(plan=gradcast.Planning(adapt=False, warmup_steps=WARMUP_STEPS), **more)


def small_model() -> nn.Sequential:
    """Its dropout is left on: gradcast must not draw from the random numbers of the training."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def small_data(batches: int) -> TensorDataset:
    """For the small model, on two ranks."""
    numbers = torch.randn(2 * batches * BATCH, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(numbers, numbers[:, :4].argmax(1))


def cases_of(train: Callable[..., nn.Module], kinds: dict[str, dict], ways: dict[str, Any]) -> dict[str, Callable]:
    """Each kind of training, a name with the options of ``train``, in each way of sending its gradients."""
    return {
        f"{kind} {way}": functools.partial(train, attach=attach, **more)
        for kind, more in kinds.items()
        for way, attach in ways.items()
    }


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

    def end(self, handle: gradcast.Handle) -> None:
        """Takes what the handle knows of a training."""
        stats = handle.stats()
        self.notes |= {"mode": handle.mode, "clipping": stats["clipping"]}
        self.notes["waits"] = [line["what"] for line in stats["waits"] or ()]

    def of(self, module: nn.Module) -> nn.Module:
        """From now on this module's."""
        module.register_forward_pre_hook(self._before_forward)
        self._steps_before = self.steps
        return module

    def after_step(self) -> None:
        self.steps += 1
        self._between = True

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        # In the warm-up parameters are pending in forward only so that gradcast sees who reads them.
        warm = self.steps - self._steps_before > WARMUP_STEPS
        if self._between and warm:
            self.deferred += any(pending.is_pending(parameter) for parameter in module.parameters())
        self._between = False


def run(cases: dict[str, Callable[[Watch], nn.Module]]) -> None:
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
