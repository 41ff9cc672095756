"""This host's network interfaces, and which of them Gloo uses.

Linux tells everything by its files and two calls; elsewhere there are names alone, and nothing is found out about them.
"""

import array
import contextlib
import dataclasses
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradcast.errors import Error

VARIABLE = "GLOO_SOCKET_IFNAME"
# Stands in findings for a name that is not known: an address in the variable would be taken for a name.
UNKNOWN = "INTERFACE"
_SYSTEM = Path("/sys/class/net")
_IPV6_TABLE = Path("/proc/net/if_inet6")
_SIOCGIFCONF = 0x8912  # <linux/sockios.h>
# struct ifreq: a name, and an address among what other calls tell.
_IFREQ_BYTES = 16 + max(16, 2 * struct.calcsize("L") + 8)
_ADDRESSES_MAX = 256
# Drivers that carry packets inside other packets; what lies under them says nothing about their speed.
_TUNNELS = frozenset({"vxlan", "wireguard", "geneve", "gre", "gretap", "ip6gre", "sit", "tun", "tap", "ppp"})


@dataclasses.dataclass(frozen=True)
class Interface:
    """``addresses``: in the system's order, IPv4 first. ``speed_mbit_per_s``: what the hardware says, None where it
    says nothing or there is no hardware. ``physical``: hardware, or a bond, VLAN or bridge on top of some."""

    name: str
    addresses: tuple[str, ...] = ()
    speed_mbit_per_s: int | None = None
    physical: bool = True
    loopback: bool = False
    up: bool = True


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What Gloo binds to. ``connections``: between each two ranks, one per interface that the variable names.
    ``others``: those that it names besides the first."""

    interface: str
    address: str
    connections: int = 1
    others: tuple[str, ...] = ()


def interfaces(system: Path = _SYSTEM) -> list[Interface]:
    ipv4, ipv6 = _ipv4_addresses(), _ipv6_addresses()
    found = []
    for _, name in socket.if_nameindex():
        addresses = [*ipv4.get(name, []), *ipv6.get(name, [])]
        found.append(described(name, addresses, system))
    return found


def described(name: str, addresses: Sequence[str], system: Path = _SYSTEM) -> Interface:
    """What ``system`` says of the interface; an unknown one counts as hardware, about which nothing is found."""
    folder = system / name
    is_physical = not folder.exists() or _is_physical(folder)
    return Interface(
        name=name,
        addresses=tuple(addresses),
        # Virtual ones make a speed up: veth says 10 Gbit/s, whatever is behind it.
        speed_mbit_per_s=_speed(folder) if is_physical else None,
        physical=is_physical,
        loopback=name == "lo" or any(_is_loopback(address) for address in addresses),
        up=_text(folder / "operstate") in ("", "up", "unknown"),
    )


def chosen(known: Sequence[Interface], environment: Mapping[str, str] = os.environ) -> Chosen:
    """As torch does it: the interfaces of GLOO_SOCKET_IFNAME, else the first address of the hostname that this host
    has, else loopback. Of an interface, Gloo takes the first address."""
    names = [name for name in environment.get(VARIABLE, "").split(",") if name]
    if names:
        addresses = next((each.addresses for each in known if each.name == names[0]), ())
        if not any(each.addresses for each in known):  # this system does not tell
            addresses = (_hostname_address() or "127.0.0.1",)
        if not addresses:
            have = ", ".join(each.name for each in known if each.addresses)
            raise Error(
                f"{VARIABLE} is {environment[VARIABLE]}, but {names[0]} has no address here; choose of {have}",
                "invalid_use",
            )
        others = tuple(dict.fromkeys(name for name in names if name != names[0]))
        return Chosen(names[0], addresses[0], len(names), others)
    address = _hostname_address() or "127.0.0.1"
    owner = next((each.name for each in known if address in each.addresses), None)
    return Chosen(owner or ("lo" if _is_loopback(address) else UNKNOWN), address)


def _hostname_address() -> str | None:
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def is_link_local(address: str) -> bool:
    """Of one wire: it leads nowhere without the interface's name, which other hosts may not have."""
    return address.lower().startswith("fe80:")


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _ipv4_addresses() -> dict[str, list[str]]:
    """Of each interface, all of them."""
    found: dict[str, list[str]] = {}
    if not sys.platform.startswith("linux"):
        return found
    import fcntl

    told = array.array("B", bytes(_ADDRESSES_MAX * _IFREQ_BYTES))
    request = struct.pack("iL", len(told), told.buffer_info()[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        told_bytes, _ = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
        for start in range(0, told_bytes, _IFREQ_BYTES):
            name = told[start : start + 16].tobytes().partition(b"\0")[0].decode()
            address = socket.inet_ntoa(told[start + 20 : start + 24].tobytes())
            found.setdefault(name.partition(":")[0], []).append(address)  # eth0:1 is an address of eth0
    return found


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in _text(_IPV6_TABLE).splitlines():
        digits, _, _, _, _, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        found.setdefault(name, []).append(address)
    return found


def _is_physical(folder: Path, depth: int = 4) -> bool:
    """``depth`` bounds the way down: a VLAN on a bond on a card has three steps."""
    if (folder / "device").exists():
        return True
    kind = next((line[8:] for line in _text(folder / "uevent").splitlines() if line.startswith("DEVTYPE=")), "")
    if kind in _TUNNELS or depth == 0:
        return False
    return any(_is_physical(folder.parent / below.name[6:], depth - 1) for below in folder.glob("lower_*"))


def _speed(folder: Path) -> int | None:
    with contextlib.suppress(ValueError):
        speed = int(_text(folder / "speed"))
        return speed if speed > 0 else None  # -1: not known
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # reading the speed of an interface that is down fails
        return ""
