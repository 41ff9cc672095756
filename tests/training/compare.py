"""Exact comparison of modules and optimizers: lists of differences, empty for equal."""

import hashlib
from collections.abc import Mapping

from training.needs import torch

nn = torch.nn


def difference(name: str, ours, theirs, tolerance: float = 0.0, nan_equal: bool = False) -> list[str]:
    """One sentence where two values differ in type, shape or any bit (a zero's sign apart).

    ``tolerance``: so much may tensors differ, relative to the largest value (at least 1). ``nan_equal``: NaN is NaN.
    """
    if isinstance(ours, torch.Tensor) != isinstance(theirs, torch.Tensor):
        return [f"{name}: {type(ours).__name__} against {type(theirs).__name__}"]
    if not isinstance(ours, torch.Tensor):
        return [] if ours == theirs else [f"{name}: {ours} against {theirs}"]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return [f"{name}: {ours.dtype} {tuple(ours.shape)} against {theirs.dtype} {tuple(theirs.shape)}"]
    if nan_equal and torch.equal(ours.isnan(), theirs.isnan()):
        ours, theirs = ours.nan_to_num(), theirs.nan_to_num()
    if torch.equal(ours, theirs):
        return []
    largest = (ours.double() - theirs.double()).abs().max()
    if tolerance and largest <= tolerance * max(1.0, theirs.double().abs().max()):
        return []
    return [f"{name}: differs in {int((ours != theirs).sum())} of {ours.numel()} elements by up to {largest:.3g}"]


def trees(ours, theirs, name: str = "value", **how) -> list[str]:
    """Compares nested dicts, lists and tensors. ``how``: as for ``difference``."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if set(ours) != set(theirs):
            return [f"{name}: keys {sorted(map(str, ours))} against {sorted(map(str, theirs))}"]
        return [found for key in ours for found in trees(ours[key], theirs[key], f"{name}.{key}", **how)]
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return [f"{name}: {len(ours)} against {len(theirs)} entries"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for i, pair in pairs for found in trees(*pair, f"{name}[{i}]", **how)]
    return difference(name, ours, theirs, **how)


def modules(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Parameters and buffers, by name."""
    return trees(ours.state_dict(), theirs.state_dict(), "module")


def optimizers(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> list[str]:
    """State and groups, by the order of the parameters."""
    return trees(ours.state_dict(), theirs.state_dict(), "optimizer")


def apart(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], tolerance: float) -> list[str]:
    """Which tensors differ by more than ``tolerance`` of the largest value of all of floating point.

    Not of its own: what is nearly 0 has the rounding of the sums that it came from, which differs between processors.
    """
    if set(ours) != set(theirs):
        return [f"keys {sorted(ours)} against {sorted(theirs)}"]
    pairs = {name: (ours[name].detach().double(), theirs[name].detach().double()) for name in ours}
    size = max(float(b.abs().max()) for name, (_, b) in pairs.items() if theirs[name].is_floating_point())
    gaps = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
    # What is NaN is apart, too.
    return [f"{name} differs by {gap:.3g}" for name, gap in gaps.items() if not gap <= tolerance * size]


def largest(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference between two parameters or buffers of floating point."""
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.is_floating_point())


def digest(module: nn.Module) -> str:
    """Equal for equal parameters. Buffers are left out: batch norm's are each rank's own until the next forward."""
    text = hashlib.sha256()
    for parameter in module.parameters():
        text.update(parameter.detach().flatten().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()
