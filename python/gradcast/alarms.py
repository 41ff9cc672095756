"""Alarms: steps take longer than expected, and why. Pure: ranks decide the same from the same steps.

The monitor (include/gradcast/monitor.h) compares a step with those before it. Alarms compare it with the expected time,
which does not move when a training gets slower and slower. Each cause has a one-sided cumulative sum (E. S.
Page, *Continuous inspection schemes*, Biometrika 41, 1954) of the share of a step that it costs::

    sum = max(0, sum + min((value - expected) / step / allowed, 2) - 1),     alarm: sum > 11, over: sum = 0

So noise around what is allowed adds nothing, twice as much or more alarms after 12 steps, and no single step does. The
numbers 2 and 11 come from published speeds of clusters (docs/evaluation/predictions.md).
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from gradcast.documents import list_of, number, record, whole

COMPUTE, DATA, LINK, WORKERS = "compute", "data", "link", "workers"
# By cause: the share of a step that it may cost.
_ALLOWED = {COMPUTE: 0.05, DATA: 0.015, LINK: 0.05, WORKERS: 0.067}
CAUSES = tuple(_ALLOWED)

_CLIP = 2.0
_LIMIT = 11.0
# What is not predicted is learned from the first steps. They also show how much single steps vary: so many standard
# deviations are allowed, and as many ms, which a busy machine takes from any step.
_SETTLING_STEPS, _LEARNING_STEPS = 2, 12
_DEVIATIONS, _LEAST_MS = 3.0, 2.0
_DEVIATION_OF_MEDIAN = 1.4826  # standard deviation over median absolute deviation
# First steps that are nearer to the prediction than this correct it.
_TOLERANCE = 0.10
_KEPT = 100  # alarms that are over


_MS = number(1e-9, 1e10, or_zero=True)  # so that no ratio of two overflows
_OBSERVATION = record(
    {"step": whole(0, 2**53), "step_ms": _MS},
    dict.fromkeys(("expected_ms", "link_ms", "expected_link_ms"), _MS)
    | dict.fromkeys(("compute_ms", "data_ms"), list_of(_MS)),
)


@dataclasses.dataclass(frozen=True)
class Observation:
    """One step. ``step_ms``: of the slowest rank. ``compute_ms``: passes of each rank, without waits for gradients.
    ``data_ms``: time of each rank between its passes, such as data loading. ``link_ms``: time during which blocks were
    on the network. Unknown values are None, 0 or empty."""

    step: int
    step_ms: float
    expected_ms: float | None = None
    compute_ms: tuple[float, ...] = ()
    data_ms: tuple[float, ...] = ()
    link_ms: float | None = None
    expected_link_ms: float | None = None

    @classmethod
    def read(cls, fields: Any) -> "Observation":
        """A reader (documents.py) of dicts like ``handle.stats()["observed"]``."""
        found = _OBSERVATION(fields)
        names = [field.name for field in dataclasses.fields(cls) if found.get(field.name) is not None]
        values: Any = {name: tuple(found[name]) if isinstance(found[name], list) else found[name] for name in names}
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Alarm:
    """``cause``: "compute" (a rank computes longer), "data" (it spends longer between its passes), "link" (blocks take
    longer), "workers" (none of these, but steps take longer). ``rank``: None for most ranks, or no rank. ``step``,
    ``since_step``: where it was raised, and where the cause began. ``step_ms``, ``expected_ms``: of a step.
    ``value_ms``, ``reference_ms``: measured and expected. ``until_step``: None while it lasts. ``hosts``:
    the two whose link is slow, or the one whose links are, numbered in the order of their first ranks; () if no link is
    clearly slower than the others, None if not known."""

    cause: str
    rank: int | None
    step: int
    since_step: int
    step_ms: float
    expected_ms: float
    value_ms: float
    reference_ms: float
    sentence: str
    until_step: int | None = None
    hosts: tuple[int, ...] | None = None

    @property
    def slowdown(self) -> float:
        """Measured over expected time for this cause."""
        return self.value_ms / self.reference_ms if self.reference_ms else float("inf")


class _Sum:
    """The cumulative sum of one number, and its mean since the sum was 0."""

    __slots__ = ("allowed", "count", "reference", "since", "spread_ms", "total", "value")

    def __init__(self, allowed: float, reference: float = 0.0, spread_ms: float = 0.0) -> None:
        self.allowed, self.reference, self.spread_ms = allowed, reference, spread_ms
        self.value, self.total, self.count, self.since = 0.0, 0.0, 0, 0

    def add(self, observed: Observation, value_ms: float, expected_ms: float) -> None:
        allowed_ms = max(self.allowed * observed.step_ms, self.spread_ms)
        excess = max(-_CLIP, min(_CLIP, (value_ms - expected_ms) / allowed_ms))
        grown = min(self.value + excess - 1, _LIMIT + _CLIP)
        if grown <= 0:
            self.value, self.total, self.count = 0.0, 0.0, 0
            return
        if self.value == 0:
            self.since = observed.step
        self.value = grown
        self.total += value_ms
        self.count += 1
        self.reference = expected_ms

    @property
    def mean_ms(self) -> float:
        return self.total / self.count if self.count else self.reference

    @property
    def lost_ms(self) -> float:
        return self.mean_ms - self.reference


class Alarms:
    """``world_size``: number of ranks. ``exact``: the expected step is right as it is, and nothing else is known.
    ``link_bits``: bits that leave the busiest host in a step, to speak of rates; None if not known."""

    def __init__(self, world_size: int, *, exact: bool = False, link_bits: float | None = None) -> None:
        self._world_size, self._exact, self.link_bits = world_size, exact, link_bits
        self._active: dict[str, Alarm] = {}
        self._over: list[Alarm] = []
        self.learn()

    @property
    def active(self) -> list[Alarm]:
        return list(self._active.values())

    @property
    def all(self) -> list[Alarm]:
        """All alarms in the order in which they were raised, active ones included."""
        return sorted([*self._over, *self._active.values()], key=lambda alarm: alarm.step)

    def learn(self, step: int = 0) -> None:
        """Ends all alarms and learns unpredicted times again from the next steps. ``step``: the last step."""
        for cause in list(self._active):
            self._end(cause, step)
        self._first: list[Observation] = []
        self._factors: dict[str, float] = {}
        self._expected_ms = 0.0  # the last step
        self._sums: dict[str, list[_Sum]] = {WORKERS: [_Sum(_ALLOWED[WORKERS])]} if self._exact else {}

    def add(self, observed: Observation) -> Alarm | None:
        """Adds a step. Returns the alarm that it raises."""
        if not observed.step_ms:
            return None
        if not self._sums:
            self._learn_from(observed)
            return None
        if observed.expected_ms:
            self._expected_ms = observed.expected_ms * self._factors.get(WORKERS, 1.0)
        for cause in (COMPUTE, DATA):
            for each, value in zip(self._sums.get(cause, ()), getattr(observed, f"{cause}_ms"), strict=False):
                each.add(observed, value, each.reference)
        self._add_predicted(LINK, observed, observed.link_ms, observed.expected_link_ms)
        if max((each.value for cause in (COMPUTE, DATA, LINK) for each in self._sums.get(cause, ())), default=0) < 1:
            self._add_predicted(WORKERS, observed, observed.step_ms, observed.expected_ms)
        for cause in list(self._active):
            if not self.is_suspect(cause):
                self._end(cause, observed.step)
        return self._raised(observed, [cause for cause in self._sums if self._worst(cause).value > _LIMIT])

    def confirm(self, observed: Observation, causes: Sequence[str]) -> Alarm | None:
        """Raises an alarm at once for a change that the monitor has found. ``observed``: the last step."""
        return self._raised(observed, [cause for cause in causes if cause in self._sums and self._worst(cause).value])

    def is_suspect(self, cause: str) -> bool:
        """Returns True if the last steps suggest this cause."""
        return any(each.value for each in self._sums.get(cause, ()))

    def locate(self, alarm: Alarm, hosts: tuple[int, ...] | None, names: Sequence[str]) -> Alarm:
        """Returns the alarm about a link with its hosts. ``names``: of all hosts."""
        alarm = dataclasses.replace(alarm, hosts=hosts)
        alarm = dataclasses.replace(alarm, sentence=self._sentence(alarm, names))
        self._active[alarm.cause] = alarm
        return alarm

    def _add_predicted(self, cause: str, observed: Observation, value: float | None, expected: float | None) -> None:
        if cause not in self._sums or value is None:
            return
        (each,) = self._sums[cause]
        if expected:
            each.add(observed, value, expected * self._factors.get(cause, 1.0))
        elif not self._exact:
            each.add(observed, value, each.reference)

    def _raised(self, observed: Observation, causes: Sequence[str]) -> Alarm | None:
        """Raises one alarm: for the cause that costs the most, of those without an alarm. None if all have one."""
        new = [cause for cause in causes if cause not in self._active]
        if not new:
            return None
        cause = max(new, key=lambda each: self._worst(each).lost_ms)
        worst, ranks = self._worst(cause), self._sums[cause]
        rank = ranks.index(worst) if cause in (COMPUTE, DATA) else None
        if 2 * sum(each.value > _LIMIT / 2 for each in ranks) > len(ranks):
            rank = None
        step, step_ms, expected_ms = observed.step, observed.step_ms, self._expected_ms
        alarm = Alarm(cause, rank, step, worst.since, step_ms, expected_ms, worst.mean_ms, worst.reference, "")
        alarm = dataclasses.replace(alarm, sentence=self._sentence(alarm))
        self._active[cause] = alarm
        return alarm

    def _sentence(self, alarm: Alarm, host_names: Sequence[str] = ()) -> str:
        times = alarm.slowdown
        who = "most ranks" if alarm.rank is None else f"rank {alarm.rank}"
        verb = "" if alarm.rank is None else "s"
        since = f"since step {alarm.since_step:,}"
        if alarm.cause == COMPUTE:
            what = (
                f"{who} compute{verb} {times:.2f} times as long ({alarm.value_ms:.1f} ms, expected "
                f"{alarm.reference_ms:.1f}) {since}; check clocks, temperature and other programs there"
            )
        elif alarm.cause == DATA:
            what = (
                f"{who} spend{verb} {alarm.value_ms:.1f} ms between the passes, expected {alarm.reference_ms:.1f}, "
                f"{since}: waiting for data, most likely; check the loader and where it reads"
            )
        elif alarm.cause == LINK:
            hosts = [f"host {host} ({host_names[host]})" for host in alarm.hosts or ()]
            link = f"the link {'of' if len(hosts) == 1 else 'between'} {' and '.join(hosts)}" if hosts else ""
            what = f"{link or 'the network'} takes {times:.2f} times as long {since}"
            if self.link_bits:
                now, before = (self.link_bits / ms / 1e3 for ms in (alarm.value_ms, alarm.reference_ms))
                what = f"{link or 'the slowest link'} gives {now:.0f} of {before:.0f} Mbit/s {since}"
            if hosts:
                what += "; check its cables and switch ports, and what else uses it"
            elif alarm.hosts is None:
                what += "; check with `gradcast network`, which names the link"
            else:
                what += ", and no link is clearly slower than the others; check what they share"
        else:
            worth = self._world_size * alarm.reference_ms / alarm.value_ms
            who = "1 worker does" if self._world_size == 1 else f"{self._world_size} workers do"
            what = (
                f"{who} the work of {worth:.1f} {since}, and neither compute, data nor blocks "
                "explain it; check what the workers share"
            )
        return f"step {alarm.step:,}: {alarm.step_ms:.1f} ms, expected {alarm.expected_ms:.1f}: {what}"

    def _worst(self, cause: str) -> _Sum:
        return max(self._sums[cause], key=lambda each: (each.value, each.lost_ms))

    def _end(self, cause: str, step: int) -> None:
        over = dataclasses.replace(self._active.pop(cause), until_step=step)
        self._over = [*self._over, over][-_KEPT:]

    def _learn_from(self, observed: Observation) -> None:
        self._first.append(observed)
        first = self._first[_SETTLING_STEPS:]
        if len(first) < _LEARNING_STEPS:
            return
        for cause in (COMPUTE, DATA):
            ranks = zip(*(getattr(each, f"{cause}_ms") for each in first), strict=False)
            if sums := [_learned(cause, values) for values in ranks]:
                self._sums[cause] = sums
        predicted: dict[str, list[tuple[Any, Any]]] = {
            LINK: [(each.link_ms, each.expected_link_ms) for each in first],
            WORKERS: [(each.step_ms, each.expected_ms) for each in first],
        }
        for cause, pairs in predicted.items():
            if any(value is None for value, _ in pairs):
                continue
            self._sums[cause] = [_learned(cause, [value for value, _ in pairs])]
            if all(expected for _, expected in pairs):
                factor = statistics.median(value / expected for value, expected in pairs)
                self._factors[cause] = max(1 - _TOLERANCE, min(1 + _TOLERANCE, factor))
        self._expected_ms = self._sums[WORKERS][0].reference


def _learned(cause: str, values: Sequence[float]) -> _Sum:
    middle = statistics.median(values)
    deviation = _DEVIATION_OF_MEDIAN * statistics.median(abs(value - middle) for value in values)
    return _Sum(_ALLOWED[cause], middle, max(_LEAST_MS, _DEVIATIONS * deviation))
