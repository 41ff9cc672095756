"""The ranks' hosts: the interfaces that each rank sees, and the pairs to measure."""

import dataclasses
from collections.abc import Sequence

from gradcast.diagnosis.network import interfaces
from gradcast.training.ranks.hosts import Identity, own_host

# All pairs of 8 hosts are 28, in 7 rounds. All pairs of 64 would be 2016, in 63.
ALL_PAIRS_HOSTS_MAX = 8
# Pairs of the first host with this many others, besides the ring: a distant pair differs from neighbours in one rack.
_SAMPLE = 6

_ALTERNATIVES_MAX = 2
# Pairs that are measured at the same time share no host, so no two of them share a link.
Rounds = list[list[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class HostInterfaces:
    """The interfaces that a rank sees on its host. ``host`` is its ``own_host``."""

    host: Identity
    chosen: interfaces.Chosen
    known: tuple[interfaces.Interface, ...]
    name: str = ""  # of the host, as ``names`` has it

    @property
    def label(self) -> str:
        return f"{self.name} ({self.chosen.address})"

    @property
    def interface(self) -> interfaces.Interface:
        names = (each for each in self.known if each.name == self.chosen.interface)
        return next(names, interfaces.Interface(self.chosen.interface, (self.chosen.address,)))

    def others(self) -> list[interfaces.Interface]:
        """The interfaces that could be used instead. Every interface has a link-local address, connected or not."""
        usable = (each for each in self.known if each.name != self.chosen.interface and each.up and not each.loopback)
        reachable = [
            dataclasses.replace(each, addresses=tuple(a for a in each.addresses if not interfaces.is_link_local(a)))
            for each in usable
        ]
        return [each for each in reachable if each.addresses]

    @property
    def physical_others(self) -> list[str]:
        return [each.name for each in self.others() if each.physical]


def own_interfaces() -> HostInterfaces:
    known = interfaces.interfaces()
    return HostInterfaces(own_host(), interfaces.chosen(known), tuple(known))


def names(hosts: Sequence[Identity]) -> list[str]:
    """Returns the name of each rank's host, with a number appended if several hosts share it."""
    found = []
    for name, identity in hosts:
        same = list(dict.fromkeys(each for other, each in hosts if other == name))
        found.append(name if len(same) == 1 else f"{name}/{same.index(identity)}")
    return found


def common_alternatives(hosts: Sequence[HostInterfaces]) -> list[str]:
    """Lists interfaces that all of these hosts could use instead, the highest nominal speed first.

    Interfaces with the same address on several hosts, such as docker0, are omitted: the address leads to the own host.
    """
    speeds: dict[str, int] = {}
    for each in hosts[0].others():
        same_name = [other for host in hosts for other in host.others() if other.name == each.name]
        if len({other.addresses[0] for other in same_name}) == len(hosts):
            speeds[each.name] = each.speed_mbit_per_s or 0
    return sorted(speeds, key=lambda name: -speeds[name])[:_ALTERNATIVES_MAX]


def rounds(host_count: int) -> Rounds:
    """Returns pairs of hosts, the lower one first. Of three hosts or more, each is in at least two pairs."""
    if host_count < 2:
        return []
    if host_count <= ALL_PAIRS_HOSTS_MAX:
        return _tournament(host_count)
    return [*_ring(host_count), *([pair] for pair in _sample(host_count))]


def _tournament(host_count: int) -> Rounds:
    """Pairs each host with each other once (the circle method of round-robin tournaments)."""
    circle = list(range(host_count + host_count % 2))  # an odd number gets a dummy; its partner pauses
    found = []
    for _ in range(len(circle) - 1):
        meeting = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        found.append(sorted((min(pair), max(pair)) for pair in meeting if max(pair) < host_count))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def _ring(host_count: int) -> Rounds:
    even = [(host, host + 1) for host in range(0, host_count - 1, 2)]
    odd = [(host, host + 1) for host in range(1, host_count - 1, 2)]
    last = (0, host_count - 1)
    # With an odd number of hosts, the pair that closes the ring shares a host with either round.
    return [even, odd, [last]] if host_count % 2 else [even, [last, *odd]]


def _sample(host_count: int) -> list[tuple[int, int]]:
    step = (host_count - 3) / (_SAMPLE + 1)
    others = {round(1 + step * (index + 1)) for index in range(_SAMPLE)}
    return [(0, other) for other in sorted(others) if 1 < other < host_count - 1]
