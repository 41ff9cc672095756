"""The ranks that share a host: each rank's own place, and the conclusion of all ranks from their places."""

import os
import socket
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from gradcast.host_traffic import Hosts

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")
# A hostname, and a text that is equal for ranks that share a network stack.
Identity = tuple[str, str]


class Launch(NamedTuple):
    """torchrun's variables of a rank: the number of its host, its own number there, and the count of ranks there."""

    group_rank: int
    local_rank: int
    local_world_size: int


class Place(NamedTuple):
    identity: Identity
    launch: Launch | None  # None if torchrun's variables are not all there


def own_host() -> Identity:
    """Returns the identity of this host. Several machines may share a hostname, and containers on one machine have
    networks of their own.
    """
    name = socket.gethostname()
    try:
        return name, f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return name, name


def own_place() -> Place:
    # The one place that reads these variables.
    values = [os.environ.get(name, "") for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    return Place(own_host(), Launch(*map(int, values)) if all(map(str.isdecimal, values)) else None)


def agreed(places: Sequence[Place]) -> tuple[Hosts, str | None]:
    """The hosts of the ranks whose places these are, in rank order, and a sentence if torchrun's variables contradict
    themselves or the hosts. They count where all ranks have them: two launchers on one machine stand for two hosts."""
    by_identity = Hosts.of([place.identity for place in places])
    launches = [place.launch for place in places if place.launch is not None]
    if not launches:
        return by_identity, None
    doubt = _contradiction(places, launches)
    if doubt is None:
        return Hosts.of([launch.group_rank for launch in launches]), None
    return by_identity, f"{doubt}; ranks are on one host where host name and network are the same"


def _contradiction(places: Sequence[Place], launches: Sequence[Launch]) -> str | None:
    if len(launches) < len(places):
        without = next(rank for rank, place in enumerate(places) if place.launch is None)
        return f"rank {without} lacks GROUP_RANK, LOCAL_RANK or LOCAL_WORLD_SIZE, which other ranks have"
    first: dict[Hashable, int] = {}
    for rank, (launch, place) in enumerate(zip(launches, places, strict=True)):
        group, local, size = launch
        where = f"rank {rank} has GROUP_RANK={group}, LOCAL_RANK={local} and LOCAL_WORLD_SIZE={size}"
        if local >= size:
            return f"{where}, and local ranks count from 0"
        other = first.setdefault((group, local), rank)
        if other != rank:
            return f"{where}, as rank {other} has"
        other = first.setdefault(group, rank)
        if launches[other].local_world_size != size:
            return f"{where}, and rank {other} has LOCAL_WORLD_SIZE={launches[other].local_world_size} there"
        if places[other].identity != place.identity:
            return f"{where}, and rank {other} with this GROUP_RANK is on another host"
    return None
