"""The hosts of the ranks: what each rank knows of its own, and who shares one."""

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from gradcast.diagnosis.network import interfaces
from gradcast.diagnosis.network.findings import Host

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/net")
# A hostname, and what is the same for ranks that share a network stack.
Identity = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank is. ``host``: as ``own_host`` tells it."""

    host: Identity
    chosen: interfaces.Chosen
    known: tuple[interfaces.Interface, ...]

    @property
    def interface(self) -> interfaces.Interface:
        names = (each for each in self.known if each.name == self.chosen.interface)
        return next(names, interfaces.Interface(self.chosen.interface, (self.chosen.address,)))

    def others(self) -> list[interfaces.Interface]:
        """What could be used instead. Not by link-local addresses, which every interface has, connected or not."""
        usable = (each for each in self.known if each.name != self.chosen.interface and each.up and not each.loopback)
        reachable = [
            dataclasses.replace(each, addresses=tuple(a for a in each.addresses if not interfaces.is_link_local(a)))
            for each in usable
        ]
        return [each for each in reachable if each.addresses]


def own_place() -> Place:
    known = interfaces.interfaces()
    return Place(own_host(), interfaces.chosen(known), tuple(known))


def own_host() -> Identity:
    """Hostnames can be the same on several machines, and containers on one machine have networks of their own."""
    name = socket.gethostname()
    try:
        return name, f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        return name, name


def names(hosts: Sequence[Identity]) -> list[str]:
    """Of each rank's host; with a number behind it where several hosts have the same."""
    found = []
    for name, identity in hosts:
        same = list(dict.fromkeys(each for other, each in hosts if other == name))
        found.append(name if len(same) == 1 else f"{name}/{same.index(identity)}")
    return found


def by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Ranks that share a host, hosts in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def described(place: Place, name: str) -> Host:
    """As findings see it."""
    used = place.interface
    return Host(
        label=f"{name} ({place.chosen.address})",
        interface=used.name,
        speed_mbit_per_s=used.speed_mbit_per_s,
        physical=used.physical,
        physical_others=tuple(each.name for each in place.others() if each.physical),
        connections=place.chosen.connections,
        unmeasured=place.chosen.others,
    )


def common_alternatives(places: Sequence[Place], count_max: int) -> list[str]:
    """Interfaces that all of these hosts could use instead, those with the highest nominal speed first.

    Where hosts have the same address, as every docker0 has, it leads from each to itself."""
    speeds: dict[str, int] = {}
    for each in places[0].others():
        same_name = [other for place in places for other in place.others() if other.name == each.name]
        if len({other.addresses[0] for other in same_name}) == len(places):
            speeds[each.name] = each.speed_mbit_per_s or 0
    return sorted(speeds, key=lambda name: -speeds[name])[:count_max]
