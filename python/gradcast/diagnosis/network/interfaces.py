"""This host's network interfaces, and which of them Gloo uses.

On Linux, files and two system calls have all facts. On other systems only the names are known.
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

from gradcast.disk import system_file
from gradcast.errors import Error

VARIABLE = "GLOO_SOCKET_IFNAME"
# Stands for an unknown name in findings: an address would be taken for a name if put into the variable.
UNKNOWN = "INTERFACE"
_SYSTEM = Path("/sys/class/net")
_IPV6_TABLE = Path("/proc/net/if_inet6")
_SIOCGIFCONF = 0x8912  # <linux/sockios.h>
# struct ifreq: a name, and an address in a union with other fields.
_IFREQ_BYTES = 16 + max(16, 2 * struct.calcsize("L") + 8)
_ADDRESSES_MAX = 256
# Drivers that carry packets inside other packets; the interface below says nothing about their speed.
_TUNNELS = frozenset({"vxlan", "wireguard", "geneve", "gre", "gretap", "ip6gre", "sit", "tun", "tap", "ppp"})


@dataclasses.dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...] = ()  # in the system's order, IPv4 first
    speed_mbit_per_s: int | None = None  # what the hardware reports; None if it reports nothing or is virtual
    physical: bool = True  # hardware, or a bond, VLAN or bridge on top of some
    loopback: bool = False
    up: bool = True


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The interface that Gloo binds to."""

    interface: str
    address: str
    connections: int = 1  # between each two ranks: one per interface that the variable names
    others: tuple[str, ...] = ()  # interfaces that the variable names besides the first


def interfaces() -> list[Interface]:
    ipv4, ipv6 = _ipv4_addresses(), _ipv6_addresses()
    return [described(name, [*ipv4.get(name, []), *ipv6.get(name, [])]) for _, name in socket.if_nameindex()]


def described(name: str, addresses: Sequence[str], system: Path = _SYSTEM) -> Interface:
    """Reads an interface's properties below ``system``. An unknown interface counts as hardware without a speed."""
    folder = system / name
    is_physical = not folder.exists() or _is_physical(folder)
    digits = system_file(folder / "speed")  # -1: not known
    return Interface(
        name=name,
        addresses=tuple(addresses),
        # Virtual interfaces report invented speeds: veth reports 10 Gbit/s, whatever is behind it.
        speed_mbit_per_s=int(digits) or None if is_physical and digits.isdigit() else None,
        physical=is_physical,
        loopback=name == "lo" or any(_is_loopback(address) for address in addresses),
        up=system_file(folder / "operstate") in ("", "up", "unknown"),
    )


def chosen(known: Sequence[Interface], environment: Mapping[str, str] = os.environ) -> Chosen:
    """Returns the interface that Gloo uses, by torch's rules.

    These are the interfaces of GLOO_SOCKET_IFNAME, else the first address of the hostname that this host has, else
    loopback. Of an interface, Gloo takes the first address. Raises Error if the variable names an interface without
    address.
    """
    names = [name for name in environment.get(VARIABLE, "").split(",") if name]
    if names:
        addresses = next((each.addresses for each in known if each.name == names[0]), ())
        if not any(each.addresses for each in known):  # this system does not tell addresses
            addresses = (_hostname_address() or "127.0.0.1",)
        if not addresses:
            have = ", ".join(each.name for each in known if each.addresses)
            raise Error(
                f"{VARIABLE} is {environment[VARIABLE]}, but {names[0]} has no address here; choose one of {have}",
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
    """Returns True for an address of one link only, which needs the name of an interface of the host that uses it."""
    return address.lower().startswith("fe80:")


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _ipv4_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if not sys.platform.startswith("linux"):
        return found
    import fcntl

    buffer = array.array("B", bytes(_ADDRESSES_MAX * _IFREQ_BYTES))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        used_bytes, _ = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
        for start in range(0, used_bytes, _IFREQ_BYTES):
            name = buffer[start : start + 16].tobytes().partition(b"\0")[0].decode()
            address = socket.inet_ntoa(buffer[start + 20 : start + 24].tobytes())
            found.setdefault(name.partition(":")[0], []).append(address)  # eth0:1 is an address of eth0
    return found


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in system_file(_IPV6_TABLE).splitlines():
        digits, _, _, _, _, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        found.setdefault(name, []).append(address)
    return found


def _is_physical(folder: Path, depth: int = 4) -> bool:
    """Returns True if hardware is below the interface. ``depth``: a VLAN on a bond on a card has three levels."""
    if (folder / "device").exists():
        return True
    kind = next((line[8:] for line in system_file(folder / "uevent").splitlines() if line.startswith("DEVTYPE=")), "")
    if kind in _TUNNELS or depth == 0:
        return False
    return any(_is_physical(folder.parent / below.name[6:], depth - 1) for below in folder.glob("lower_*"))
