"""Exchanges of ranks that make local optimizer steps: the schedule of a round, and the expected step time.

Every ``every`` steps (H) the ranks average the differences of their parameters to a copy that all of them have, the
global copy. In the streamed form (Streaming DiLoCo, arXiv 2501.18512) the parameters are cut into fragments of about
equal size, which are taken one after the other, and each is applied ``overlap`` steps (tau) after it was taken: it is
sent during the steps between. In the blocking form (``overlap`` 0; DiLoCo, arXiv 2311.08105) all are
taken and applied in the same step.

Everything follows from sizes and options, so that all ranks agree, and the numbers never depend on the network.

Thread safety: pure; any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Cuts lie at multiples of so many elements of a parameter: a wire format has one scale for as many.
CUT_ELEMENTS = 128
# Smaller fragments would cost their start-up times only (0.1 to 0.5 ms over TCP; 64 KiB take as long on 1 Gbit/s).
STREAMED_BYTES_MIN = 2**16
# In the blocking form, the next fragment is written while one is sent; as large as DDP's buckets.
BLOCKING_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Slice:
    """Elements ``[lo, hi)`` of the parameter with this index."""

    parameter: int
    lo: int
    hi: int


@dataclass(frozen=True)
class Schedule:
    """``every``: H, in steps. ``overlap``: tau, in steps, less than H. ``fragments``: in the order in which they are
    taken.

    Fragment k of K is taken after step ``H + floor(k H / K)`` for the first time (in the blocking form after step H),
    and every H steps from then on. So the first H steps send nothing, and each difference is that of H steps.
    """

    every: int
    overlap: int
    fragments: tuple[tuple[Slice, ...], ...]

    def taken(self, step: int) -> list[int]:
        """Returns the fragments that are taken after this step, counted from 1."""
        if step < self.every:
            return []
        return [k for k in range(len(self.fragments)) if step % self.every == self._offset(k)]

    def applied(self, step: int) -> list[int]:
        """Returns the fragments that are applied after this step, before any is taken."""
        return self.taken(step - self.overlap) if self.overlap else []

    def at(self, every: int, overlap: int | None) -> "Schedule":
        """Returns the same fragments with another H. ``overlap``: as for ``make_schedule``, at most ``every - 1``."""
        return replace(self, every=every, overlap=_overlap(every, overlap, len(self.fragments)))

    def _offset(self, fragment: int) -> int:
        return fragment * self.every // len(self.fragments) if self.overlap else 0


def make_schedule(sizes: Sequence[tuple[int, int]], every: int, overlap: int | None) -> Schedule:
    """Makes a schedule. ``sizes``: elements of each parameter and bytes of one, in the order of first use.

    ``overlap``: by default the steps between two fragments and one more, at most ``every - 1``.

    REQUIRES: ``every`` is at least 1, ``overlap`` from 0 to ``every - 1``.
    """
    total_bytes = sum(count * width for count, width in sizes)
    is_streamed = every > 1 if overlap is None else overlap > 0
    if is_streamed:
        count = min(every, max(1, total_bytes // STREAMED_BYTES_MIN))
    else:
        count = max(1, round(total_bytes / BLOCKING_BYTES))
    fragments = cut(sizes, count)
    return Schedule(every, _overlap(every, overlap, len(fragments)), fragments)


def _overlap(every: int, asked: int | None, count: int) -> int:
    return min(-(-every // count) + 1 if asked is None else asked, every - 1)


def cut(sizes: Sequence[tuple[int, int]], count: int) -> tuple[tuple[Slice, ...], ...]:
    """At most ``count`` fragments of about equal bytes; cuts lie at multiples of CUT_ELEMENTS of a parameter."""
    total_bytes = sum(elements * width for elements, width in sizes)
    fragments: list[list[Slice]] = [[]]
    done_bytes = 0
    for index, (elements, width) in enumerate(sizes):
        lo = 0
        while lo < elements:
            goal_bytes = total_bytes * len(fragments) // count
            room = (goal_bytes - done_bytes) // width
            hi = min(elements, lo + max(CUT_ELEMENTS, -(-room // CUT_ELEMENTS) * CUT_ELEMENTS))
            fragments[-1].append(Slice(index, lo, hi))
            done_bytes += (hi - lo) * width
            lo = hi
            if done_bytes >= goal_bytes and done_bytes < total_bytes:
                fragments.append([])
    return tuple(map(tuple, fragments))


def predicted_step_ns(compute_ns: float, communication_ns: float, every: int, *, is_streamed: bool) -> float:
    """The mean step. ``communication_ns``: of all fragments of a round together."""
    share_ns = communication_ns / every
    return max(compute_ns, share_ns) if is_streamed else compute_ns + share_ns
