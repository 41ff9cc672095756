"""Stock DistributedDataParallel on a profile: its buckets, and what a step with them takes. Pure."""

from gradcast import _core

# torch's Gloo works on two operations at a time, whoever waits for them.
IN_FLIGHT = 2
# The bucket sizes that a user would try.
SWEPT_CAPS_MIB = (1, 4, 8, 25, 50, 100)

_MIB = 1 << 20


def same_caps(cap_mib: float) -> tuple[int, int]:
    """Bytes of the first bucket and of the others, with ``bucket_cap_mb``: it holds for all of them."""
    return int(cap_mib * _MIB), int(cap_mib * _MIB)


def plan(profile: _core.Profile, caps_bytes: tuple[int, int], link: _core.LinkModel | None = None) -> _core.Plan:
    """``caps_bytes``: of the first bucket and of the others. ``link``: None for the profile's own. REQUIRES: one."""
    parameters = {"first_bytes": caps_bytes[0], "cap_bytes": caps_bytes[1]}
    return _core.make_plan(
        profile, link or profile.link, policy="ddp", mode="hook", in_flight=IN_FLIGHT, parameters=parameters
    )
