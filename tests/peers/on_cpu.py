"""Lets PyTorch's own DDP tests run without a GPU: what they put on a GPU stays on the CPU, and no GPU is asked for."""

import contextlib
import functools
import os
import types
from typing import Any

# Tests for four ranks are left out by decorators where fewer are promised when the module is imported.
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "lo"}

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed, common_utils

_CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "empty", "eye", "full", "full_like", "ones_like", "rand", "randint", "randn"),
    *("tensor", "zeros", "zeros_like"),
)


def on_cpu(device: Any) -> Any:
    """The CPU for what means a GPU; everything else as it is."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    if is_number or (isinstance(device, str | torch.device) and str(device).startswith("cuda")):
        return _CPU
    return device


def _passes(*_: Any, **__: Any) -> Any:
    return lambda function: function


class _Nothing:
    """In the place of streams and events."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Torch(types.ModuleType):
    """``torch`` as the tests see it. Only for them: gradcast and torch itself keep the real one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _with_device_on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        return function(*args, **options)

    return wrapper


def _first_on_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        return function(self, *map(on_cpu, args[:1]), *args[1:], **options)

    return wrapper


def _lift_conditions() -> None:
    common_distributed.skip_if_lt_x_gpu = _passes
    common_distributed.nccl_skip_if_lt_x_gpu = _passes
    common_distributed.require_n_gpus_for_nccl_backend = _passes
    common_distributed.skip_if_no_gpu = lambda function: function
    keep = common_utils.skip_but_pass_in_sandcastle_if
    lifted = lambda condition, reason: keep(condition and "torchvision" in reason, reason)  # noqa: E731
    common_utils.skip_but_pass_in_sandcastle_if = common_distributed.skip_but_pass_in_sandcastle_if = lifted
    common_utils.skip_but_pass_in_sandcastle = common_distributed.skip_but_pass_in_sandcastle = _passes
    common_distributed.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}


def _stay_on_cpu() -> None:
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.to = _first_on_cpu(torch.Tensor.to)
    torch.nn.Module.to = _first_on_cpu(torch.nn.Module.to)
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.device = torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream = torch.cuda.default_stream = _Nothing
    mesh = torch.distributed.device_mesh
    original_mesh = mesh.init_device_mesh
    mesh.init_device_mesh = lambda device, *args, **options: original_mesh(str(on_cpu(device)), *args, **options)
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def __init__(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args, **options) -> None:  # noqa: N807
        original(self, module, None, None, *args, **options)

    DistributedDataParallel.__init__ = __init__


def _ones(*sizes: Any, **options: Any) -> Any:
    """An image of a million pixels takes a CPU minutes."""
    return torch.ones(*(50 if len(sizes) == 4 and size == 1000 else size for size in sizes), **options)


def _load() -> types.ModuleType:
    """PyTorch's module of tests, made ready for the CPU."""
    torch.set_num_threads(1)
    _lift_conditions()
    _stay_on_cpu()
    from torch.testing._internal.distributed import distributed_test

    seen = _Torch("torch")
    for name in _FACTORIES:
        setattr(seen, name, _with_device_on_cpu(getattr(torch, name)))
    seen.ones = _with_device_on_cpu(_ones)
    seen.device = lambda *args, **options: on_cpu(torch.device(*args, **options))
    distributed_test.torch = seen
    return distributed_test


distributed_test = _load()
