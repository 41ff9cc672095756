"""One rank of ``gradcast dev lab adapt``: trains a stand-in in overlap mode, and records each step and its plan."""

import dataclasses
import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import gradcast
from gradcast.lab.adapt import CHANGE, CHANGE_BACK, CHANGED_HOST, LOADING_S, AdaptSettings
from gradcast.lab.models import StandInTask
from gradcast.lab.settings import Settings

_PROGRESS_EVERY = 10


class LogRecorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.step = 0
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append({"step": self.step, "line": record.getMessage()})
        print(f"step {self.step}: {record.getMessage()}", flush=True)


def recorded_log() -> LogRecorder:
    """Returns a recorder of gradcast's log from now on."""
    recorder = LogRecorder()
    logging.getLogger("gradcast").addHandler(recorder)
    logging.getLogger("gradcast").setLevel(logging.INFO)
    return recorder


def record(settings: AdaptSettings, pipe: int) -> dict[str, Any]:
    """Trains and records. ``pipe``: the file descriptor through which rank 0 requests changes of the network."""
    recorder = recorded_log()
    rank = dist.get_rank()
    task = StandInTask(Settings(settings.model, settings.profile, scale_size=settings.scale_size), rank)
    module = task.module()
    optimizer = task.optimizer(module)
    handle = gradcast.attach(module, optimizer)
    is_changed_host = rank // settings.ranks_per_host == CHANGED_HOST
    steps = []
    for number, (inputs, targets) in enumerate(task.batches(0, settings.steps)):
        recorder.step = number
        if number in (settings.changes_at, settings.returns_at):
            _change(settings, task, rank, pipe, begins=number == settings.changes_at)
        start = time.perf_counter()
        if settings.scenario == "data":
            is_longer = is_changed_host and settings.changes_at <= number < settings.returns_at
            time.sleep(LOADING_S * (settings.factor if is_longer else 1))
        optimizer.zero_grad()
        task.loss(module(inputs), targets).backward()
        optimizer.step()
        took_ms = 1e3 * (time.perf_counter() - start)
        stats = handle.stats()
        taken = {key: stats[key] for key in ("predicted_ms", "runs_as_ddp", "tries_ddp", "slowest_rank")}
        steps.append(
            {"step": number, "ms": took_ms, "version": stats["plan_version"], "measuring": handle.measuring, **taken}
        )
        if rank == 0 and number % _PROGRESS_EVERY == _PROGRESS_EVERY - 1:
            print(f"step {number + 1} of {settings.steps}: {took_ms:.0f} ms", flush=True)
    handle.detach()
    alarms = [dataclasses.asdict(alarm) for alarm in handle.alarms()]
    return {"torch": torch.__version__, "steps": steps, "alarms": alarms, "said": recorder.lines}


def _change(settings: AdaptSettings, task: StandInTask, rank: int, pipe: int, *, begins: bool) -> None:
    if settings.scenario == "batch" or (
        settings.scenario == "host" and rank // settings.ranks_per_host == CHANGED_HOST
    ):
        task.device.factor = settings.factor if begins else 1.0
    if rank == 0:
        print(f"now {settings.description}" if begins else "now it is as before", flush=True)
        os.write(pipe, CHANGE if begins else CHANGE_BACK)
