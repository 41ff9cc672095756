"""What the demo trains: a real network on real digits, whose layers take as long as an accelerator would.

The cores compute the numbers in a few ms. Then each layer waits, so that a step's compute is the same in every step and
leaves the cores free for the network. Loss, gradients, parameters and traffic are real.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gradcast.lab.standin import SimulatedDevice

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
_PIXELS, _DIGITS = 64, 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """``warmup_steps`` hold gradcast's measuring and its first comparison with DDP, and are not timed."""

    workers: int = 2
    blocks: int = 8
    width: int = 256
    forward_ms: float = 5.0  # of each layer
    backward_ms: float = 10.0
    batch: int = 32  # images per worker and step
    learning_rate: float = 0.02
    warmup_steps: int = 24
    rounds: int = 5
    steps: int = 12  # per round and mode
    traced_steps: int = 6

    @property
    def layers(self) -> int:
        return self.blocks + 2

    @property
    def compute_ms(self) -> float:
        return self.layers * (self.forward_ms + self.backward_ms)

    @property
    def gradient_bytes(self) -> int:
        hidden = self.blocks * (self.width + 1) * self.width
        return 4 * ((_PIXELS + 1) * self.width + hidden + (self.width + 1) * _DIGITS)

    @property
    def rate_bits_per_s(self) -> float:
        """The link on which a step's gradients travel as long as the step computes: there a schedule matters most."""
        # With two workers each sends and receives every byte once.
        return round(8 * self.gradient_bytes / (self.compute_ms / 1e3), -6)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Settings":
        return Settings(**json.loads(text))


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
        settings = self._settings
        device = SimulatedDevice()

        def paced(layer: nn.Module) -> nn.Module:
            return _Paced(layer, device, settings.forward_ms, settings.backward_ms)

        torch.manual_seed(0)
        width = settings.width
        first = nn.Sequential(nn.Flatten(), nn.Linear(_PIXELS, width))
        blocks = [paced(_Residual(width)) for _ in range(settings.blocks)]
        return nn.Sequential(paced(first), *blocks, paced(nn.Linear(width, _DIGITS)))

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


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class _Paced(nn.Module):
    """A layer on a simulated accelerator: it waits after its forward, and before its gradients exist in backward."""

    def __init__(self, layer: nn.Module, device: SimulatedDevice, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.layer = layer
        self._device = device
        self._forward_ns, self._backward_ns = round(1e6 * forward_ms), round(1e6 * backward_ms)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return _Wait.apply(y, self._device, self._forward_ns, self._backward_ns) if self.training else y


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: SimulatedDevice, forward_ns: int, backward_ns: int) -> torch.Tensor:
        ctx.device, ctx.backward_ns = device, backward_ns
        device.run(forward_ns)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.device.run(ctx.backward_ns)
        return gradient, None, None, None


def _load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
