"""Makes the bundled profiles whose times are estimates: ``python -m benchmarks.make_profiles FOLDER``.

A model is run on torch's meta device, which computes shapes and nothing else. Each operation is counted as work: its
FLOPs where torch.utils.flop_counter knows them, a share by the bytes that it writes otherwise. A parameter is needed
when the work before its first use is done, and ready when backward has undone everything after that: the times are
this work, with forward as 100 ms and backward as 200 ms. A parameter that is used twice, as tied embeddings, is one
tensor, needed first and ready last.

Needs transformers, and torchvision, which nothing else here does (0.26.0 belongs to torch 2.11.0).
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import gradcast
from gradcast.comparison.powersgd import with_shapes

_FORWARD_NS, _BACKWARD_NS = 100_000_000, 200_000_000
# What an accelerator computes while it moves a byte, about: 15 TFLOP/s and 900 GB/s are a V100's.
_FLOPS_PER_BYTE = 16
_IMAGES, _TEXTS = 32, 16


class Work(TorchDispatchMode):
    """Counts the work of what runs in it, and notes after how much each parameter is used first."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.total = 0.0
        self.before: dict[str, float] = {}
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._names:
                self.before.setdefault(self._names[id(value)], self.total)
        result = function(*args, **kwargs)
        if function._overloadpacket in flop_registry:
            self.total += flop_registry[function._overloadpacket](*args, **kwargs, out_val=result)
        elif not function.is_view:
            written = sum(value.nbytes for value in tree_leaves(result) if isinstance(value, torch.Tensor))
            self.total += _FLOPS_PER_BYTE * written
        return result


def profile_of(name: str, model: nn.Module, *inputs: torch.Tensor) -> gradcast.Profile:
    parameters = dict(model.named_parameters())
    work = Work(parameters)
    with torch.no_grad(), work:
        model.train()(*inputs)
    if unused := parameters.keys() - work.before.keys():
        raise ValueError(f"{name} does not use {sorted(unused)}")
    tensors = [
        gradcast.Tensor(
            name=tensor,
            bytes=parameters[tensor].nbytes,
            need_ns=round(_FORWARD_NS * before / work.total),
            ready_ns=round(_BACKWARD_NS * (1 - before / work.total)),
        )
        for tensor, before in work.before.items()
    ]
    profile = gradcast.Profile(name=name, forward_ns=_FORWARD_NS, backward_ns=_BACKWARD_NS, tensors=tensors)
    return with_shapes(profile, {each: parameter.shape for each, parameter in parameters.items()})


def _vision(name: str, side: int) -> tuple[nn.Module, torch.Tensor]:
    import torchvision

    options = {"init_weights": False} if name == "inception_v3" else {}
    return getattr(torchvision.models, name)(**options), torch.empty(_IMAGES, 3, side, side)


def _text(model: str, length: int) -> tuple[nn.Module, torch.Tensor]:
    import transformers

    made = getattr(transformers, model)
    config = made.config_class(attn_implementation="eager")
    return made(config), torch.zeros(_TEXTS, length, dtype=torch.long)


_MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet18": lambda: _vision("resnet18", 224),
    "resnet152": lambda: _vision("resnet152", 224),
    "inception_v3": lambda: _vision("inception_v3", 299),
    "vit_b_16": lambda: _vision("vit_b_16", 224),
    "bert_base": lambda: _text("BertForMaskedLM", 128),
    "gpt2": lambda: _text("GPT2LMHeadModel", 512),
}


def main(folder: Path) -> None:
    for name, make in _MODELS.items():
        with torch.device("meta"):
            profile = profile_of(name, *make())
        (folder / f"{name}.json").write_text(profile.to_json())
        total = sum(tensor.bytes for tensor in profile.tensors)
        print(f"{name}: {len(profile.tensors)} tensors, {total // 4} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
