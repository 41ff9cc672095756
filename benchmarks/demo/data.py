"""The digits, and the model of examples/digits.py that is trained on them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from benchmarks.demo.settings import Settings

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"


class Digits:
    """What one rank trains on: every mode and every run gets the same batches and starts from the same parameters."""

    def __init__(self, settings: Settings) -> None:
        self._example = _load_example()
        self._settings = settings
        images, targets = self._example.load_data()
        count = self._example.TEST_COUNT
        self._train = images[:-count], targets[:-count]
        self._held_out = images[-count:], targets[-count:]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self._example.make_model(self._settings.width, self._settings.hidden)

    def batches(self, first: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``count`` batches of this rank, beginning with the ``first`` one of the endless row of them."""
        images, targets = self._train
        chosen: list[torch.Tensor] = []
        epoch = 0
        while len(chosen) < first + count:
            chosen += self._example.batches(len(images), self._settings.batch, epoch)
            epoch += 1
        return [(images[indices], targets[indices]) for indices in chosen[first : first + count]]

    def accuracy(self, model: nn.Module) -> float:
        """On the images that nobody trains on."""
        images, targets = self._held_out
        model.eval()
        with torch.no_grad():
            return (model(images).argmax(1) == targets).float().mean().item()


def _load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
