"""Predicts with ``play`` what misconfigurations cost: DDP's step with gradients or buckets as a fix would have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradcast import _core
from gradcast.comparison import ddp_baseline
from gradcast.diagnosis.analyze.estimates import Estimate
from gradcast.diagnosis.analyze.measurements import TrainingSetup
from gradcast.intervals import united

# Candidate caps of all buckets if DDP's first bucket is late; smaller ones than torch's default.
_CAPS_MIB = (1, 2, 4, 8, 16, 25)
# Share of the step; predictions by `play` are not more accurate than this.
_ERROR = 0.01
_MS = 1e6


@dataclass(frozen=True)
class Layout:
    """Ready times of gradients, and DDP's buckets.

    ``buckets`` are in the order in which they are sent, as indices into ``ready_ms``, which is from the start of
    backward. ``best_cap_mib`` is the bucket size with the shortest predicted step.
    """

    ready_ms: Sequence[float]
    backward_ms: float
    buckets: Sequence[Sequence[int]]
    best_cap_mib: int


def predicted(
    profile: _core.Profile, setup: TrainingSetup, step_ms: float, interface_gain: float | None = None
) -> tuple[Layout, dict[str, Estimate]]:
    """Returns DDP's layout, and by mistake what it costs: how much shorter the step is predicted to be without it.

    ``profile`` has a link. ``step_ms`` is the measured step. ``interface_gain`` is how many times the bytes the better
    interface carries; None if there is none. Whether DDP rebuilds its buckets is the same with and without each
    mistake.
    """
    registered, caps_bytes, rebuilt = list(setup.parameter_bytes), setup.caps_bytes, setup.rebuilt

    def ddp_ms(
        of: _core.Profile = profile,
        caps: tuple[int, int] = caps_bytes,
        names: Sequence[str] = registered,
        link: _core.LinkModel | None = None,
    ) -> float:
        if rebuilt:
            return ddp_baseline.plan(of, caps, link).predicted_ns / _MS
        return laid_out_ms(of, buckets(of, names, caps, rebuilt=False), link)

    by_cap = {cap: ddp_ms(caps=ddp_baseline.same_caps(cap)) for cap in _CAPS_MIB}
    best_cap = min(by_cap, key=lambda cap: by_cap[cap])
    now_ms, even_ms = ddp_ms(), ddp_ms(_with_even_gradients(profile))
    without_ms = {
        "whole_graph_compiled": even_ms,
        "gradients_at_the_end": even_ms,
        "late_first_bucket": min(now_ms, by_cap[best_cap]),
        "parameter_order": ddp_ms(names=_by_ready(profile)[::-1]),
    }
    if interface_gain is not None:
        without_ms["interface"] = ddp_ms(link=profile.link.scaled(1, 1 / interface_gain))
    error_ms = _ERROR * step_ms
    costs_ms = {key: now_ms - ms for key, ms in without_ms.items()}
    laid_out = buckets(profile, registered, caps_bytes, rebuilt=rebuilt)
    layout = Layout([each.ready_ns / _MS for each in profile.tensors], profile.backward_ns / _MS, laid_out, best_cap)
    return layout, {key: Estimate(ms, ms - error_ms, ms + error_ms) for key, ms in costs_ms.items()}


def _with_even_gradients(profile: _core.Profile) -> _core.Profile:
    """Spreads ready times evenly over backward, the least urgent first, about as with layers compiled one by one."""
    count = len(profile.tensors)
    return profile.replace(
        tensors=[
            tensor.replace(ready_ns=round(profile.backward_ns * (1 - index / count)))
            for index, tensor in enumerate(profile.tensors)
        ]
    )


def buckets(
    profile: _core.Profile, registered: Sequence[str], caps_bytes: tuple[int, int], *, rebuilt: bool
) -> list[list[int]]:
    """Returns DDP's buckets in the order in which DDP sends them, as indices of tensors.

    If ``rebuilt``, DDP fills them in the order in which gradients become ready, as it does with a static graph or
    without find_unused_parameters. Otherwise it fills them in the order of registration and sends the last one first,
    so that the bucket with the first cap is sent last (torch/nn/parallel/distributed.py, _ddp_init_helper).
    """
    if rebuilt:
        return _filled(profile, _by_ready(profile), caps_bytes)
    return _filled(profile, registered, caps_bytes)[::-1]


def _by_ready(profile: _core.Profile) -> list[str]:
    return [tensor.name for tensor in sorted(profile.tensors, key=lambda tensor: tensor.ready_ns)]


def _filled(profile: _core.Profile, order: Sequence[str], caps_bytes: tuple[int, int]) -> list[list[int]]:
    """Fills buckets one after the other for each buffer; they are in the order in which their first tensors came.

    Skips names that the profile does not have, because these parameters have no traffic.
    """
    indices: dict[str, list[int]] = {}
    for index, tensor in enumerate(profile.tensors):
        indices.setdefault(tensor.name, []).append(index)
    found: list[list[int]] = []
    open_: dict[int, list[int]] = {}
    caps: dict[int, int] = {}
    for index in (indices[name].pop() for name in order if indices.get(name)):
        buffer = profile.tensors[index].buffer
        if buffer not in open_:
            open_[buffer] = []
            found.append(open_[buffer])
        open_[buffer].append(index)
        if sum(profile.tensors[each].bytes for each in open_[buffer]) >= caps.get(buffer, caps_bytes[0]):
            caps[buffer] = caps_bytes[1]
            del open_[buffer]
    return found


def laid_out_ms(
    profile: _core.Profile, laid_out: Sequence[Sequence[int]], link: _core.LinkModel | None = None
) -> float:
    places, ends = [], dict[int, int]()  # in the tensors' buffers
    for tensor in profile.tensors:
        start = ends.get(tensor.buffer, 0)
        ends[tensor.buffer] = start + tensor.bytes
        places.append((start, ends[tensor.buffer]))
    blocks = [
        _core.Block(ranges=united(places[index] for index in bucket), buffer=profile.tensors[bucket[0]].buffer)
        for bucket in laid_out
    ]
    in_flight = ddp_baseline.in_flight(profile)
    plan = _core.Plan(blocks=blocks, policy="ddp, as registered", mode="hook", in_flight=in_flight)
    plan.check(profile)
    return _core.play(profile, link or profile.link, plan).iteration_ns / _MS
