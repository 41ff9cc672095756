"""The contents of a snapshot, and this rank's copy of its part.

Parameters, optimizer state and buffers are the same on all ranks, so each rank copies and writes a part of them. A
parameter and its optimizer state have one owner, which follows from the sizes of the parameters. Buffers are rank 0's,
which sends those of a bare module. With local steps all of this is each rank's own, and each writes it whole.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradcast.errors import refused
from gradcast.snapshots.store import Path_
from gradcast.training.compat.wrappers import unwrapped_optimizer


def owners(parameters: dict[str, nn.Parameter], world_size: int) -> dict[str, int]:
    """The rank that writes each parameter: the largest first, to the rank that has the least."""
    loads, found = [0] * world_size, {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, name)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += parameters[name].nbytes
    return found


def model_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the module's state dict, without reading them."""
    return {n: t for n, t in module.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def by_name(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The argument ``extra`` of the program. Raises Error(invalid_use)."""
    if not isinstance(extra, Mapping | None):
        raise refused(
            f'extra is a {type(extra).__name__}; give a dict of objects by name, as {{"scheduler": scheduler}}'
        )
    return dict(extra or {})


def optimizers_in(given: Any) -> list[Optimizer]:
    """The argument ``optimizer`` of the program, without wrappers. Raises Error(invalid_use)."""
    found = [unwrapped_optimizer(each) for each in (given if isinstance(given, list | tuple) else [given])]
    for each in found:
        if not hasattr(each, "param_groups"):
            raise refused(f"{each!r:.60} is no optimizer; give the optimizers of the training")
    return found


def plain_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups without their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def extra_state(module: nn.Module) -> dict[str, Any]:
    """The entries of the module's state dict that are no tensors, by name."""
    return {name: each for name, each in module.state_dict(keep_vars=True).items() if name.endswith("_extra_state")}


class Copies:
    """This rank's part of the state of one step, in memory that stays for the next snapshots.

    A parameter and its optimizer state are copied by ``copy``, at a time when they are those of the step.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], rank: int, world_size: int) -> None:
        self._optimizers = optimizers
        parameters = dict(module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        owner = owners(parameters, world_size)
        self._tensors = model_tensors(module)
        self._own_keys: dict[str, list[str]] = {}  # by parameter of this rank: its names in the state dict
        for key, tensor in self._tensors.items():
            name = names.get(id(tensor))
            if name is not None and owner[name] == rank:
                self._own_keys.setdefault(name, []).append(key)
        self._buffers = [key for key, tensor in self._tensors.items() if id(tensor) not in names and rank == 0]
        self._groups, self._updated = group_names(optimizers, names), _updated(optimizers)
        self._place = {name: (i, g, k) for i, each in enumerate(self._groups) for g, group in enumerate(each)
                       for k, name in enumerate(group)}  # fmt: skip
        self._held: dict[Path_, torch.Tensor] = {}
        self._left: set[str] = set()  # own parameters that are not copied yet
        self._taken: set[Path_] = set()
        self._running: list[torch.cuda.Event] = []  # behind copies on a device

    def fits(self, module: nn.Module) -> bool:
        """Returns whether the module still has the same tensors, and each optimizer its parameters."""
        now = model_tensors(module)
        same = now.keys() == self._tensors.keys() and all(now[key] is self._tensors[key] for key in now)
        return same and self._updated == _updated(self._optimizers)

    @property
    def size_bytes(self) -> int:
        """The size of this rank's part, at this moment."""
        keys = [key for keys in self._own_keys.values() for key in keys] + self._buffers
        states = [v for name in self._own_keys for v in self._entry(name).values() if isinstance(v, torch.Tensor)]
        return sum(each.nbytes for each in [*states, *(self._tensors[key] for key in keys)])

    def begin(self) -> None:
        """Copies the buffers."""
        self._left, self._taken = set(self._own_keys), set()
        self._copy([(("model", key), self._tensors[key]) for key in self._buffers])

    def copy(self, names: Iterable[str]) -> None:
        """Copies those of these parameters that are this rank's and not copied yet, with their optimizer state."""
        due = [name for name in names if name in self._left]
        pairs: list[tuple[Path_, torch.Tensor]] = []
        for name in due:
            pairs += [(("model", key), self._tensors[key]) for key in self._own_keys[name]]
            number = str(self._place[name][0]) if name in self._place else ""
            state = self._entry(name).items()
            pairs += [(("optimizer", number, name, k), v) for k, v in state if isinstance(v, torch.Tensor)]
        self._copy(pairs)
        self._left.difference_update(due)

    def copy_rest(self) -> None:
        self.copy(list(self._left))

    def _copy(self, pairs: list[tuple[Path_, torch.Tensor]]) -> None:
        for path, tensor in pairs:
            held = self._held.get(path)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                pinned = tensor.device.type == "cuda"
                self._held[path] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._taken.add(path)
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([self._held[path] for path, _ in pairs], [t for _, t in pairs], non_blocking=True)
        if any(tensor.device.type == "cuda" for _, tensor in pairs):
            event = torch.cuda.Event()
            event.record()
            self._running.append(event)

    def values(self) -> dict[Path_, torch.Tensor]:
        """Returns the tensors copied since ``begin``, when the copies have run. Any thread."""
        while self._running:
            self._running.pop().synchronize()
        return {path: self._held[path] for path in self._taken}

    def optimizers_state(self) -> list[dict[str, Any]]:
        """The optimizers' states without tensors of parameters, for rank 0. REQUIRES: all updates of the step have
        run."""
        found = []
        for optimizer, names in zip(self._optimizers, self._groups, strict=True):
            entries = {name: self._entry(name) for group in names for name in group}
            scalars = {n: {k: v for k, v in e.items() if not isinstance(v, torch.Tensor)} for n, e in entries.items()}
            on_host = {n: [k for k, v in e.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"]
                       for n, e in entries.items()}  # fmt: skip
            others = {k: v for k, v in dict.items(optimizer.state) if not isinstance(k, torch.Tensor)}
            own = {
                "kind": type(optimizer).__name__,
                "names": names,
                "groups": plain_groups(optimizer),
                "scalars": scalars,
            }
            found.append(copy.deepcopy(own | {"on_host": on_host, "others": others}))
        return found

    def paths(self) -> list[Path_]:
        """The paths of all tensors that the ranks write together. REQUIRES: as ``optimizers_state``."""
        found: list[Path_] = [("model", key) for key in self._tensors]
        for name, (number, _, _) in self._place.items():
            state = self._entry(name).items()
            found += [("optimizer", str(number), name, k) for k, v in state if isinstance(v, torch.Tensor)]
        return found

    def _entry(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter. ``dict.get``: gradcast guards the state, and would wait for more."""
        if name not in self._place:
            return {}
        number, group, index = self._place[name]
        optimizer = self._optimizers[number]
        return dict.get(optimizer.state, optimizer.param_groups[group]["params"][index]) or {}


def _updated(optimizers: Sequence[Optimizer]) -> list[list[list[int]]]:
    return [[[id(parameter) for parameter in group["params"]] for group in each.param_groups] for each in optimizers]


def group_names(optimizers: Sequence[Optimizer], names: dict[int, str]) -> list[list[list[str]]]:
    """The names of the parameters of each optimizer and group. ``names``: by id of a parameter of the module. Raises
    Error(invalid_use) if an optimizer updates others."""
    found = [[[names.get(id(p), "") for p in g["params"]] for g in each.param_groups] for each in optimizers]
    if any(not name for each in found for group in each for name in group):
        raise refused("a snapshot needs optimizers that update parameters of the module only; put the others into it")
    return found
