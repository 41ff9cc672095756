"""One rank of ``gradcast dev lab adapt``: ``python -m gradcast.lab.adapt_worker SETTINGS PIPE RESULTS``.

Trains a stand-in in overlap mode, and records for each step how long it took and which plan it followed. Rank 0
requests changes of the network through the file descriptor PIPE, and writes the file RESULTS.
"""

import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradcast
from gradcast.lab.adapt import CHANGE, CHANGE_BACK, CHANGED_HOST, LOADING_S, AdaptSettings
from gradcast.lab.cores import wake_promptly
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


def main(settings: AdaptSettings, pipe: int, results_path: Path) -> None:
    torch.set_num_threads(1)
    wake_promptly()
    dist.init_process_group("gloo")
    recorder = LogRecorder()
    logging.getLogger("gradcast").addHandler(recorder)
    logging.getLogger("gradcast").setLevel(logging.INFO)
    results = _train(settings, recorder, pipe)
    if dist.get_rank() == 0:
        results_path.write_text(json.dumps({"torch": torch.__version__, **results, "said": recorder.lines}))
    dist.destroy_process_group()


def _train(settings: AdaptSettings, recorder: LogRecorder, pipe: int) -> dict[str, Any]:
    rank = dist.get_rank()
    task = StandInTask(
        Settings(settings.model, settings.profile, settings.rates_bits_per_s, (), scale_size=settings.scale_size), rank
    )
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
    return {"steps": steps, "alarms": [dataclasses.asdict(alarm) for alarm in handle.alarms()]}


def _change(settings: AdaptSettings, task: StandInTask, rank: int, pipe: int, *, begins: bool) -> None:
    if settings.scenario == "batch" or (
        settings.scenario == "host" and rank // settings.ranks_per_host == CHANGED_HOST
    ):
        task.device.factor = settings.factor if begins else 1.0
    if rank == 0:
        print(f"now {settings.description}" if begins else "now it is as before", flush=True)
        os.write(pipe, CHANGE if begins else CHANGE_BACK)


if __name__ == "__main__":
    main(AdaptSettings.from_json(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
