"""What the demo trains: a real network on real digits, whose layers take as long as an accelerator would.

The cores compute the numbers in a few ms. Then each layer waits, so that a step's compute is the same in every step and
leaves the cores free for the network. Loss, gradients, parameters and traffic are real.
"""

import dataclasses

import torch
from torch import nn

from gradcast.lab.models import DigitsTask
from gradcast.lab.standin import SimulatedDevice, Wait

_PIXELS, _DIGITS = 64, 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """``warmup_steps`` hold gradcast's measuring and its first comparison with DDP, and are not timed."""

    hosts: int = 2
    blocks: int = 8
    width: int = 256
    forward_ms: float = 5.0  # of each layer
    backward_ms: float = 10.0
    batch: int = 32  # images per worker and step
    warmup_steps: int = 24
    rounds: int = 5
    steps: int = 12  # per round and mode
    traced_steps: int = 6

    @property
    def world_size(self) -> int:
        return self.hosts

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


class Digits(DigitsTask):
    """What one rank trains on, and the images that nobody trains on."""

    learning_rate = 0.02

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, rank=0)  # batches differ by the rank of the process group
        images, targets = self._example.load_data()
        count = self._example.TEST_COUNT
        self._held_out = images[-count:], targets[-count:]

    def _make_module(self) -> nn.Module:
        settings = self._settings
        device = SimulatedDevice()

        def paced(layer: nn.Module) -> nn.Module:
            return _Paced(layer, device, settings.forward_ms, settings.backward_ms)

        width = settings.width
        first = nn.Sequential(nn.Flatten(), nn.Linear(_PIXELS, width))
        blocks = [paced(_Residual(width)) for _ in range(settings.blocks)]
        return nn.Sequential(paced(first), *blocks, paced(nn.Linear(width, _DIGITS)))

    def accuracy(self, model: nn.Module) -> float:
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
        return Wait.apply(self._device, self._forward_ns, self._backward_ns, (), y) if self.training else y
