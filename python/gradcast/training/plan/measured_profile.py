"""The profile of a plan, from the measurements of all ranks."""

import math
import statistics
from collections.abc import Sequence

from gradcast import _core
from gradcast.comparison.powersgd import with_shapes
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.measure.host_cost import HostTimes
from gradcast.training.measure.stopwatch import Measurement
from gradcast.training.measure.unseen_reads import agreed_reads
from gradcast.training.step.gradient_buffers import GradientSizes
from gradcast.training.step.step_message import MESSAGE_NAME


def layout_profile(sizes: GradientSizes, order: Sequence[int], *, world_size: int, name: str) -> _core.Profile:
    """A profile that states an order and no times: tensors are needed one after the other and ready in reverse, at
    intervals of 1 ns."""
    count = len(order)
    tensors = [
        _tensor(sizes, index, ready_ns=count - 1 - position, need_ns=position, update_ns=0)
        for position, index in enumerate(order)
    ]
    return _core.Profile(name=name, forward_ns=count, backward_ns=count, tensors=tensors, world_size=world_size)


def combine_measurements(ranks: Sequence[Measurement], sizes: GradientSizes) -> _core.Profile:
    """One profile of all ranks' measurements.

    Gradients are ready when they are on the slowest rank, since a block needs every rank's. Other times are medians.
    The step message is ready with the last gradient, and needed with the first.
    """
    count = len(sizes.names)
    link = None
    if len(ranks) > 1:
        link = network_cost.fit_link(block_samples(ranks), statistics.median(rank.pack_ns_per_byte for rank in ranks))
    typical = [compute_cost.typical_compute([[each] for each in rank.compute if each is not None]) for rank in ranks]
    backward_ns = max(each.backward_ns for each in typical)
    forward_ns = statistics.median(each.forward_ns for each in typical)
    update_ns = statistics.median(each.update_ns for each in typical)
    updated = [index for index in range(count) if sizes.is_gradient(index)]  # our own tensors need no update
    update_ns_per_byte = update_ns / max(1, sum(sizes.bytes_of(index) for index in updated))
    unseen = agreed_reads([rank.unseen_reads for rank in ranks])
    ready_ns, need_ns = [], []
    for index in range(count):
        ready_ns.append(max(rank.ready_ns[index] for rank in ranks))
        # Forward waits for a parameter before it begins, if it reads that unseen and not inside a known module.
        needed_first = index in unseen and not unseen[index].module
        needs_ns = [rank.need_ns[index] for rank in ranks if index not in unseen or index in rank.unseen_reads]
        need_ns.append(0.0 if needed_first else statistics.median(needs_ns))
    if MESSAGE_NAME in sizes.names:  # a single worker has none
        message = sizes.names.index(MESSAGE_NAME)
        ready_ns[message] = max(ready_ns[index] for index in range(count) if sizes.is_gradient(index))
        need_ns[message] = min(need_ns)
    tensors = [
        _tensor(
            sizes,
            index,
            ready_ns=round(min(ready_ns[index], backward_ns)),
            need_ns=round(min(need_ns[index], forward_ns)),
            update_ns=round(update_ns_per_byte * sizes.bytes_of(index) * sizes.is_gradient(index)),
        )
        for index in sizes.order_of_warmup
    ]
    profile = _core.Profile(
        name="measured",
        forward_ns=math.ceil(forward_ns),
        backward_ns=math.ceil(backward_ns),
        tensors=tensors,
        world_size=len(ranks),
        link=link,
        part_ns=statistics.median(rank.part_ns for rank in ranks),
    )
    profile = with_host_times(profile, [rank.host for rank in ranks])
    profile = with_shapes(profile, {name: sizes.shape_of(index).shape for index, name in enumerate(sizes.names)})
    steps = compute_cost.steps_known_on_all_ranks([rank.compute for rank in ranks])
    return compute_cost.replace_compute(profile, compute_cost.typical_compute(steps)) if steps else profile


def with_host_times(profile: _core.Profile, ranks: Sequence[HostTimes]) -> _core.Profile:
    """The profile with the medians of the ranks' times."""
    step_ns, part_ns, block_ns = (statistics.median(times) for times in zip(*ranks, strict=True))
    return profile.replace(host_step_ns=step_ns, host_part_ns=part_ns, host_block_ns=block_ns)


def block_samples(ranks: Sequence[Measurement]) -> list[network_cost.Sample]:
    """The warm-up's samples, step by step, each of all ranks together."""
    steps = zip(*(rank.blocks for rank in ranks), strict=True)
    return [sample for step in steps for sample in network_cost.combined(step)]


def with_message_joined(profile: _core.Profile) -> _core.Profile:
    """Returns the profile as if the step message were a part of the tensor behind it in its buffer. Plans for one of
    the two are plans for the other: for policies that send whole tensors, which would give the message an operation of
    its own."""
    message, *others = profile.tensors
    if message.name != MESSAGE_NAME:
        return profile
    place = next(place for place, each in enumerate(others) if each.buffer == message.buffer)
    joined = others[place]
    others[place] = joined.replace(bytes=joined.bytes + message.bytes, ready_ns=message.ready_ns)
    return profile.replace(tensors=others)


def _tensor(sizes: GradientSizes, index: int, *, ready_ns: float, need_ns: float, update_ns: float) -> _core.Tensor:
    return _core.Tensor(
        name=sizes.names[index],
        bytes=sizes.bytes_of(index),
        buffer=sizes.buffer_of[index],
        element_bytes=sizes.unit_bytes_of(index),
        ready_ns=ready_ns,
        need_ns=need_ns,
        update_ns=update_ns,
    )
