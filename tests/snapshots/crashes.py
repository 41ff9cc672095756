"""Trainings of two ranks that are killed at random moments, in processes forked from one that has imported torch.

python -m snapshots.crashes FOLDER KILLS SEED KIND    prints one line of JSON with what was found

KIND: "overlap", "hook", "local" steps, or "own folders" for ranks that do not see one another's files.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from gradcast.snapshots import store
from snapshots import program
from training.launch import free_port

RANKS, STEPS, EVERY = 2, 60, 3
PER_EPOCH = program.SAMPLES // (RANKS * program.BATCH)


def digests_of(place: Path) -> list[str]:
    """Digests of the model and the optimizer in a snapshot, read by torch alone: rank 0's, or with local steps each
    rank's."""
    state: dict = {}
    _load_state_dict(state, FileSystemReader(place), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    each = [state["local"][str(rank)] for rank in range(RANKS)] if "local" in state else [state]
    return [program.digest({"model": own["model"], "optimizer": own["optimizer"]["0"]}) for own in each]


def train(rank: int, port: int, place: Path, kind: str, digests: dict | None = None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    folder = place / (f"runs-{rank}" if kind == "own folders" else "runs")
    mode, every = kind if kind in ("hook", "local") else "overlap", EVERY if digests is None else 10 * STEPS
    log = place / f"log-{rank}"
    program.train(folder, steps=STEPS, mode=mode, every=every, log=log, waits=False, digests=digests)
    dist.destroy_process_group()


def forked(action: Callable[[], None]) -> int:
    """Runs ``action`` in a child that ends without this process's exit functions; returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def started(place: Path, kind: str) -> list[int]:
    place.mkdir(parents=True, exist_ok=True)
    port = free_port()
    return [forked(lambda rank=rank: train(rank, port, place, kind)) for rank in range(RANKS)]


def ended(children: list[int], limit_s: float) -> list[int]:
    """Waits for them and returns their exit codes; kills what does not end."""
    codes: dict[int, int] = {}
    end_s = time.monotonic() + limit_s
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


def undisturbed(folder: Path, kind: str) -> dict[int, list[str]]:
    """By step, the digest of each rank's state, without a kill and with no snapshot."""
    folder.mkdir(parents=True)
    port = free_port()

    def run(rank: int) -> None:
        digests: dict[int, str] = {}
        train(rank, port, folder, "local" if kind == "local" else "hook", digests)
        (folder / f"digests-{rank}").write_text(json.dumps(digests))

    assert ended([forked(lambda rank=rank: run(rank)) for rank in range(RANKS)], 60.0) == [0, 0]
    found = [json.loads((folder / f"digests-{rank}").read_text()) for rank in range(RANKS)]
    return {int(step): [each[step] for each in found] for step in found[0]}


def log_lines(place: Path, rank: int) -> list:
    path, found = place / f"log-{rank}", []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # a line that was cut off
            found.append(json.loads(line))
    return found


def handed_out(place: Path) -> dict[int, list[int]]:
    """The samples of each step in its last execution, of all ranks."""
    logs = [{step: ids for step, ids, _ in log_lines(place, rank)} for rank in range(RANKS)]
    return {step: [sample for log in logs for sample in log[step]] for step in set(logs[0]).intersection(*logs)}


def repeated(place: Path) -> list[int]:
    """Samples that an epoch has had more than once, or that a complete one has not had."""
    by_epoch: dict[int, Counter] = defaultdict(Counter)
    for step, ids in handed_out(place).items():
        by_epoch[(step - 1) // PER_EPOCH].update(ids)
    twice = [sample for counts in by_epoch.values() for sample, count in counts.items() if count > 1]
    whole = [counts for epoch, counts in by_epoch.items() if epoch < max(by_epoch)]
    return twice + [sample for counts in whole for sample in range(program.SAMPLES) if sample not in counts]


def complete_steps(place: Path, kind: str) -> list[int]:
    """Steps of which every rank has a snapshot."""
    folders = [place / f"runs-{rank}" for rank in range(RANKS)] if kind == "own folders" else [place / "runs"]
    return sorted(set.intersection(*(set(store.complete_steps(each)) for each in folders)))


def gathered(place: Path, kind: str, step: int) -> Path:
    """A snapshot in one folder."""
    if kind != "own folders":
        return store.place_of(place / "runs", step)
    whole = place / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    for rank in range(RANKS):
        shutil.copytree(store.place_of(place / f"runs-{rank}", step), whole, dirs_exist_ok=True)
    return whole


def crash(folder: Path, kills: int, seed: int, kind: str) -> dict:
    """Kills rank 0, rank 1 or both ``kills`` times; whenever the last step is reached, it begins anew."""
    expected, chance, place = undisturbed(folder / "undisturbed", kind), random.Random(seed), folder / "killed"
    losses = {(rank, step): loss for rank in range(RANKS) for step, _, loss in log_lines(folder / "undisturbed", rank)}
    found = {
        "kills": 0,
        "loaded": 0,
        "other_bits": [],
        "other_losses": 0,
        "lost_steps": [],
        "repeated": [],
        "finished": 0,
        "went_back": 0,
    }
    newest = 0
    while found["kills"] < kills:
        children, victims = started(place, kind), chance.choice([[0], [1], [0, 1]])
        # One in ten is killed at any moment of the start, the others while they train.
        at_start = chance.random() < 0.1
        wait_s, logged, since_s = chance.uniform(0, 2.0 if at_start else 0.7), len(log_lines(place, 0)), None
        alive = True
        while alive:
            time.sleep(0.002)
            alive = os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            if since_s is None and (at_start or len(log_lines(place, 0)) > logged):
                since_s = time.monotonic()
            if since_s is not None and time.monotonic() > since_s + wait_s:
                break
        for victim in victims if alive else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[victim], signal.SIGKILL)
        # The other rank is not waited for long: it may train on until it misses the killed one.
        codes = ended(children, 0.3 if alive else 10.0)
        executed = ((rank, step, loss) for rank in range(RANKS) for step, _, loss in log_lines(place, rank))
        found["other_losses"] += sum(losses[rank, step] != loss for rank, step, loss in executed)
        if not alive:
            if codes != [0, 0]:
                raise AssertionError(f"the ranks ended with {codes}")
            found["finished"] += 1
            found["repeated"] += repeated(place)
            shutil.rmtree(place)
            newest = 0
            continue
        found["kills"] += 1
        steps = complete_steps(place, kind)
        found["went_back"] += (steps or [0])[-1] < newest
        newest = (steps or [0])[-1]
        for step in steps:
            found["loaded"] += 1
            found_here = digests_of(gathered(place, kind, step))
            if found_here != expected[step][: len(found_here)]:
                found["other_bits"].append(step)
        found["lost_steps"].append(max(handed_out(place), default=0) - newest)
    found["repeated"] += repeated(place) if place.exists() else []
    return found


if __name__ == "__main__":
    print(json.dumps(crash(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
