"""What the network costs, from how long blocks took: in the warm-up, and in the plan that follows it."""

import dataclasses
import statistics
from collections.abc import Sequence

from gradcast import _core

# Bytes of a block, and for how long it kept the next one from being sent.
Sample = tuple[int, float]

# Below this a plan is not made again: it would not be another one.
_RIGHT = 0.03


@dataclasses.dataclass(frozen=True)
class Took:
    """A block as one rank saw it, ns: from when it was due there, its gradients ready and the one before it finished,
    until it had finished. The threads that launch it and see its end may wait for a core: that belongs to it.

    ``at_once``: its gradients were ready before the one before it had finished.
    """

    time_ns: float
    at_once: bool


def took(block: _core.BlockRecord) -> Took:
    return Took(float(block.finish_ns - block.due_ns), block.due_ns > block.ready_ns)


def samples(block_bytes: Sequence[Sequence[int]], ranks: Sequence[Sequence[Sequence[Took]]]) -> list[Sample]:
    """``block_bytes``: by step and block; ``ranks``: by rank, step and block."""
    return [
        (size, _of_all([rank[step][block] for rank in ranks]))
        for step, sizes in enumerate(block_bytes)
        for block, size in enumerate(sizes)
    ]


def _of_all(ranks: Sequence[Took]) -> float:
    """Where some rank's gradients came late, the times of the others hold their waiting for them. Where none did, each
    rank's times add up to the same, but it is now one rank that sees an end late and now another."""
    times_ns = [each.time_ns for each in ranks]
    return statistics.mean(times_ns) if all(each.at_once for each in ranks) else min(times_ns)


def fitted(found: Sequence[Sample], pack_ns_per_byte: float) -> _core.LinkModel:
    """REQUIRES: at least one sample."""
    if _size_count(found) >= 3:
        pieces = _with_stalls(_core.fit_op_cost(found).cost, found)
        return _core.LinkModel(all_reduce=pieces, pack_ns_per_byte=pack_ns_per_byte)
    # A model so small that every block has nearly the same size: what it costs is then all there is to know.
    alpha_ns = statistics.median(time for _, time in found)
    only = _core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=0)
    return _core.LinkModel(all_reduce=[only], pack_ns_per_byte=pack_ns_per_byte)


def corrected(
    link: _core.LinkModel, steps: Sequence[Sequence[Sample]], *, shared_ns: float | None = None
) -> _core.LinkModel | None:
    """The link as a plan's own blocks have found it, None where ``link`` is right. ``steps``: of the same blocks each.

    A block that finds the network idle costs less than one that follows another: switches and token buckets have room
    again, and ranks that are not quite in step send one after the other. A plan leaves other pauses than the warm-up.

    ``shared_ns``: where several blocks may be in flight, what ``link`` says of all of them together; the one sample of
    a step is what they have taken.
    """
    # Of whole steps: now one block is late and now another.
    usual_ns = statistics.median(sum(time for _, time in step) for step in steps)
    factor = usual_ns / (shared_ns or _together_ns(link, steps[0]))
    if abs(factor - 1) <= _RIGHT:
        return None
    if _size_count(steps[0]) < 3:
        return link.scaled(factor, factor)
    shaped = fitted([sample for step in steps for sample in step], link.pack_ns_per_byte)
    left = usual_ns / _together_ns(shaped, steps[0])
    return shaped.scaled(left, left)


def spread(found: Sequence[Sample], link: _core.LinkModel) -> tuple[float, float]:
    """What nine tenths of the samples take at least, and at most, as a share of what the link model says."""
    shares = sorted(time / link.all_reduce.cost_ns(size) for size, time in found)
    return shares[len(shares) // 10], shares[-1 - len(shares) // 10]


def _together_ns(link: _core.LinkModel, step: Sequence[Sample]) -> float:
    return sum(link.all_reduce.cost_ns(size) for size, _ in step)


def _size_count(found: Sequence[Sample]) -> int:
    return len({size for size, _ in found})


def _with_stalls(cost: _core.OpCost, found: Sequence[Sample]) -> list[_core.LinkPiece]:
    """The fit goes through the middle of the samples, but a plan pays for stalls, too: threads that wait for a core,
    packets that come late. What blocks take above the fit on average, each of them pays. The extreme quarters are left
    out: one disturbed step of those that are measured has no say."""
    above = sorted(time - cost.cost_ns(size) for size, time in found)
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
