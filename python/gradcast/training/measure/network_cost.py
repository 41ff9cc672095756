"""What the network costs, from how long blocks took: in the warm-up, and in the plan that follows it."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from gradcast import _core

# Below this a plan is not made again: it would not be another one.
_RIGHT = 0.03
# What a line through blocks needs, and how far beyond their sizes it says something of others.
_SIZES_MIN, _REACH = 3, 1.5
_SAMPLES_MIN = 4


@dataclasses.dataclass(frozen=True)
class BlockDuration:
    """A block as one rank saw it, ns: from when it was due there, its gradients ready and the one before it finished,
    until it had finished. The threads that launch it and see its end may wait for a core: that belongs to it.

    ``at_once``: its gradients were ready before the one before it had finished.
    """

    time_ns: float
    at_once: bool


class Sample(NamedTuple):
    """A block as all ranks together saw it, ns: for how long it kept the next one from being sent. ``at_once``: on all
    of them its gradients were ready before the one before it had finished."""

    size_bytes: int
    time_ns: float
    at_once: bool = False


def took(block: _core.BlockRecord) -> BlockDuration:
    return BlockDuration(float(block.finish_ns - block.due_ns), block.due_ns > block.ready_ns)


def samples(block_bytes: Sequence[Sequence[int]], ranks: Sequence[Sequence[Sequence[BlockDuration]]]) -> list[Sample]:
    """``block_bytes``: by step and block; ``ranks``: by rank, step and block."""
    return [
        _of_all(size, [rank[step][block] for rank in ranks])
        for step, sizes in enumerate(block_bytes)
        for block, size in enumerate(sizes)
    ]


def _of_all(size_bytes: int, ranks: Sequence[BlockDuration]) -> Sample:
    """Where some rank's gradients came late, the times of the others hold their waiting for them. Where none did, each
    rank's times add up to the same, but it is now one rank that sees an end late and now another."""
    times_ns = [each.time_ns for each in ranks]
    at_once = all(each.at_once for each in ranks)
    return Sample(size_bytes, statistics.mean(times_ns) if at_once else min(times_ns), at_once)


def saved_after_pause_ns(found: Sequence[Sample]) -> float | None:
    """What a block saves that finds the network idle instead of following another one. None where that cannot be told.

    It is the same time whatever the block's size: switches, token buckets and socket buffers have room again, and it is
    as if the block had begun earlier. Told by sizes that those that follow others have, too: what a network costs
    beyond them their line does not say.
    """
    following = [sample for sample in found if sample.at_once]
    if _size_count(following) < _SIZES_MIN:
        return None
    sizes = [sample.size_bytes for sample in following]
    least_bytes, most_bytes = min(sizes) / _REACH, max(sizes) * _REACH
    cost = _fit(following)
    saved_ns = [
        cost.cost_ns(sample.size_bytes) - sample.time_ns
        for sample in found
        if not sample.at_once and least_bytes <= sample.size_bytes <= most_bytes
    ]
    if len(saved_ns) < _SAMPLES_MIN:
        return None
    return max(0.0, statistics.median(saved_ns))


def in_a_row(found: Sequence[Sample], saved_ns: float = 0.0) -> list[Sample]:
    """The samples as if each block had followed another one.

    Which blocks find the network idle depends on the plan, and they fill pauses: how long a step takes is decided by
    blocks in a row. Mixed, the two bend a fit, to start-up costs of 0 and a network faster than it is. ``saved_ns``:
    what such a block has been found to save before, for samples that do not tell.
    """
    told_ns = saved_after_pause_ns(found)
    added_ns = saved_ns if told_ns is None else told_ns
    return [
        sample if sample.at_once else sample._replace(time_ns=sample.time_ns + added_ns, at_once=added_ns > 0)
        for sample in found
    ]


def fitted(found: Sequence[Sample], pack_ns_per_byte: float) -> _core.LinkModel:
    """REQUIRES: at least one sample."""
    found = in_a_row(found)
    if _size_count(found) >= _SIZES_MIN:
        pieces = _with_stalls(_fit(found), found)
        return _core.LinkModel(all_reduce=pieces, pack_ns_per_byte=pack_ns_per_byte)
    # A model so small that every block has nearly the same size: what it costs is then all there is to know.
    alpha_ns = statistics.median(sample.time_ns for sample in found)
    only = _core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=0)
    return _core.LinkModel(all_reduce=[only], pack_ns_per_byte=pack_ns_per_byte)


def corrected(
    link: _core.LinkModel,
    steps: Sequence[Sequence[Sample]],
    *,
    shared_ns: float | None = None,
    saved_ns: float = 0.0,
) -> _core.LinkModel | None:
    """The link as a plan's own blocks have found it, None where ``link`` is right. ``steps``: of the same blocks each.

    A plan leaves other pauses than the warm-up, and ranks that are not quite in step send one after the other.

    ``shared_ns``: where several blocks may be in flight, what ``link`` says of all of them together; the one sample of
    a step is what they have taken. ``saved_ns``: see in_a_row; of such a sample nothing is left out.
    """
    found = [sample for step in steps for sample in step]
    if shared_ns is None:
        found = in_a_row(found, saved_ns)
    count = len(steps[0])
    steps = [found[first : first + count] for first in range(0, len(found), count)]
    factor = _longer(steps, link, shared_ns)
    if abs(factor - 1) <= _RIGHT:
        return None
    if _size_count(found) < _SIZES_MIN:
        return link.scaled(factor, factor)
    shaped = fitted(found, link.pack_ns_per_byte)
    left = _longer(steps, shaped)
    return shaped.scaled(left, left)


def _longer(steps: Sequence[Sequence[Sample]], link: _core.LinkModel, shared_ns: float | None = None) -> float:
    """How many times what ``link`` says. Of whole steps: now one block is late and now another."""
    return statistics.median(
        _total_ns(step) / (shared_ns or sum(link.all_reduce.cost_ns(sample.size_bytes) for sample in step))
        for step in steps
    )


def spread(found: Sequence[Sample], link: _core.LinkModel, saved_ns: float = 0.0) -> tuple[float, float]:
    """What nine tenths of the samples take at least, and at most, as a share of what the link model says. ``saved_ns``:
    see in_a_row."""
    shares = sorted(sample.time_ns / link.all_reduce.cost_ns(sample.size_bytes) for sample in in_a_row(found, saved_ns))
    return shares[len(shares) // 10], shares[-1 - len(shares) // 10]


def _fit(found: Sequence[Sample]) -> _core.OpCost:
    return _core.fit_op_cost([(sample.size_bytes, sample.time_ns) for sample in found]).cost


def _total_ns(found: Sequence[Sample]) -> float:
    return sum(sample.time_ns for sample in found)


def _size_count(found: Sequence[Sample]) -> int:
    return len({sample.size_bytes for sample in found})


def _with_stalls(cost: _core.OpCost, found: Sequence[Sample]) -> list[_core.LinkPiece]:
    """The fit goes through the middle of the samples, but a plan pays for stalls, too: threads that wait for a core,
    packets that come late. What blocks take above the fit on average, each of them pays. The extreme quarters are left
    out: one disturbed step of those that are measured has no say."""
    above = sorted(sample.time_ns - cost.cost_ns(sample.size_bytes) for sample in found)
    cut = len(above) // 4
    stall_ns = max(0.0, statistics.mean(above[cut : len(above) - cut]))
    return [
        _core.LinkPiece(
            alpha_ns=piece.alpha_ns + stall_ns,
            beta_ns_per_byte=piece.beta_ns_per_byte,
            up_to_bytes=piece.up_to_bytes,
        )
        for piece in cost.pieces
    ]
