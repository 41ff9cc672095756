"""A timed stand-in for an accelerator: a model with real tensors that waits where an accelerator would compute.

The tensors' sizes, autograd and its order, the optimizer's update, and every byte that is copied and sent are real.
The arithmetic of forward and backward is replaced by waiting, and the gradients are constants. So a machine with few
cores and no accelerator compares schedules while compute goes on beside the network. It shows neither the speed of an
accelerator nor accuracy.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradcast import _core

# Models the launch queue of an accelerator: a host that comes up to this much later than the device is free would have
# queued the work in time.
TOLERANCE_NS = 1_000_000
GRADIENT_SIZE = 1e-3
# Gradients differ from step to step, so that a gradient of an earlier step is a wrong number. They repeat after this
# many steps, and are shifted views of one buffer. 16 elements are a cache line, which keeps copies fast.
GRADIENT_KINDS = 3
_SHIFT_ELEMENTS = 16
_ELEMENT_BYTES = 4


class SimulatedDevice:
    """Knows when the device is free. Deadlines are absolute, so that the next sleep makes up for one that was late."""

    def __init__(
        self, now_ns: Callable[[], int] = time.monotonic_ns, sleep_s: Callable[[float], None] = time.sleep
    ) -> None:
        self.now_ns = now_ns
        self._sleep_s = sleep_s
        self._free_at_ns = 0
        self.factor = 1.0  # multiplies every compute time

    def run(self, duration_ns: int) -> None:
        """Computes on the device for ``duration_ns``; returns at the end."""
        self._occupy(self.now_ns(), round(self.factor * duration_ns))
        while (left_ns := self._free_at_ns - self.now_ns()) > 0:
            self._sleep_s(left_ns / 1e9)

    def ran(self, start_ns: int) -> None:
        """Counts the host's time since ``start_ns`` as work of the device."""
        self._occupy(start_ns, self.now_ns() - start_ns)

    def _occupy(self, start_ns: int, duration_ns: int) -> None:
        if start_ns > self._free_at_ns + TOLERANCE_NS:
            self._free_at_ns = start_ns  # the device was idle
        self._free_at_ns += duration_ns


@dataclass(frozen=True)
class Layer:
    """Tensors that forward needs at the same time, as indices in the order of first use."""

    tensors: range
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True)
class Shape:
    """A model's shape and times: element counts in the order of first use, layers, and the times around them."""

    elements: tuple[int, ...]
    layers: tuple[Layer, ...]
    first_forward_ns: int  # of forward before anything is read
    last_backward_ns: int  # of backward after the last gradient

    @staticmethod
    def of(profile: _core.Profile, *, scale_size: float = 1.0) -> "Shape":
        """Returns the shape of a profile.

        Consecutive tensors with the same first use are a layer, which is ready when the last of them is. Backward runs
        through the layers in reverse. If they are ready in another order in the profile, this is an approximation: a
        layer that would be ready before those behind it becomes ready with them.
        """
        tensors = profile.tensors
        groups = [
            list(group) for _, group in itertools.groupby(range(len(tensors)), key=lambda index: tensors[index].need_ns)
        ]
        spans = [range(group[0], group[-1] + 1) for group in groups]
        needs_ns = [tensors[span[0]].need_ns for span in spans]
        forwards_ns = [end - start for start, end in zip(needs_ns, [*needs_ns[1:], profile.forward_ns], strict=True)]
        backwards_ns = []
        passed_ns = 0.0
        for span in reversed(spans):
            ready_ns = max(passed_ns, *(tensors[index].ready_ns for index in span))
            backwards_ns.append(ready_ns - passed_ns)
            passed_ns = ready_ns
        backwards_ns.reverse()
        return Shape(
            elements=tuple(max(1, round(tensor.bytes * scale_size / _ELEMENT_BYTES)) for tensor in tensors),
            layers=tuple(map(Layer, spans, map(round, forwards_ns), map(round, backwards_ns))),
            first_forward_ns=round(needs_ns[0]),
            last_backward_ns=round(profile.backward_ns - passed_ns),
        )


class Gradients:
    """Constants that backward copies in place of computed gradients: about 1e-3, different by rank and step."""

    def __init__(self, elements: Sequence[int], rank: int) -> None:
        chance = torch.Generator().manual_seed(1 + rank)
        shifts = [_SHIFT_ELEMENTS * kind for kind in range(GRADIENT_KINDS)]
        whole = torch.empty(sum(elements) + shifts[-1]).normal_(std=GRADIENT_SIZE, generator=chance)
        self._kinds = [
            whole[shift : shift + sum(elements)].unsqueeze(0).split(list(elements), dim=1) for shift in shifts
        ]

    def of_step(self, step: int) -> Sequence[torch.Tensor]:
        return self._kinds[step % GRADIENT_KINDS]


class StandIn(nn.Module):
    """A chain of layers that wait. Each forward pass uses the gradients of the next step."""

    def __init__(self, shape: Shape, device: SimulatedDevice, gradients: Gradients) -> None:
        super().__init__()
        self._shape = shape
        self._device = device
        self.gradients = gradients
        self._steps = 0
        # Matrices, like most of a model's parameters: int8 sends vectors unchanged.
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(1, count).mul_(0.02)) for count in shape.elements])
        self._parameters_of = [[self.weights[index] for index in layer.tensors] for layer in shape.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradients = self.gradients.of_step(self._steps)
        self._steps += 1
        x = Wait.apply(self._device, self._shape.first_forward_ns, self._shape.last_backward_ns, (), x)
        for layer, parameters in zip(self._shape.layers, self._parameters_of, strict=True):
            for parameter in parameters:
                parameter.detach()  # a read, which gradcast sees like one of a real layer
            own = gradients[layer.tensors.start : layer.tensors.stop]
            x = Wait.apply(self._device, layer.forward_ns, layer.backward_ns, own, x, *parameters)
        return x


class Wait(torch.autograd.Function):
    """One layer: waits as long as it would compute. ``gradients`` are copied for the parameters behind ``x``."""

    @staticmethod
    def forward(
        ctx: Any,
        device: SimulatedDevice,
        forward_ns: int,
        backward_ns: int,
        gradients: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        *_parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.device, ctx.backward_ns, ctx.gradients = device, backward_ns, gradients
        device.run(forward_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # Copied during the layer's time, as a device would write them. Autograd keeps a copy without other owners.
        copies = [constant.clone() for constant in ctx.gradients]
        ctx.device.run(ctx.backward_ns)
        return None, None, None, None, gradient, *copies


def sgd_on(device: SimulatedDevice, parameters: Any, learning_rate: float) -> torch.optim.SGD:
    """torch's SGD with momentum. The host computes it, and its time counts as the device's."""

    # The device is not an attribute, so that a copy of the optimizer does not copy it.
    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            start_ns = device.now_ns()
            loss = super().step(closure)
            device.ran(start_ns)
            return loss

    return SGD(parameters, lr=learning_rate, momentum=0.9)
