"""Bytes that leave a host per iteration, as a multiple of the bytes of the gradients in fp32.

Several ranks of one host share its link. For N hosts of g ranks, W = N g, and x bytes on the wire per byte of fp32:

    ring        2 (W - 1) / W          ranks of one host follow one another; fp32 only
    flat        2 g (1 - 1 / N) x      all-to-all of parts, sums, all-gather, over all ranks
    two-level   2 (1 - 1 / N) x        sums inside the host first; all hosts hold the same number of ranks, and
                                       gradients lie in host memory

As many bytes arrive.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

RING, FLAT, TWO_LEVEL = FORMS = ("ring", "flat", "two-level")
# Bytes on the wire per byte of fp32; int8 has a scale of 4 bytes for each 128 elements.
WIRE_SHARES = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.5, "int8": (128 + 4) / 512}
NARROW_WIRES = ("bf16", "fp16", "int8")
# A wire format is not worth its loss if it does not save at least this share of the time of fp32.
WORTHWHILE_COST = 0.98


@dataclass(frozen=True)
class Hosts:
    """The host of each rank: ``host_of[rank]``, numbered in the order of their first ranks."""

    host_of: tuple[int, ...]

    @classmethod
    def even(cls, count: int, ranks_per_host: int) -> "Hosts":
        return cls(tuple(rank // ranks_per_host for rank in range(count * ranks_per_host)))

    @classmethod
    def of(cls, keys: Sequence[Hashable]) -> "Hosts":
        """``keys``: by rank, equal on ranks that share a host."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return cls(tuple(numbers[key] for key in keys))

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks of each host."""
        return [[rank for rank, own in enumerate(self.host_of) if own == host] for host in range(self.count)]

    @property
    def count(self) -> int:
        return len(set(self.host_of))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks of each host."""
        return tuple(Counter(self.host_of).values())

    @property
    def ranks_per_host(self) -> int | None:
        """None if hosts hold different numbers of ranks."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else None

    def describe(self) -> str:
        hosts = f"{self.count} host{'' if self.count == 1 else 's'}"
        if self.ranks_per_host is None:
            return f"{hosts} with {len(self.host_of)} ranks in all"
        return f"{hosts} of {self.ranks_per_host} rank{'' if self.ranks_per_host == 1 else 's'}"


def leaving_share(hosts: Hosts, form: str, wire: str = "fp32") -> float:
    """Returns the bytes that leave the busiest host, per byte of fp32 gradients.

    REQUIRES: fp32 in a ring; in two levels, the same number of ranks on all hosts.
    """
    ranks = len(hosts.host_of)
    if hosts.count == 1:
        return 0.0
    if form == RING:
        # The link of rank r to r + 1 leaves the host where the next rank is elsewhere.
        following = (*hosts.host_of[1:], hosts.host_of[0])
        crossings = Counter(host for host, other in zip(hosts.host_of, following, strict=True) if host != other)
        return max(crossings.values()) * 2 * (ranks - 1) / ranks
    x = WIRE_SHARES[wire]
    if form == TWO_LEVEL:
        return 2 * (1 - 1 / hosts.count) * x
    return max(2 * size * (ranks - size) / ranks * x for size in hosts.sizes)


def exchange_form(hosts: Hosts, wire: str, *, on_device: bool = False) -> str:
    """Returns the form in which gradcast sends fp32 gradients. ``on_device``: their backend knows the hosts itself."""
    if hosts.count > 1 and (hosts.ranks_per_host or 1) > 1 and not on_device:
        return TWO_LEVEL
    return RING if wire == "fp32" else FLAT


def wire_cost(
    hosts: Hosts, wire: str, form: str | None = None, fp32_form: str | None = None, *, on_device: bool = False
) -> float:
    """Returns the cost per byte of gradients with this wire format, as a multiple of that with fp32.

    ``form``, ``fp32_form``: None for gradcast's own. On one host, only bytes between devices count.
    """
    if hosts.count == 1:
        return WIRE_SHARES[wire] if on_device or form == FLAT else 1.0
    narrow = leaving_share(hosts, form or exchange_form(hosts, wire, on_device=on_device), wire)
    return narrow / leaving_share(hosts, fp32_form or exchange_form(hosts, "fp32", on_device=on_device))


def wire_taken(hosts: Hosts, wire: str, *, on_device: bool = False) -> str:
    """Returns the wire format that gradcast uses if this one is requested."""
    return "fp32" if hosts.count == 1 and not on_device else wire


def saves_nothing(hosts: Hosts, wire: str, *, on_device: bool = False) -> str | None:
    """Returns a sentence if this wire format is not faster than fp32 on these hosts, else None."""
    if wire == "fp32" or wire_cost(hosts, wire, on_device=on_device) < WORTHWHILE_COST:
        return None
    if hosts.count == 1:
        return f"{wire} on the wire saves nothing on {hosts.describe()}: no gradient leaves it"
    forms = {each: exchange_form(hosts, each, on_device=on_device) for each in (wire, "fp32")}
    narrow, full = (leaving_share(hosts, form, each) for each, form in forms.items())
    return (
        f"{wire} on the wire saves nothing on {hosts.describe()}: {narrow:.2f} times the bytes of the gradients leave "
        f"a host per step, with fp32 {full:.2f} times"
    )
