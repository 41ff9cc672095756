"""The conditions under which a profile's link was measured: hosts, form, wire format and backend. Pure."""

from dataclasses import asdict, dataclass, replace

from gradcast import _core
from gradcast.host_traffic import RING, TWO_LEVEL, Hosts, leaving_share


@dataclass(frozen=True)
class MeasuredExchange:
    """``form`` and ``wire``: see host_traffic. ``backend``: of torch.distributed."""

    hosts: Hosts
    form: str
    wire: str
    backend: str = "gloo"

    def describe(self) -> str:
        levels = ", in two levels" if self.form == TWO_LEVEL else ""
        wire = f", {self.wire} on the wire" if self.wire != "fp32" else ""
        return self.hosts.describe() + levels + wire + (f", over {self.backend}" if self.backend != "gloo" else "")


def with_exchange(profile: _core.Profile, exchange: MeasuredExchange) -> _core.Profile:
    return profile.replace(extra={**profile.extra, "exchange": asdict(exchange) | asdict(exchange.hosts)})


def exchange_of(profile: _core.Profile) -> MeasuredExchange | None:
    """Returns None if the profile does not record it, or has no link."""
    found = profile.extra.get("exchange")
    if found is None or profile.link is None:
        return None
    backend = found.get("backend", "gloo")  # the first profiles have none
    return MeasuredExchange(Hosts(tuple(found["host_of"])), found["form"], found["wire"], backend)


def in_a_ring(profile: _core.Profile) -> _core.Profile:
    """Returns the profile with the link of fp32 in a ring of all ranks, which DDP uses."""
    found = exchange_of(profile)
    if found is None or found.hosts.count == 1:
        return profile
    share = leaving_share(found.hosts, RING) / leaving_share(found.hosts, found.form, found.wire)
    ring = profile.replace(link=profile.link.scaled(1, share))
    return with_exchange(ring, replace(found, form=RING, wire="fp32"))
