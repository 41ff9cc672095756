"""What mistakes cost, by ``play``: DDP's step with the gradients, or with the buckets, that it would have without them.

Pure. Thread safety: pure; any thread.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from gradcast import _core, stock_ddp

# Of all buckets, where DDP's first is late: smaller ones than torch's.
_CAPS_MIB = (1, 2, 4, 8, 16, 25)
_MS = 1e6


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Steps in ms, as ``lint.Facts`` has them."""

    predicted_ms: float
    predicted_even_ms: float
    predicted_best_buckets_ms: float
    predicted_registered_ms: float
    predicted_used_ms: float


def predictions(
    profile: _core.Profile, registered: Sequence[str], caps_bytes: tuple[int, int], *, rebuilt: bool
) -> Predictions:
    """``profile``: with its link. ``registered``: names of its tensors in the module's order. ``caps_bytes``: of DDP's
    first bucket, and of the others. ``rebuilt``: whether DDP lays its buckets out anew by when gradients come, as it
    does without find_unused_parameters."""
    used_ms = _ddp_ms(profile, caps_bytes)
    registered_ms = _laid_out_ms(profile, list(reversed(registered)), caps_bytes)
    tried = [caps_bytes, *map(stock_ddp.same_caps, _CAPS_MIB)]
    return Predictions(
        predicted_ms=used_ms if rebuilt else registered_ms,
        predicted_even_ms=_ddp_ms(with_even_gradients(profile), caps_bytes),
        predicted_best_buckets_ms=min(_ddp_ms(profile, caps) for caps in tried),
        predicted_registered_ms=registered_ms,
        predicted_used_ms=used_ms,
    )


def with_even_gradients(profile: _core.Profile) -> _core.Profile:
    """The least urgent first, evenly over backward: about what a model gives whose blocks are compiled one by one."""
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
    return _core.Profile(
        name=profile.name,
        forward_ns=profile.forward_ns,
        backward_ns=profile.backward_ns,
        tensors=tensors,
        world_size=profile.world_size,
        link=profile.link,
    )


def buckets(profile: _core.Profile, order: Sequence[str], caps_bytes: tuple[int, int]) -> list[list[int]]:
    """Indices of tensors: as DDP fills buckets in an order, one after the other for each kind of buffer. They are sent
    in this order. Names that the profile does not have are passed over: nothing of them travels."""
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
    return stock_ddp.plan(profile, caps_bytes).predicted_ns / _MS


def _laid_out_ms(profile: _core.Profile, order: Sequence[str], caps_bytes: tuple[int, int]) -> float:
    blocks = [
        _core.Block(ranges=list(_ranges(profile, bucket)), buffer=profile.tensors[bucket[0]].buffer)
        for bucket in buckets(profile, order, caps_bytes)
    ]
    plan = _core.Plan(blocks=blocks, policy="ddp, as registered", mode="hook", in_flight=stock_ddp.IN_FLIGHT)
    plan.check(profile)
    return _core.play(profile, profile.link, plan).iteration_ns / _MS


def _ranges(profile: _core.Profile, bucket: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending, and none begins where another ends."""
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
