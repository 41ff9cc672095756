"""A timed stand-in for an accelerator: a model with a real one's tensors that waits where an accelerator would compute.

What is real in it: the sizes of the tensors, autograd and its order, the optimizer's update, every byte that is copied
and sent. What is not: the arithmetic of forward and backward, in whose place a clock is waited for, and the gradients,
which are constants prepared beforehand. So a machine with few cores and no accelerator shows how schedules behave on a
network while compute goes on beside it; it says nothing about how fast an accelerator is, and nothing about accuracy.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradcast import _core

# Stands for the launch queue of an accelerator: a host that comes this much later than the device is free has, on a
# real one, queued the work in time.
TOLERANCE_NS = 1_000_000
_GRADIENT_SIZE = 1e-3
# Gradients change from step to step, so that one of an earlier step is a wrong number: in this many steps, by shifts
# within one buffer. 16 elements are a cache line, which keeps copies fast.
GRADIENT_KINDS = 3
_SHIFT_ELEMENTS = 16
_ELEMENT_BYTES = 4


class DeviceClock:
    """When the device is free. Deadlines are absolute, so that the lateness of one sleep is made up by the next."""

    def __init__(
        self, now_ns: Callable[[], int] = time.monotonic_ns, sleep_s: Callable[[float], None] = time.sleep
    ) -> None:
        self._now_ns = now_ns
        self._sleep_s = sleep_s
        self._free_at_ns = 0
        self.factor = 1.0  # how many times as long as told it computes

    def run(self, duration_ns: int) -> None:
        """The device computes for so long; returns when it has."""
        self._occupy(self._now_ns(), round(self.factor * duration_ns))
        while (left_ns := self._free_at_ns - self._now_ns()) > 0:
            self._sleep_s(left_ns / 1e9)

    def ran(self, start_ns: int) -> None:
        """What the host has computed since then is the device's work: it is busy with it as long as the host was."""
        self._occupy(start_ns, self._now_ns() - start_ns)

    def now_ns(self) -> int:
        return self._now_ns()

    def _occupy(self, start_ns: int, duration_ns: int) -> None:
        if start_ns > self._free_at_ns + TOLERANCE_NS:
            self._free_at_ns = start_ns  # it has stood still
        self._free_at_ns += duration_ns


@dataclass(frozen=True)
class Layer:
    """Tensors that forward needs at the same time, by their places in need order."""

    tensors: range
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True)
class Shape:
    """What a profile says about a model: element counts in need order, layers, and the time before the first one."""

    elements: tuple[int, ...]
    layers: tuple[Layer, ...]
    first_forward_ns: int  # of forward before anything is read
    last_backward_ns: int  # of backward after the last gradient

    @staticmethod
    def of(profile: _core.Profile, *, scale_size: float = 1.0) -> "Shape":
        """Consecutive tensors with the same need are a layer; it is ready when the last of its tensors is.

        Backward runs through the layers in reverse. Where a profile has them ready in another order, this is an
        approximation: a layer that would be ready before those behind it comes out with them.
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
    """What backward copies out, in place of computed gradients: of the order of 1e-3, others on each rank and step."""

    def __init__(self, elements: Sequence[int], rank: int) -> None:
        chance = torch.Generator().manual_seed(1 + rank)
        shifts = [_SHIFT_ELEMENTS * kind for kind in range(GRADIENT_KINDS)]
        whole = torch.empty(sum(elements) + shifts[-1]).normal_(std=_GRADIENT_SIZE, generator=chance)
        self._kinds = [whole[shift : shift + sum(elements)].split(list(elements)) for shift in shifts]

    def of_step(self, step: int) -> Sequence[torch.Tensor]:
        return self._kinds[step % GRADIENT_KINDS]


class StandIn(nn.Module):
    """A chain of layers that wait. Each forward pass uses the gradients of the next step."""

    def __init__(self, shape: Shape, clock: DeviceClock, gradients: Gradients) -> None:
        super().__init__()
        self._shape = shape
        self._clock = clock
        self._gradients = gradients
        self._steps = 0
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(count).mul_(0.02)) for count in shape.elements])
        self._parameters_of = [[self.weights[index] for index in layer.tensors] for layer in shape.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gradients = self._gradients.of_step(self._steps)
        self._steps += 1
        x = _Wait.apply(self._clock, self._shape.first_forward_ns, self._shape.last_backward_ns, (), x)
        for layer, parameters in zip(self._shape.layers, self._parameters_of, strict=True):
            for parameter in parameters:
                parameter.detach()  # the read: whoever schedules sees it as that of a real layer
            own = gradients[layer.tensors.start : layer.tensors.stop]
            x = _Wait.apply(self._clock, layer.forward_ns, layer.backward_ns, own, x, *parameters)
        return x


class _Wait(torch.autograd.Function):
    """One layer: waits as long as it would compute. In backward, its gradients come out when the time is over."""

    @staticmethod
    def forward(
        ctx: Any,
        clock: DeviceClock,
        forward_ns: int,
        backward_ns: int,
        gradients: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        *_parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.clock, ctx.backward_ns, ctx.gradients = clock, backward_ns, gradients
        clock.run(forward_ns)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # Copied within the time of the layer, as a device writes them. Nobody else holds a copy, so autograd keeps it.
        copies = [constant.clone() for constant in ctx.gradients]
        ctx.clock.run(ctx.backward_ns)
        return None, None, None, None, gradient, *copies


def sgd_on(clock: DeviceClock, parameters: Any, learning_rate: float) -> torch.optim.SGD:
    """torch's SGD with momentum, computed by the host; a device would compute it too, so its clock is told."""

    # The clock is no attribute: whoever copies the optimizer would copy the time.
    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            start_ns = clock.now_ns()
            loss = super().step(closure)
            clock.ran(start_ns)
            return loss

    return SGD(parameters, lr=learning_rate, momentum=0.9)
