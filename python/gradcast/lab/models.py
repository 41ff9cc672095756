"""Models for the lab's workers: those of the examples, and a timed stand-in for an accelerator."""

import importlib.util
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradcast
from gradcast.lab.errors import LabError
from gradcast.lab.settings import REAL_MODELS, Settings
from gradcast.lab.standin import Gradients, Shape, SimulatedDevice, StandIn, sgd_on

Batch = tuple[torch.Tensor, torch.Tensor]

_EXAMPLES = Path(gradcast.__file__).resolve().parents[2] / "examples"
_SEED = 0


class Task(ABC):
    """The task of one rank. All variants get the same batches and start with the same parameters."""

    learning_rate = 0.05

    def module(self) -> nn.Module:
        torch.manual_seed(_SEED)
        return self._make_module()

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        # SGD, because Adam amplifies rounding differences.
        return torch.optim.SGD(module.parameters(), lr=self.learning_rate, momentum=0.9)

    @abstractmethod
    def _make_module(self) -> nn.Module: ...

    @abstractmethod
    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def batches(self, first: int, count: int) -> list[Batch]:
        """Returns ``count`` batches of this rank, from number ``first`` on."""


class StandInTask(Task):
    def __init__(self, settings: Settings, rank: int) -> None:
        assert settings.profile is not None
        self._shape = Shape.of(gradcast.Profile.from_json(settings.profile), scale_size=settings.scale_size)
        self.device = SimulatedDevice()  # one for all variants, which take turns
        self._gradients = Gradients(self._shape.elements, rank)

    def _make_module(self) -> nn.Module:
        return StandIn(self._shape, self.device, self._gradients)

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return sgd_on(self.device, module.parameters(), self.learning_rate)

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def batches(self, first: int, count: int) -> list[Batch]:
        # The input requires a gradient so that autograd also runs the first layer's backward, which takes time.
        return [(torch.zeros(1, requires_grad=True), torch.zeros(1))] * count


class DigitsTask(Task):
    def __init__(self, settings: Settings, rank: int) -> None:
        self._example = load_example("digits")
        self._settings = settings
        images, targets = self._example.load_data()
        held_out = self._example.TEST_COUNT
        self._images, self._targets = images[:-held_out], targets[:-held_out]
        most = len(self._images) // settings.world_size
        if settings.batch > most:
            raise LabError(f"digits has {len(self._images)} images to train on: at most --batch {most} on each rank")

    def _make_module(self) -> nn.Module:
        width = self._settings.width
        return self._example.make_model() if width is None else self._example.make_model(width)

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, targets)

    def batches(self, first: int, count: int) -> list[Batch]:
        chosen: list[torch.Tensor] = []
        epoch = 0
        while len(chosen) < first + count:
            chosen += self._example.batches(len(self._images), self._settings.batch, epoch)
            epoch += 1
        return [(self._images[indices], self._targets[indices]) for indices in chosen[first : first + count]]


class CharGptTask(Task):
    def __init__(self, settings: Settings, rank: int) -> None:
        self._example = load_example("char_gpt")
        self._settings = settings
        self._rank = rank
        self._text = self._example.load_text()

    def _make_module(self) -> nn.Module:
        width = self._settings.width
        return self._example.GPT() if width is None else self._example.GPT(width)

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), targets.flatten())

    def batches(self, first: int, count: int) -> list[Batch]:
        return [self._batch(number) for number in range(first, first + count)]

    def _batch(self, number: int) -> Batch:
        context = self._example.CONTEXT
        chance = torch.Generator().manual_seed(1_000_003 * self._rank + number)
        starts = torch.randint(len(self._text) - context, (self._settings.batch, 1), generator=chance)
        texts = self._text[starts + torch.arange(context + 1)]
        return texts[:, :-1], texts[:, 1:]


_REAL = dict(zip(REAL_MODELS, (DigitsTask, CharGptTask), strict=True))


def make_task(settings: Settings, rank: int) -> Task:
    return StandInTask(settings, rank) if settings.stand_in else _REAL[settings.model](settings, rank)


def load_example(name: str) -> ModuleType:
    """Returns a program of examples/ as a module. Raises LabError if gradcast was installed without its source tree."""
    path = _EXAMPLES / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise LabError(f"the model {name} needs examples/{name}.py; run the lab in gradcast's source tree")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
