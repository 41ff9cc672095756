"""Damages the files of snapshots at random, and compares the state that a training resumes with."""

import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradcast
from gradcast.snapshots import resuming
from snapshots import program

PAGE = 4096
KINDS = ("bit", "zeros", "old", "cut")


class Training:
    """A small one with all that a snapshot holds. ``is_local``: with local steps."""

    def __init__(self, is_local: bool = False) -> None:
        torch.manual_seed(1)
        layers = [nn.Linear(program.FEATURES, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 96)]
        self.module = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)
        data = program.dataset()
        sampler = gradcast.ResumableSampler(data)
        self.loader = gradcast.ResumableLoader(torch.utils.data.DataLoader(data, program.BATCH, sampler=sampler))
        self.is_local, self.handle = is_local, None
        self.begin()

    def begin(self) -> None:
        """Local steps are resumed right after attach."""
        resuming.resumed.clear()
        if self.handle is not None:
            self.handle.detach()
        if self.is_local:
            options = gradcast.Options(local=gradcast.LocalSteps(5, overlap=2))
            self.handle = gradcast.attach(self.module, self.optimizer, options=options)

    def take_snapshots(self, folder: Path, steps: int, every: int) -> None:
        if self.handle is None:
            options = gradcast.Options(plan=gradcast.Planning(warmup_steps=3, adapt=False))
            self.handle = gradcast.attach(self.module, self.optimizer, options=options)
        extra = {"scheduler": self.scheduler}
        snapshots = self.handle.snapshots(folder, every=every, loader=self.loader, extra=extra)
        for _, (_, batch) in zip(range(steps), self.loader, strict=False):
            self.optimizer.zero_grad()
            self.module(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            snapshots.wait()
        self.handle.detach()

    def resume(self, folder: Path) -> int | None:
        return gradcast.resume(folder, self.module, self.optimizer, self.loader, {"scheduler": self.scheduler})

    def disturb(self) -> None:
        """Changes all that a snapshot restores."""
        self.module(torch.randn(2, program.FEATURES)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        random.random()
        self.loader.sampler.position = 0
        self.begin()

    def digest(self, folder: Path) -> str:
        """Of parameters, buffers, optimizer, random numbers, place in the data, scheduler, plan, and local steps."""
        state, resumed = self.optimizer.state_dict(), resuming.resumed.get(folder)
        tensors = [*self.module.state_dict().values(), torch.get_rng_state()]
        tensors += [each for entry in state["state"].values() for _, each in sorted(entry.items())]
        if self.is_local:
            tensors += [each for kind in self.handle.state_dict()["tensors"].values() for each in kind.values()]
        others = (state["param_groups"], self.scheduler.state_dict(), self.loader.state_dict(), random.getstate())
        found = hashlib.sha256(repr((others, resumed and resumed.plan)).encode())
        for each in tensors:
            found.update(each.numpy().tobytes())
        return found.hexdigest()


def outcome(training: Training, folder: Path, expected: dict[int, str]) -> str:
    """``expected``: by step, the digest of what is resumed from it."""
    before = training.digest(folder)
    try:
        step = training.resume(folder)
    except gradcast.Error:
        return "refused" if training.digest(folder) == before else "refused, but changed"
    if training.digest(folder) != expected[step]:
        return f"other bits of step {step}"
    return "no effect" if step == max(expected) else "older"


@contextlib.contextmanager
def hidden(place: Path, acts: bool = True) -> Iterator[None]:
    elsewhere = place.with_name("hidden")
    if acts:
        place.rename(elsewhere)
    try:
        yield
    finally:
        if acts:
            elsewhere.rename(place)


@contextlib.contextmanager
def damaged(file: Path, kind: str, chance: random.Random, old: bytes, acts: bool) -> Iterator[None]:
    """``old``: the file in an older snapshot."""
    data = file.read_bytes()
    changed, place = bytearray(data), chance.randrange(max(1, len(data)))
    page = slice(place // PAGE * PAGE, min(len(data), (place // PAGE + 1) * PAGE))
    if kind == "bit" and data:
        changed[place] ^= 1 << chance.randrange(8)
    elif kind == "zeros":
        changed[page] = bytes(page.stop - page.start)
    elif kind == "old":
        changed[page] = old[page].ljust(page.stop - page.start, b"\0")
    elif kind == "cut":
        del changed[place:]
    if acts:
        file.write_bytes(changed)
    try:
        yield
    finally:
        if acts:
            file.write_bytes(data)


def campaign(folder: Path, count: int, seed: int, *, is_local: bool = False, rank: Any = None) -> Counter:
    """Damages one file at a time, and counts kinds and outcomes. ``folder``: of two snapshots; each second time the
    older one is not there. ``rank``: of several, of which the first one damages."""
    chance, training, expected = random.Random(seed), Training(is_local), {}
    acts = rank is None or rank.index == 0
    meet = (lambda: None) if rank is None else torch.distributed.barrier
    older, newest = sorted(folder.glob("step-*"), key=lambda each: int(each.name[5:]))
    copies = {each.name: each.read_bytes() for each in older.iterdir() if each.is_file()}
    files = sorted(each for each in newest.iterdir() if each.is_file() and each.stat().st_size)
    for place in (newest, older):
        training.disturb()
        meet()
        with hidden(place, acts):
            meet()
            step = training.resume(folder)
            expected[step] = training.digest(folder)
            meet()
    found: Counter = Counter()
    for number in range(count):
        file, kind, is_alone = chance.choice(files), KINDS[number % len(KINDS)], number // len(KINDS) % 2 == 1
        training.disturb()
        meet()
        with hidden(older, acts and is_alone), damaged(file, kind, chance, copies[file.name], acts):
            meet()
            found[kind, outcome(training, folder, expected)] += 1
            meet()
    return found
