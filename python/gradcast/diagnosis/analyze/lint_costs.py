"""Predicts with ``play`` what misconfigurations cost: DDP's step with the gradients or buckets that a fix would bring.

Pure. Thread safety: pure; any thread.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from gradcast import _core
from gradcast.comparison import ddp_baseline

# Candidate caps of all buckets if DDP's first bucket is late; smaller ones than torch's default.
_CAPS_MIB = (1, 2, 4, 8, 16, 25)
_MS = 1e6


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Predicted steps in ms; see the fields of ``lint.Evidence``."""

    predicted_ms: float
    predicted_even_ms: float
    predicted_best_buckets_ms: float
    best_cap_mib: int
    predicted_used_ms: float
    predicted_interface_ms: float | None


def predictions(
    profile: _core.Profile,
    registered: Sequence[str],
    caps_bytes: tuple[int, int],
    *,
    rebuilt: bool,
    interface_gain: float | None = None,
) -> Predictions:
    """Predicts DDP's step as it is and with each fix.

    ``profile`` has a link. ``registered`` are the names of its tensors in the order of registration. ``caps_bytes`` are
    the caps of DDP's first bucket and of the others. ``rebuilt`` is the same with and without each mistake; see
    ``buckets``. ``interface_gain`` is how many times the bytes the better interface carries; None if there is none.
    """

    def step_ms(of: _core.Profile, caps: tuple[int, int], names: Sequence[str] = registered) -> float:
        return _ddp_ms(of, caps) if rebuilt else _laid_out_ms(of, buckets(of, names, caps, rebuilt=False))

    best_cap = min(_CAPS_MIB, key=lambda cap: step_ms(profile, ddp_baseline.same_caps(cap)))
    now_ms = step_ms(profile, caps_bytes)
    return Predictions(
        predicted_ms=now_ms,
        predicted_even_ms=step_ms(with_even_gradients(profile), caps_bytes),
        predicted_best_buckets_ms=min(now_ms, step_ms(profile, ddp_baseline.same_caps(best_cap))),
        best_cap_mib=best_cap,
        predicted_used_ms=step_ms(profile, caps_bytes, _by_ready(profile)[::-1]),
        predicted_interface_ms=interface_gain and step_ms(_with_byte_cost(profile, 1 / interface_gain), caps_bytes),
    )


def with_even_gradients(profile: _core.Profile) -> _core.Profile:
    """Lets gradients become ready evenly over backward, the least urgent first: about what compiling layer by layer
    gives.
    """
    count = len(profile.tensors)
    tensors = [
        _core.Tensor(
            name=tensor.name,
            bytes=tensor.bytes,
            ready_ns=profile.backward_ns * (count - index) / count,
            need_ns=tensor.need_ns,
            update_ns=tensor.update_ns,
            buffer=tensor.buffer,
            element_bytes=tensor.element_bytes,
        )
        for index, tensor in enumerate(profile.tensors)
    ]
    return _with(profile, tensors, profile.link)


def _with_byte_cost(profile: _core.Profile, cost_factor: float) -> _core.Profile:
    """Returns the profile with a link on which bytes cost ``cost_factor`` times as much."""
    return _with(profile, profile.tensors, profile.link.scaled(1, cost_factor))


def _with(profile: _core.Profile, tensors: Sequence[_core.Tensor], link: _core.LinkModel | None) -> _core.Profile:
    return _core.Profile(
        name=profile.name,
        forward_ns=profile.forward_ns,
        backward_ns=profile.backward_ns,
        tensors=tensors,
        world_size=profile.world_size,
        link=link,
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
    closed: dict[int, int] = {}
    for index in (indices[name].pop() for name in order if indices.get(name)):
        buffer = profile.tensors[index].buffer
        if buffer not in open_:
            open_[buffer] = []
            found.append(open_[buffer])
        open_[buffer].append(index)
        cap = caps_bytes[min(closed.get(buffer, 0), 1)]
        if sum(profile.tensors[each].bytes for each in open_[buffer]) >= cap:
            closed[buffer] = closed.get(buffer, 0) + 1
            del open_[buffer]
    return found


def _ddp_ms(profile: _core.Profile, caps_bytes: tuple[int, int]) -> float:
    return ddp_baseline.plan(profile, caps_bytes).predicted_ns / _MS


def _laid_out_ms(profile: _core.Profile, laid_out: Sequence[Sequence[int]]) -> float:
    blocks = [
        _core.Block(ranges=list(_ranges(profile, bucket)), buffer=profile.tensors[bucket[0]].buffer)
        for bucket in laid_out
    ]
    plan = _core.Plan(blocks=blocks, policy="ddp, as registered", mode="hook", in_flight=ddp_baseline.IN_FLIGHT)
    plan.check(profile)
    return _core.play(profile, profile.link, plan).iteration_ns / _MS


def _ranges(profile: _core.Profile, bucket: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of a bucket, ascending and not adjacent."""
    starts, position = [], {}
    for tensor in profile.tensors:
        starts.append(position.get(tensor.buffer, 0))
        position[tensor.buffer] = starts[-1] + tensor.bytes
    low = high = None
    for index in sorted(bucket):
        if starts[index] != high:
            if high is not None:
                yield low, high
            low = starts[index]
        high = starts[index] + profile.tensors[index].bytes
    if high is not None:
        yield low, high
