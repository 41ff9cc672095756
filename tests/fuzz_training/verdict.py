"""What a program has come to on all ranks."""

import dataclasses
import re

from fuzz_training.program import Program
from fuzz_training.rank import SIDES

_MANY_BLOCKS = 3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """``state``: "equal"; "invalid" (DDP itself raises); "refused" (gradcast's Error in some mode, elsewhere equal);
    "failed". ``reasons``: of refusals, without names and numbers. ``text``: for people."""

    state: str
    reasons: tuple[str, ...] = ()
    text: str = ""
    followed: bool = False  # the overlap program followed a plan of many blocks
    phases: tuple[str, ...] = ()  # of a plan's life that the overlap program went through


def verdict(program: Program, ranks: list[dict]) -> Verdict:
    if any(rank["ddp"]["state"] != "ended" for rank in ranks):
        texts = {rank["ddp"].get("text", "")[-500:] for rank in ranks}
        return Verdict("invalid", text="\n".join(texts))
    failures, reasons = [], []
    for side in SIDES:
        for number, rank in enumerate(ranks):
            if side not in rank:
                continue  # a side before it raised
            outcome = rank[side]
            is_refused = outcome["state"] == "refused"
            if outcome["state"] == "raised" or (is_refused and outcome["kind"] in ("communication", "internal")):
                failures.append(f"{side}, rank {number}: {outcome['text']}")
            elif is_refused:
                reasons.append(_reason(outcome["text"]))
            elif outcome["differences"]:
                failures.append(f"{side}, rank {number}: " + "; ".join(outcome["differences"]))
    if failures:
        return Verdict("failed", text="\n".join(failures))
    if reasons:
        return Verdict("refused", tuple(dict.fromkeys(reasons)), "\n".join(dict.fromkeys(reasons)))
    steps = ranks[0]["overlap"]["followed"]
    many = sum(blocks >= _MANY_BLOCKS and not measuring for blocks, _, measuring, _ in steps)
    return Verdict("equal", followed=many >= program.steps // 2, phases=_phases(program, steps))


def _phases(program: Program, steps: list[tuple[int, str, bool, int]]) -> tuple[str, ...]:
    """``steps``: each step's number of blocks and policy, whether it was measured, and the version of its plan."""
    if program.pinned:
        return ()
    found = {
        "a warm-up": any(measuring for _, _, measuring, _ in steps),
        "a plan made anew": len({version for _, _, measuring, version in steps if not measuring}) > 1,
        "the DDP baseline": any(policy == "ddp" and not measuring for _, policy, measuring, _ in steps),
    }
    return tuple(name for name, is_there in found.items() if is_there)


def _reason(text: str) -> str:
    """The same text for messages that differ in names and numbers only."""
    text = re.sub(r"^attach failed on rank \d+ of \d+: ", "", text)
    return re.sub(r"\b(\w+\.)+\w+\b|\bp\d\b|\d+", "…", text)[:160]
