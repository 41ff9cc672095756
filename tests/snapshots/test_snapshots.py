"""Trainings that end at any moment go on with the bits, and with each sample once, as if they had not ended."""

import json
import random
import time
from pathlib import Path

import pytest

from snapshots import program
from training.launch import launch, require_ended_well
from training.needs import torch

STEPS = 40


def run(tmp: Path, world_size: int, mode: str, *, steps: int = STEPS, waits=True, during=None) -> list:
    log = tmp / "logs"
    log.mkdir(parents=True, exist_ok=True)
    arguments = (str(tmp / "snapshots"), str(log), str(steps), mode, "4", "waits" if waits else "")
    return launch(world_size, *arguments, module="snapshots.program", during=during)


def lines(tmp: Path, rank: int) -> list:
    text = (tmp / "logs" / f"log-{rank}").read_text()
    return [json.loads(line) for line in text.splitlines()]


def surviving(tmp: Path, rank: int) -> dict[int, tuple]:
    """The last execution of each step: its samples, and its loss."""
    return {step: (ids, loss) for step, ids, loss in lines(tmp, rank)}


def require_each_sample_once(tmp: Path, world_size: int, steps: int = STEPS) -> None:
    logs = [surviving(tmp, rank) for rank in range(world_size)]
    per_epoch = program.SAMPLES // (world_size * program.BATCH)
    for epoch in range(steps // per_epoch):
        chosen = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        samples = [sample for log in logs for step in chosen for sample in log[step][0]]
        assert len(samples) == len(set(samples))


def killer(tmp: Path, seed: int, world_size: int, upto: int):
    """Kills one rank, or all, when rank 0 has come to a random step, at a random moment of it."""
    dice = random.Random(seed)
    at, delay_s, victims = dice.randrange(2, upto), dice.random() * 0.01, dice.choice([[0], [world_size - 1], None])
    started = len(lines(tmp, 0)) if (tmp / "logs" / "log-0").exists() else 0

    def during(processes) -> None:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and all(each.poll() is None for each in processes):
            if (tmp / "logs" / "log-0").exists() and len(lines(tmp, 0)) - started >= at:
                break
            time.sleep(0.001)
        time.sleep(delay_s)
        for process in processes if victims is None else [processes[v] for v in victims]:
            process.kill()
        time.sleep(0.2 if victims else 0)
        for process in processes:
            process.kill()

    return during


@pytest.fixture(scope="module", params=["overlap", "hook"])
def undisturbed(request, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("undisturbed")
    ends = run(tmp, 2, request.param)
    require_ended_well(ends)
    return request.param, tmp, ends


def test_the_last_two_snapshots_stay_and_are_told(undisturbed):
    mode, tmp, ends = undisturbed
    assert sorted(each.name for each in (tmp / "snapshots").iterdir()) == ["step-36", "step-40"]
    for end in ends:
        told = end.told[-1]
        assert (told["step"], told["every"], told["failed"], told["error"]) == (40, 4, 0, None)
        # In overlap mode at least two parts of each of the snapshots, but for the last one, were copied behind updates.
        assert told["parts"] >= 2 * 9 if mode == "overlap" else told["parts"] == 0
        assert told["write_ms"] > 0
        assert told["copy_bytes"] > 0


def test_torch_reads_a_snapshot(undisturbed, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    _, tmp, _ = undisturbed
    dcp_to_torch_save(tmp / "snapshots" / "step-40", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=False)
    module = program.model()
    module.load_state_dict(saved["model"])
    names = [name for name, _ in module.named_parameters()]
    assert sorted(saved["optimizer"]["0"]) == sorted(names)
    assert float(saved["optimizer"]["0"][names[0]]["step"]) == 40


def test_a_resumed_training_has_the_bits_of_the_undisturbed(undisturbed, tmp_path):
    mode, whole, _ = undisturbed
    require_ended_well(run(tmp_path, 2, mode, steps=18))
    require_ended_well(run(tmp_path, 2, mode))
    for rank in range(2):
        assert surviving(tmp_path, rank) == surviving(whole, rank)
    assert len(lines(tmp_path, 0)) == 18 + STEPS - 18 + 2  # from step 16 on
    require_each_sample_once(tmp_path, 2)


def kill_and_compare(mode: str, whole: Path, tmp: Path, seed: int, crashes: int) -> None:
    for crash in range(crashes):
        run(tmp, 2, mode, waits=False, during=killer(tmp, 1000 * seed + crash, 2, STEPS if crashes == 1 else 12))
    require_ended_well(run(tmp, 2, mode))
    for rank in range(2):
        expected = surviving(whole, rank)
        # Every execution of a step, not only the last one.
        assert all(expected[step] == (ids, loss) for step, ids, loss in lines(tmp, rank))
        assert surviving(tmp, rank) == expected
    require_each_sample_once(tmp, 2)


@pytest.mark.parametrize("seed", [1])
def test_killed_at_any_moment_it_goes_on_with_the_same_bits(undisturbed, tmp_path, seed):
    mode, whole, _ = undisturbed
    kill_and_compare(mode, whole, tmp_path, seed, crashes=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3, 6))
def test_killed_again_and_again(undisturbed, tmp_path, seed):
    mode, whole, _ = undisturbed
    kill_and_compare(mode, whole, tmp_path, seed, crashes=5)


@pytest.mark.slow
def test_another_number_of_workers_goes_on_without_a_sample_twice(tmp_path):
    # Of 120 samples, 8 steps of 4 x 2 and 8 of 3 x 2 leave one step of 4 x 2; each run ends behind its last snapshot.
    history, begin = [], 0
    for world_size, steps, snapshot in ((4, 10, 8), (3, 18, 16), (4, 17, 17)):
        before = [len(lines(tmp_path, rank)) if begin else 0 for rank in range(4)]
        require_ended_well(run(tmp_path, world_size, "overlap", steps=steps))
        for rank in range(world_size):
            history += [i for step, ids, _ in lines(tmp_path, rank)[before[rank] :] if step <= snapshot for i in ids]
        begin = snapshot
    assert sorted(history) == list(range(program.SAMPLES))
