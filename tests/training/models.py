"""The models that the tests train: small, and each with something that is easily got wrong.

``TASKS[name]`` makes a module, a rank's batch of a step, and the loss. Everything is made from seeds, so that any
process can make the same again.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from training.needs import torch

nn = torch.nn
functional = nn.functional


def at_address(parameter):
    """A tensor over this one's memory that nobody knows of, as a C++ extension has that keeps an address."""
    memory = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
    return torch.frombuffer(memory, dtype=torch.float32).view(parameter.shape)


class ReadsMemory(torch.autograd.Function):
    """x W^T with the values of W taken from its address: no operation on W itself is seen."""

    @staticmethod
    def forward(context, value, weight, memory):
        context.save_for_backward(value, memory)
        return value @ memory.T

    @staticmethod
    def backward(context, gradient):
        value, memory = context.saved_tensors
        return gradient @ memory, gradient.T @ value, None


class ConvNet(nn.Module):
    """Batch norm: buffers that follow the data, of which rank 0's are everybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
        )
        self.head = nn.Linear(12 * 4 * 4, 10)

    def forward(self, images):
        return self.head(self.features(images).flatten(1))


class Layer(nn.Module):
    """One transformer layer; MultiheadAttention reads the weight of its out_proj without calling it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.shrink(functional.gelu(self.grow(self.norm2(x))))


class Transformer(nn.Module):
    """The embedding is the output layer too: one parameter, read first and last, whose gradient comes in two parts."""

    VOCABULARY = 40

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.layers(self.embedding(tokens) + self.position)))


class MixedTypes(nn.Module):
    """Parameters of two data types, so buffers of two element sizes."""

    def __init__(self, other: torch.dtype) -> None:
        super().__init__()
        self.other = other
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 20).to(other)
        self.third = nn.Linear(20, 20)
        self.fourth = nn.Linear(20, 10).to(other)

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x)).to(self.other))).float()
        return self.fourth(torch.tanh(self.third(x)).to(self.other)).float()


class OneLarge(nn.Module):
    """One tensor of 100 MB beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 5120)
        self.large = nn.Linear(5120, 5120, bias=False)
        self.last = nn.Linear(5120, 10)

    def forward(self, x):
        return self.last(torch.relu(self.large(torch.relu(self.first(x)))))


class Plain(nn.Sequential):
    """What a test takes that does not care: five layers, ten tensors."""

    def __init__(self) -> None:
        layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())]
        super().__init__(*layers, nn.Linear(12, 10))


class Recurrent(nn.Module):
    """LSTM hands its weights to a function, as a list made when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Odd(nn.Module):
    """Parameters of unusual forms: a number, one that lies in memory by columns, one with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.columns = nn.Parameter(torch.randn(20, 12).t())
        self.gaps = nn.Parameter(torch.randn(20, 20)[:, ::2])

    def forward(self, x):
        x = torch.tanh(self.first(x)) * self.scale
        return torch.tanh(x @ self.columns) @ self.gaps


class Branches(nn.Module):
    """``use`` names the branches that a pass goes through; the trunk is always used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 12)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 10)

    def forward(self, x, use=("left", "right")):
        x = torch.tanh(self.trunk(x))
        for name in use:
            x = x + torch.tanh(getattr(self, name)(x))
        return self.head(x)


@dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], torch.Tensor]  # of so many rows
    classes: int = 10
    rows: int = 4

    def module(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(10_000 * rank + step)
        inputs = self.inputs(generator, self.rows)
        shape = inputs.shape if inputs.dtype == torch.int64 else inputs.shape[:1]
        return inputs, torch.randint(self.classes, shape, generator=generator)

    def loss(self, module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], *arguments) -> torch.Tensor:
        """``arguments``: of the module's forward behind the inputs."""
        inputs, targets = batch
        return functional.cross_entropy(module(inputs, *arguments).flatten(0, -2), targets.flatten())


def _vectors(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randn(rows, 12, generator=generator)


def _images(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randn(rows, 1, 12, 12, generator=generator)


def _tokens(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randint(Transformer.VOCABULARY, (rows, 8), generator=generator)


def _sequences(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randn(rows, 5, 12, generator=generator)


TASKS = {
    "convnet": Task(ConvNet, _images),
    "convnet_last": Task(lambda: ConvNet().to(memory_format=torch.channels_last), _images),
    "transformer": Task(Transformer, _tokens, classes=Transformer.VOCABULARY),
    "mixed64": Task(lambda: MixedTypes(torch.float64), _vectors),
    "mixed16": Task(lambda: MixedTypes(torch.bfloat16), _vectors),
    "large": Task(OneLarge, _vectors, rows=1),
    "plain": Task(Plain, _vectors),
    "recurrent": Task(Recurrent, _sequences),
    "odd": Task(Odd, _vectors),
}


def task_of(model: str | Callable[[], nn.Module]) -> Task:
    """The task of this name, or that of the plain model with a module that the test makes."""
    return TASKS[model] if isinstance(model, str) else Task(model, _vectors)
