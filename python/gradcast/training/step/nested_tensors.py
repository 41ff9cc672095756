"""Finds tensors in nested values: outputs of modules, and entries of optimizer states."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors at any depth of lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, dict):
        parts: Any = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = vars(value).values()
    else:
        return
    for part in parts:
        yield from tensors_in(part)
