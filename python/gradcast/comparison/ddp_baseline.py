"""The DDP baseline: the buckets of stock DistributedDataParallel on a profile, as a plan. Pure."""

from collections.abc import Mapping

from gradcast import _core
from gradcast.comparison.measured_exchange import exchange_of, in_a_ring

# The bucket sizes that a user would try.
SWEPT_CAPS_MIB = (1, 4, 8, 25, 50, 100)

_MIB = 1 << 20
USUAL_CAPS_BYTES = (_MIB, 25 * _MIB)  # of a DDP module that is given none
# Candidates for (bytes of the first bucket, bytes of the others): from 50 KB to 100 MiB in steps of a factor sqrt(2).
# The first bucket is as large as the others or, as by default, a 25th of them.
_OTHERS_BYTES = [int(25 * _MIB * 2 ** (step / 2)) for step in range(-18, 5)]
TUNED_CAPS_BYTES = [(others // part, others) for part in (1, 25) for others in _OTHERS_BYTES]


def same_caps(cap_mib: float) -> tuple[int, int]:
    """Bytes of the first bucket and of the others with DDP's option ``bucket_cap_mb``, which applies to all of them."""
    return int(cap_mib * _MIB), int(cap_mib * _MIB)


def as_ddp_sends(profile: _core.Profile, size_bytes: Mapping[str, int]) -> _core.Profile:
    """The measured profile with the parameters alone, without padding, and the link of a ring of all ranks."""
    sent = [tensor for tensor in profile.tensors if tensor.name in size_bytes]
    return in_a_ring(profile).replace(tensors=[each.replace(bytes=size_bytes[each.name]) for each in sent])


def in_flight(profile: _core.Profile) -> int:
    """Returns how many buckets the backend that the profile was measured with carries at a time. torch's Gloo has two
    threads; NCCL carries the operations of a communicator one after the other."""
    exchange = exchange_of(profile)
    return 2 if exchange is None or exchange.backend == "gloo" else 1


def plan(
    profile: _core.Profile,
    caps_bytes: tuple[int, int],
    link: _core.LinkModel | None = None,
    *,
    at_a_time: int | None = None,
) -> _core.Plan:
    """A plan of DDP's buckets. ``caps_bytes``: of the first bucket and of the others. ``at_a_time``: that many buckets;
    by default as many as the backend carries. REQUIRES: there is a link."""
    parameters = {"first_bytes": caps_bytes[0], "cap_bytes": caps_bytes[1]}
    count = at_a_time or in_flight(profile)
    return _core.make_plan(
        profile, link or profile.link, policy="ddp", mode="hook", in_flight=count, parameters=parameters
    )
