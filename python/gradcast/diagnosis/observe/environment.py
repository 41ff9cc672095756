"""Facts of a process and its host for ``lint``: a variable, threads, and usable cores."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

from gradcast.disk import system_file
from gradcast.host_traffic import Hosts

CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Containers on one host each see their own group as the root; this differs between them.
_NAMESPACE = Path("/proc/self/ns/cgroup")


@dataclasses.dataclass(frozen=True)
class Process:
    cuda_connections: str | None  # value of CONNECTIONS_VARIABLE
    threads: int  # that torch computes with
    cores: frozenset[int]  # numbers of the cores that the process may run on
    quota: float | None  # cores' worth of time that the control group has; None means no limit
    cgroup: str  # equal for processes that share a control group


@dataclasses.dataclass(frozen=True)
class HostCpu:
    """Compute threads and cores of one host. The counts are totals over its ``ranks`` ranks."""

    name: str
    threads: int
    cores: int
    ranks: int
    cuda_connections: Sequence[str | None] = ()  # of each rank's process

    @property
    def fitting_threads(self) -> int | None:
        """Threads per rank that fit the cores, or None if the present number fits or cannot be lowered."""
        if self.threads <= max(self.cores, self.ranks):
            return None
        return max(1, self.cores // self.ranks)


def own_process() -> Process:
    import torch

    return Process(
        cuda_connections=os.environ.get(CONNECTIONS_VARIABLE),
        threads=torch.get_num_threads(),
        cores=_affinity(),
        quota=quota(_CGROUPS, system_file(_OWN_CGROUP)),
        cgroup=f"{_link(_NAMESPACE)} {system_file(_OWN_CGROUP)}",
    )


def hosts(names: Sequence[str], processes: Sequence[Process]) -> list[HostCpu]:
    """Summarizes the processes by host. ``names`` and ``processes`` are in rank order."""
    found = []
    for ranks in Hosts.of(names).ranks:
        own = [processes[rank] for rank in ranks]
        host = HostCpu(
            name=names[ranks[0]],
            threads=sum(process.threads for process in own),
            cores=usable_cores(own),
            ranks=len(own),
            cuda_connections=[process.cuda_connections for process in own],
        )
        found.append(host)
    return found


def usable_cores(processes: Sequence[Process]) -> int:
    """Counts the cores that these processes of one host can use together, within their control groups' quotas."""
    cores = len(frozenset[int]().union(*(process.cores for process in processes)))
    quotas = {process.cgroup: process.quota for process in processes}
    if any(each is None for each in quotas.values()):
        return cores
    return max(1, min(cores, math.floor(sum(each or 0.0 for each in quotas.values()))))


def quota(root: Path, membership: str) -> float | None:
    """Returns the lowest quota, in cores, of the control group and its parents; None means no limit.

    ``root`` is the mount point of the control groups. ``membership`` is the text of /proc/self/cgroup.
    """
    path = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "/")
    own = root / path.lstrip("/")
    folders = [own, *own.parents]
    limits = [_limit(folder) for folder in folders if folder == root or root in folder.parents]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(folder: Path) -> float | None:
    allowed, _, period = system_file(folder / "cpu.max").partition(" ")
    if not allowed:  # version 1 of control groups
        allowed, period = (system_file(folder / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        return int(allowed) / int(period) if int(allowed) > 0 else None
    except ValueError:  # "max"
        return None


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
