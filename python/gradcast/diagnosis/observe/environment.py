"""What ``lint`` needs to know of a process: variables, threads, and the cores that it may use."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradcast.diagnosis.analyze.lint import CONNECTIONS_VARIABLE, Host

# No others: an environment holds secrets, and what is found travels between the ranks and into files.
VARIABLES = (CONNECTIONS_VARIABLE,)
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Containers of one host see their own group as the root.
_NAMESPACE = Path("/proc/self/ns/cgroup")


@dataclasses.dataclass(frozen=True)
class Process:
    """``threads``: that torch computes with. ``cores``: their numbers, that the process may run on. ``quota``: how many
    cores' time its control group has, None for no limit; ``cgroup`` tells which processes share it."""

    variables: Mapping[str, str]
    threads: int
    cores: frozenset[int]
    quota: float | None
    cgroup: str


def own_process() -> Process:
    import torch

    return Process(
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        threads=torch.get_num_threads(),
        cores=_affinity(),
        quota=quota(_CGROUPS, _text(_OWN_CGROUP)),
        cgroup=f"{_link(_NAMESPACE)} {_text(_OWN_CGROUP)}",
    )


def hosts(names: Sequence[str], processes: Sequence[Process]) -> list[Host]:
    """``names``: of each rank's host. ``processes``: as ``own_process`` tells it on each rank."""
    return [
        host(name, [process for other, process in zip(names, processes, strict=True) if other == name])
        for name in dict.fromkeys(names)
    ]


def host(name: str, processes: Sequence[Process]) -> Host:
    """``processes``: of the host's ranks."""
    return Host(
        name=name,
        threads=sum(process.threads for process in processes),
        cores=usable_cores(processes),
        ranks=len(processes),
        variables=[process.variables for process in processes],
    )


def usable_cores(processes: Sequence[Process]) -> int:
    """Of processes on one host together: what one of them may run on, less what their groups' time does not allow."""
    cores = len(frozenset[int]().union(*(process.cores for process in processes)))
    quotas = {process.cgroup: process.quota for process in processes}
    if any(each is None for each in quotas.values()):
        return cores
    return max(1, min(cores, math.floor(sum(each or 0.0 for each in quotas.values()))))


def quota(root: Path, membership: str) -> float | None:
    """Cores' time of the control group, or of one above it; ``membership`` as /proc/self/cgroup has it."""
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "/")
    own = root / path.lstrip("/")
    folders = [own, *own.parents]
    limits = [_limit(folder) for folder in folders if folder == root or root in folder.parents]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(folder: Path) -> float | None:
    allowed, _, period = _text(folder / "cpu.max").partition(" ")
    if not allowed:  # version 1 of control groups
        allowed, period = (_text(folder / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        return int(allowed) / int(period) if int(allowed) > 0 else None
    except ValueError:  # "max"
        return None


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
