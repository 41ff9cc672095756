"""One program on one rank: with DDP first, then with gradcast, compared with what DDP gave."""

import contextlib
import gc
import logging
import traceback
from collections.abc import Iterator

import gradcast
from training import compare
from training.needs import torch

SIDES = ("hook", "overlap")
# Before each side, in what a rank prints: where a process has died or hangs, it tells in which.
MARK = "program runs with: "
# Where more than two ranks sum in another order than DDP's buckets do, in double precision.
_MANY_RANKS = 1e-7
_SHOWN = 4


def run(rank, source: str) -> dict:
    """What each side came to: {"ddp": ..., "hook": ..., "overlap": ...}."""
    with _quiet("gradcast"), _quiet("torch"):
        return _sides(rank, source)


def _sides(rank, source: str) -> dict:
    expected = _outcome(rank, source, "ddp")
    found = {"ddp": _told(expected)}
    if not _all_ended(rank, "ddp", expected[0]):
        return found
    for side in SIDES:
        outcome = _outcome(rank, source, side)
        found[side] = _told(outcome)
        if outcome[0] == "ended":
            found[side] |= {
                "differences": _differences(outcome[1], expected[1], rank),
                "followed": outcome[1]["followed"],
            }
        if not _all_ended(rank, side, outcome[0]):
            _forget_attachments()
        if not torch.distributed.is_initialized():
            break
    return found


def _all_ended(rank, side: str, state: str) -> bool:
    if state == "raised":
        torch.distributed.destroy_process_group()  # so that ranks which wait for this one need not time out
    states = rank.gather(side, state)
    if "raised" in states and state != "raised":
        torch.distributed.destroy_process_group()
    return all(each == "ended" for each in states)


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _outcome(rank, source: str, side: str) -> tuple:
    print(MARK + side, flush=True)
    names: dict = {"__name__": "program"}
    try:
        exec(compile(source, "program", "exec"), names)
        return "ended", names["train"](side)
    except gradcast.Error as error:
        return "refused", error.code, str(error)
    except Exception as error:
        return "raised", type(error).__name__, traceback.format_exc(limit=-6)
    finally:
        names.clear()
        torch.set_default_dtype(torch.float32)
        if "torch.compile" in source:
            torch.compiler.reset()
        gc.collect()


def _told(outcome: tuple) -> dict:
    if outcome[0] == "ended":
        return {"state": "ended"}
    return {"state": outcome[0], "kind": outcome[1], "text": outcome[2]}


def _forget_attachments() -> None:
    """A program that was refused leaves its module attached; nothing of it goes on."""
    from gradcast.training.compat import fork

    for attachment in list(fork.attachments):
        if not attachment.session.released:
            with contextlib.suppress(Exception):
                attachment.release(reusable=False)


def _differences(ours: dict, theirs: dict, rank) -> list[str]:
    tolerance = 0.0 if rank.size == 2 else _MANY_RANKS
    found: list[str] = []
    for name in ("parameters", "gradients", "buffers", "state", "seen", "kept", "random"):
        found += compare.trees(ours[name], theirs[name], name, tolerance=tolerance, nan_equal=True)
    return found[:_SHOWN] + ([f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])
