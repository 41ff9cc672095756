"""Exact comparison of modules and optimizers: lists of differences, empty for equal."""

import hashlib

from training.needs import torch

nn = torch.nn


def difference(name: str, ours, theirs) -> list[str]:
    """One sentence where two values differ in type, shape or any bit (a zero's sign apart); nothing may be NaN."""
    if isinstance(ours, torch.Tensor) != isinstance(theirs, torch.Tensor):
        return [f"{name}: {type(ours).__name__} against {type(theirs).__name__}"]
    if not isinstance(ours, torch.Tensor):
        return [] if ours == theirs else [f"{name}: {ours} against {theirs}"]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return [f"{name}: {ours.dtype} {tuple(ours.shape)} against {theirs.dtype} {tuple(theirs.shape)}"]
    if torch.equal(ours, theirs):
        return []
    distance = (ours.double() - theirs.double()).abs()
    return [
        f"{name}: differs in {int((ours != theirs).sum())} of {ours.numel()} elements by up to {distance.max():.3g}"
    ]


def _tree(name: str, ours, theirs) -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if set(ours) != set(theirs):
            return [f"{name}: keys {sorted(map(str, ours))} against {sorted(map(str, theirs))}"]
        return [found for key in ours for found in _tree(f"{name}.{key}", ours[key], theirs[key])]
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{name}: {len(ours)} against {len(theirs)} entries"]
        return [
            found for i, pair in enumerate(zip(ours, theirs, strict=True)) for found in _tree(f"{name}[{i}]", *pair)
        ]
    return difference(name, ours, theirs)


def trees(ours, theirs, name: str = "value") -> list[str]:
    """Compares nested dicts, lists and tensors."""
    return _tree(name, ours, theirs)


def modules(ours: nn.Module, theirs: nn.Module) -> list[str]:
    """Parameters and buffers, by name."""
    return _tree("module", ours.state_dict(), theirs.state_dict())


def optimizers(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> list[str]:
    """State and groups, by the order of the parameters."""
    return _tree("optimizer", ours.state_dict(), theirs.state_dict())


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
