"""Predictions of DDP's buckets and their step time from the measured profile."""

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.lab.variants import DDP_MGWFBP, TORCH_CAPS_MIB, Variant

_MIB = 1 << 20


def ddp_plan(profile: _core.Profile, variant: Variant) -> _core.Plan:
    """DDP's buckets as a plan. REQUIRES: the profile has a link; the variant's mode is "ddp"."""
    if variant.name == DDP_MGWFBP:
        return _mgwfbp_plan(profile)
    caps_mib = variant.caps_mib or TORCH_CAPS_MIB
    return ddp_baseline.plan(profile, (int(caps_mib[0] * _MIB), int(caps_mib[-1] * _MIB)))


def near_best_caps_mib(profile: _core.Profile, factor: float = 1.0) -> list[int]:
    """The bucket size in MiB with which DDP is predicted to be fastest, and its neighbours, among those of a sweep.

    ``factor``: size of the profile's tensors relative to the model's; bucket sizes are scaled like them.
    """
    swept_mib = ddp_baseline.SWEPT_CAPS_MIB
    predicted_ns = [ddp_baseline.plan(profile, ddp_baseline.same_caps(factor * cap)).predicted_ns for cap in swept_mib]
    best = predicted_ns.index(min(predicted_ns))
    return list(swept_mib[max(0, best - 1) : best + 2])


def mgwfbp_caps_mib(profile: _core.Profile) -> list[float]:
    """MG-WFBP's plan as sizes of DDP's buckets in MiB, one per bucket.

    DDP fills a bucket in the order in which gradients came in its first backward pass, and closes it at the tensor that
    reaches the size. MG-WFBP merges whole tensors in the same order, so with its blocks' exact sizes the buckets are
    its blocks. (A MiB is a power of two, so nothing is rounded.) They differ if gradients that are ready at nearly the
    same time, such as a layer's weight and bias, come in another order than in the profile: a bucket then ends one
    tensor later.
    """
    return [block.size_bytes / _MIB for block in _mgwfbp_plan(profile).blocks]


def _mgwfbp_plan(profile: _core.Profile) -> _core.Plan:
    assert profile.link is not None
    return _core.make_plan(
        profile, profile.link, policy="mgwfbp", mode="hook", in_flight=ddp_baseline.in_flight(profile)
    )
