"""Many programs, one after the other, and what they have come to."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable

from fuzz_training import generate, rank
from fuzz_training.program import Program
from fuzz_training.shrink import shrunk
from fuzz_training.verdict import Verdict, verdict
from training.pool import Pool, RankError

_LIMIT_S = 60.0  # a rank that waits in vain says so after half of it


@dataclasses.dataclass
class Found:
    """``states``: how many programs of each kind; ``reasons``: of refusals; ``features``: of valid programs;
    ``failures``: the smallest programs."""

    states: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    reasons: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    invalid: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    features: set[str] = dataclasses.field(default_factory=set)
    followed: int = 0
    phases: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[Program, Verdict]] = dataclasses.field(default_factory=list)

    @property
    def valid(self) -> int:
        return sum(count for state, count in self.states.items() if state != "invalid")

    def table(self) -> str:
        lines = [f"{count:6d}  {state}" for state, count in self.states.most_common()]
        share = 100 * self.followed / max(1, self.states["equal"])
        lines.append(f"{share:5.1f} % of equal programs in overlap mode follow a plan of many blocks")
        lines += [f"{count:6d}  in overlap mode through {phase}" for phase, count in self.phases.most_common()]
        lines += [f"{count:6d}  refused: {reason}" for reason, count in self.reasons.most_common()]
        lines += [f"{count:6d}  invalid: {reason}" for reason, count in self.invalid.most_common(12)]
        return "\n".join(lines)


def tried(pool: Pool, program: Program, run: Callable = rank.run, *more: str, limit_s: float = _LIMIT_S) -> Verdict:
    """``run``: what each rank calls, with the program's code and ``more``. Ranks wait for each other half that time."""
    try:
        return verdict(program, pool.run(program.ranks, run, program.source(), *more, timeout_s=limit_s))
    except RankError as error:
        text = str(error)
        is_theirs = not any(rank.MARK + side in text for side in rank.SIDES)
        return Verdict("invalid", text="DDP dies or hangs") if is_theirs else Verdict("failed", text=text)


def campaign(
    pool: Pool,
    programs: Iterable[Program],
    found: Found | None = None,
    *,
    shrinks: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> Found:
    """Adds to ``found`` after each program, before it takes the next one."""
    found = Found() if found is None else found
    start_s = time.monotonic()
    for number, program in enumerate(programs, 1):
        outcome = tried(pool, program)
        found.states[outcome.state] += 1
        found.reasons.update(outcome.reasons)
        found.features.update(use.name for use in program.uses if outcome.state in ("equal", "refused"))
        found.followed += outcome.followed
        found.phases.update(outcome.phases)
        if outcome.state == "invalid":
            found.invalid[outcome.text.strip().splitlines()[-1][:120] if outcome.text.strip() else ""] += 1
        if outcome.state == "failed":
            tell(f"program {program.seed} fails: {outcome.text[:400]}")
            small = shrunk(program, lambda each: tried(pool, each).state == "failed") if shrinks else program
            found.failures.append((small, tried(pool, small) if shrinks else outcome))
        if number % 100 == 0:
            rate = number / (time.monotonic() - start_s)
            tell(f"{number} programs, {rate:.1f} per second: {dict(found.states)}")
    return found


def programs(seed: int, count: int, features: Iterable[str] = ()) -> Iterable[Program]:
    return (generate.program(each, list(features)) for each in range(seed, seed + count))
