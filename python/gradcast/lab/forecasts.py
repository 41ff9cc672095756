"""What the measured profile lets one say beforehand: DDP's buckets and their time, and what no schedule can beat."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.comparison.compare import compute_ns
from gradcast.files import scaled_profile
from gradcast.lab.variants import DDP_MGWFBP, TORCH_CAPS_MIB, Variant

_MIB = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """Iteration times below which no schedule gets, ms. ``plain``: with one start-up of an operation in all."""

    plain_ms: float
    best_ms: float


def with_sizes(profile: _core.Profile, size_bytes: Mapping[str, int]) -> _core.Profile:
    """The profile with the parameters' own sizes, as DDP counts them: gradcast sends a mark behind each gradient."""
    fields = json.loads(profile.to_json())
    for tensor in fields["tensors"]:
        tensor["bytes"] = size_bytes[tensor["name"]]
    return _core.Profile.from_json(json.dumps(fields))


def ddp_plan(profile: _core.Profile, variant: Variant) -> _core.Plan:
    """DDP's buckets on the profile, and what they take. REQUIRES: a profile with a link, a variant of DDP."""
    if variant.name == DDP_MGWFBP:
        return _mgwfbp_plan(profile)
    caps_mib = variant.caps_mib or TORCH_CAPS_MIB
    return ddp_baseline.plan(profile, (int(caps_mib[0] * _MIB), int(caps_mib[-1] * _MIB)))


def near_best_caps_mib(profile: _core.Profile, factor: float = 1.0) -> list[int]:
    """The cap of those that a sweep tries under which DDP is predicted to be fastest, and its neighbours.

    ``factor``: of the profile's tensors to those of the model; caps are scaled like them.
    """
    swept_mib = ddp_baseline.SWEPT_CAPS_MIB
    predicted_ns = [ddp_baseline.plan(profile, ddp_baseline.same_caps(factor * cap)).predicted_ns for cap in swept_mib]
    best = predicted_ns.index(min(predicted_ns))
    return list(swept_mib[max(0, best - 1) : best + 2])


def mgwfbp_caps_mib(profile: _core.Profile) -> list[float]:
    """MG-WFBP's plan as caps of DDP's buckets, one per bucket.

    DDP fills a bucket in the order in which gradients came in its first backward pass and closes it at the tensor that
    reaches the cap. MG-WFBP merges whole tensors in the same order, so with its blocks' exact sizes as caps (in MiB,
    which is a power of two: nothing is rounded) the buckets are its blocks. They differ where gradients that are ready
    at nearly the same time, as a layer's weight and bias, come in another order than in the profile: a bucket then
    ends a tensor later.
    """
    return [block.size_bytes / _MIB for block in _mgwfbp_plan(profile).blocks]


def bounds(profile: _core.Profile, step_ms: float, mode: str, in_flight: int) -> Bounds:
    """Of a profile whose compute takes as long as a step without communication was measured to take."""
    rescaled = scaled_profile(profile, 1e6 * step_ms / compute_ns(profile))
    assert rescaled.link is not None
    bound = _core.bound(rescaled, rescaled.link, mode="hook" if mode == "hook" else "overlap", in_flight=in_flight)
    return Bounds(bound.plain_ns / 1e6, bound.best_ns / 1e6)


def _mgwfbp_plan(profile: _core.Profile) -> _core.Plan:
    assert profile.link is not None
    return _core.make_plan(profile, profile.link, policy="mgwfbp", mode="hook", in_flight=ddp_baseline.IN_FLIGHT)
