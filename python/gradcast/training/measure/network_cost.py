"""Network cost from measured block times: during the warm-up, and under the plan that follows it."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from gradcast import _core

# A link that is off by less is not corrected: the plan would come out the same.
_ACCURATE_SHARE = 0.03
# A fitted line needs so many different sizes, and holds up to this factor beyond them.
_SIZES_MIN, _REACH = 3, 1.5
_SAMPLES_MIN = 4


class Sample(NamedTuple):
    """Duration of a block, ns, on one rank or on all together.

    On a rank it counts from when the block could start (its gradients ready and the previous block finished) until it
    finished. That includes the time for which the threads that launch it and see its end wait for a core, unless the
    device has timed it (``Nccl.event_times``). On all ranks together it counts for how long the block kept the next one
    from being sent.

    ``back_to_back``: its gradients were ready before the previous block had finished, on all these ranks.
    """

    size_bytes: int
    time_ns: float
    back_to_back: bool = False


def samples_of_rank(plan: _core.Plan, blocks: Sequence[_core.BlockRecord]) -> list[Sample]:
    """This rank's samples of one iteration. ``blocks``: the records of the plan's blocks."""
    return [
        Sample(
            block.size_bytes, float(times.device_ns or times.finish_ns - times.due_ns), times.due_ns > times.ready_ns
        )
        for block, times in zip(plan.blocks, blocks, strict=True)
    ]


def combined(ranks: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples of one step on all ranks together. ``ranks``: by rank and block."""
    return [_combined(each) for each in zip(*ranks, strict=True)]


def _combined(ranks: Sequence[Sample]) -> Sample:
    """If some rank's gradients came late, the other ranks' times include waiting for it, and the shortest time counts.
    Otherwise the mean does: the times of all ranks add up to the same, but different ranks see an end late."""
    times_ns = [each.time_ns for each in ranks]
    back_to_back = all(each.back_to_back for each in ranks)
    time_ns = statistics.mean(times_ns) if back_to_back else min(times_ns)
    return Sample(ranks[0].size_bytes, time_ns, back_to_back)


def idle_saving_ns(found: Sequence[Sample]) -> float | None:
    """Returns the time that a block saves if it finds the network idle instead of following another one. None if the
    samples do not show it.

    The saving does not depend on the block's size: switches, token buckets and socket buffers have room again, as if
    the block had begun earlier. Only blocks of about the sizes of the back-to-back ones count: their fitted line says
    nothing about what a network costs beyond them.
    """
    back_to_back = [sample for sample in found if sample.back_to_back]
    if _size_count(back_to_back) < _SIZES_MIN:
        return None
    sizes = [sample.size_bytes for sample in back_to_back]
    least_bytes, most_bytes = min(sizes) / _REACH, max(sizes) * _REACH
    cost = _fit(back_to_back)
    savings_ns = [
        cost.cost_ns(sample.size_bytes) - sample.time_ns
        for sample in found
        if not sample.back_to_back and least_bytes <= sample.size_bytes <= most_bytes
    ]
    if len(savings_ns) < _SAMPLES_MIN:
        return None
    return max(0.0, statistics.median(savings_ns))


def as_back_to_back(found: Sequence[Sample], known_saving_ns: float = 0.0) -> list[Sample]:
    """The samples as if each block had followed another one.

    Which blocks find the network idle depends on the plan, and they fill pauses; the length of a step is decided by
    back-to-back blocks. A fit of both kinds is biased: it finds start-up costs of 0 and a network faster than it is.

    ``known_saving_ns``: the saving found before, used if these samples do not show it.
    """
    saving_ns = idle_saving_ns(found)
    added_ns = known_saving_ns if saving_ns is None else saving_ns
    return [
        sample if sample.back_to_back else sample._replace(time_ns=sample.time_ns + added_ns, back_to_back=added_ns > 0)
        for sample in found
    ]


def fit_link(found: Sequence[Sample], pack_ns_per_byte: float) -> _core.LinkModel:
    """A link model of the samples. REQUIRES: at least one sample."""
    found = as_back_to_back(found)
    if _size_count(found) >= _SIZES_MIN:
        pieces = _with_stalls(_fit(found), found)
        return _core.LinkModel(all_reduce=pieces, pack_ns_per_byte=pack_ns_per_byte)
    # In a model so small that all blocks have nearly the same size, one cost is all that can be known.
    alpha_ns = statistics.median(sample.time_ns for sample in found)
    only = _core.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=0)
    return _core.LinkModel(all_reduce=[only], pack_ns_per_byte=pack_ns_per_byte)


def corrected_link(
    link: _core.LinkModel,
    steps: Sequence[Sequence[Sample]],
    *,
    shared_ns: float | None = None,
    known_saving_ns: float = 0.0,
) -> _core.LinkModel | None:
    """The link that a plan's own blocks show, or None if ``link`` is accurate.

    It may differ from the warm-up's: a plan leaves other pauses, and ranks that are slightly out of step send one after
    the other.

    ``steps``: samples by step, of the same blocks in each. ``shared_ns``: if several blocks may be in flight, what
    ``link`` predicts for all blocks of a step together; each step then has one sample, the time of all of them.
    ``known_saving_ns``: see as_back_to_back; not used with ``shared_ns``.
    """
    found = [sample for step in steps for sample in step]
    if shared_ns is None:
        found = as_back_to_back(found, known_saving_ns)
    count = len(steps[0])
    steps = [found[first : first + count] for first in range(0, len(found), count)]
    ratio = _median_ratio(steps, link, shared_ns)
    if abs(ratio - 1) <= _ACCURATE_SHARE:
        return None
    if _size_count(found) < _SIZES_MIN:
        return link.scaled(ratio, ratio)
    fitted = fit_link(found, link.pack_ns_per_byte)
    remaining_ratio = _median_ratio(steps, fitted)
    return fitted.scaled(remaining_ratio, remaining_ratio)


def _median_ratio(steps: Sequence[Sequence[Sample]], link: _core.LinkModel, shared_ns: float | None = None) -> float:
    """Median ratio of measured to modelled communication time per step. Whole steps are compared, because a different
    block is late in each."""
    return statistics.median(
        sum(sample.time_ns for sample in step)
        / (shared_ns or sum(link.all_reduce.cost_ns(sample.size_bytes) for sample in step))
        for step in steps
    )


def cost_spread(found: Sequence[Sample], link: _core.LinkModel, known_saving_ns: float = 0.0) -> tuple[float, float]:
    """First and last decile of the ratios of measured to modelled block times. ``known_saving_ns``: see
    as_back_to_back."""
    ratios = sorted(
        sample.time_ns / link.all_reduce.cost_ns(sample.size_bytes)
        for sample in as_back_to_back(found, known_saving_ns)
    )
    return ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]


def _fit(found: Sequence[Sample]) -> _core.OpCost:
    return _core.fit_op_cost([(sample.size_bytes, sample.time_ns) for sample in found]).cost


def _size_count(found: Sequence[Sample]) -> int:
    return len({sample.size_bytes for sample in found})


def _with_stalls(cost: _core.OpCost, found: Sequence[Sample]) -> list[_core.LinkPiece]:
    """Adds the blocks' mean excess over the fit to each start-up cost.

    The fit goes through the middle of the samples, but a plan also pays for stalls: threads that wait for a core,
    packets that come late. The first and last quarter are omitted, so that one disturbed step does not count.
    """
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
