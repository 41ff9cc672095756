"""Decides when samples move from slow ranks to fast ones, and from which batch on.

All ranks get the same step reports and weights, so they decide the same at the start of the same iteration. Then they
exchange how far each loader has drawn batches, and the new shares hold behind the farthest.

Thread safety: ``ShareSchedule`` any thread; ``Balancing`` the training thread.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradcast import _core, shares
from gradcast.errors import refused
from gradcast.training.plan.step_meter import Iteration
from gradcast.training.ranks.group import Group
from gradcast.training.ranks.step_reports import StepReport
from gradcast.training.step.gradient_exchange import GradientExchange

# A loader that has prefetched more batches than this is not waited for.
_PENDING_ITERATIONS_MAX = 256

# Where a batch begins: its epoch and the number of the epoch's samples before it. The same on all ranks, whichever of
# the batches a program uses.
Place = tuple[int, int]


class ShareSchedule:
    """The shares that hold for each batch. ``batch``: samples of all ranks together.

    ``warn_uneven``: called before shares become uneven for the first time.
    """

    def __init__(self, batch: int, world_size: int, every: int, warn_uneven: Callable[[], None]) -> None:
        """``every``: the steps that are measured before shares change."""
        self.batch, self.every = batch, every
        self._warn_uneven: Callable[[], None] | None = warn_uneven
        self._lock = threading.Lock()  # no batch is drawn while ranks agree
        self._changes: list[tuple[Place | None, tuple[int, ...]]] = [(None, shares.even_shares(batch, world_size))]
        self._drawn: Place = (0, -1)  # the farthest batch

    @property
    def latest(self) -> tuple[int, ...]:
        return self._changes[-1][1]

    def take(self, place: Place, count: int) -> tuple[int, ...]:
        """The samples of each rank in the batch that begins at ``place``, ``count`` in all; its loader draws it."""
        with self._lock:
            self._drawn = max(self._drawn, place)
            held = next(each for since, each in reversed(self._changes) if since is None or since < place)
        return shares.part_of(held, count)

    def change(self, new: tuple[int, ...], farthest: Callable[[Place], Place]) -> Place:
        """Changes shares from the batch behind the returned place on. ``farthest``: of all ranks. Collective."""
        with self._lock:
            since = farthest(self._drawn)
            self._changes.append((since, new))
        if self._warn_uneven is not None and max(new) - min(new) > 1:
            self._warn_uneven()
            self._warn_uneven = None
        return since


@dataclass(frozen=True)
class SamplerCall:
    """A rank's call that makes its sampler. ``settings``: by name, those that must be equal on all ranks."""

    schedule: "ShareSchedule"
    settings: dict[str, Any]


def check_same_sampler(everyone: Sequence[dict[str, Any]]) -> None:
    """Raises Error(invalid_use) if ranks differ. ``everyone``: settings by rank."""
    for other, settings in enumerate(everyone):
        for name, value in everyone[0].items():
            if settings[name] != value:
                raise refused(
                    f"BalancedBatchSampler has {name}={value} on rank 0 and {name}={settings[name]} on rank "
                    f"{other}; give all ranks the same data and arguments, or they use samples twice"
                )


class Balancing:
    """The shares of one training. It outlives sessions."""

    def __init__(self, schedule: ShareSchedule, group: Group) -> None:
        self._schedule, self._group = schedule, group
        self._steps: collections.deque[shares.Step] = collections.deque(maxlen=schedule.every)
        self._ignored = 0  # of the next iterations
        self._before: tuple[int, ...] | None = None  # those that a change has replaced which no step has shown yet
        self._change: shares.Change | None = None
        self._pending = 0  # iterations since that change
        self._deferred = 0  # iterations for which a change of the monitor's has waited
        self._warned = False

    def defers(self, change: _core.Change) -> bool:
        """Returns whether this change, found by the monitor, waits for other shares: these are agreed on, or a rank has
        not been measured long enough."""
        if self._before is not None:
            return True
        if change.cause != "compute" or change.rank < 0 or self._deferred >= self._schedule.every:
            self._deferred = 0
            return False
        self._deferred += 1
        return True

    def begin_session(self, exchange: GradientExchange, lag: int, turns: int) -> None:
        """Forgets measurements of other parameters. Reports come ``lag`` iterations late, and up to ``turns`` - 1 more
        if ranks take turns."""
        self._exchange = exchange
        self._delay = lag + turns - 2
        self._forget()
        self._ignored = lag

    def begin_iteration(
        self, last: Iteration | None, reported: Iteration | None, reports: Sequence[StepReport] | None
    ) -> shares.Change | None:
        """Call this where an iteration begins, with nothing in flight. ``last``: the one before. ``reported``: the one
        that the reports are of. ``reports``: None if they are not known, or not to be used. Returns a change that the
        last iteration was the first to show. Collective in an iteration that decides on a change."""
        if self._before is not None and last is not None:
            return self._shown(last.weights, self._before)
        self._ignored = max(0, self._ignored - 1)
        seen = reported.weights if reported is not None else ()
        if reports is None or self._ignored or not seen or min(seen) <= 0:
            return None
        busy_ns = tuple(report.facts.busy_ns for report in reports)
        self._steps.append(shares.Step(seen, busy_ns, max(report.facts.step_ns for report in reports)))
        if len(self._steps) == self._schedule.every:
            change = shares.choose(self._steps, self._schedule.latest)
            if change is not None:
                self._agree(change)
        return None

    def _agree(self, change: shares.Change) -> None:
        before, group = self._schedule.latest, self._group
        what = "the agreement on the ranks' shares"
        with self._exchange.watch.waiting(what), group.together(what):
            epoch, position = self._schedule.change(change.shares, lambda drawn: max(group.gather(drawn)))
        begun = position + self._schedule.batch
        what = f"{_listed(change.shares)} samples a rank after {begun} samples of epoch {epoch}"
        group.info("%s; %s", change.sentence(), what)
        self._before, self._change, self._pending = before, change, 0

    def _shown(self, last: Sequence[float], before: Sequence[int]) -> shares.Change | None:
        """``last``: weights of the last iteration. ``before``: the shares that a change has replaced."""
        self._pending += 1
        shown = sum(last) > 0 and shares.matches(last, self._schedule.latest, before)
        if not shown and self._pending < _PENDING_ITERATIONS_MAX:
            return None
        if not shown and not self._warned:
            self._warned = True
            self._group.warning(
                "the shares of the ranks have changed %d steps ago, and their weights do not show it; the first tensor "
                "that the module is given must have a row for each sample, otherwise use handle.weight(samples)",
                self._pending,
            )
        change = self._change
        self._forget()
        self._ignored = self._delay  # reports of steps before the change, when they come
        return change

    def _forget(self) -> None:
        self._steps.clear()
        self._before = self._change = None
        self._ignored = self._deferred = 0


def _listed(numbers: Sequence[int]) -> str:
    """Returns "73, 73, 73, 37", or the extremes of many numbers."""
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{min(numbers)} to {max(numbers)}"
