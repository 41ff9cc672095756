"""Trainings that end and begin again go on with the bits, and with each sample once, as if they had not ended."""

import json
from pathlib import Path

import pytest

from snapshots import program
from training.launch import torchrun
from training.needs import torch

pytest.importorskip("training.needs")
from gradcast.snapshots import resuming

STEPS = 40


def trains(rank, tmp: str, mode: str, steps: int) -> dict:
    resuming.resumed.clear()  # as in a new process
    log = Path(tmp, "logs", f"log-{rank.index}")
    return program.train(Path(tmp, "snapshots"), steps=steps, mode=mode, every=4, log=log, waits=True)


def run(ranks, tmp: Path, world_size: int, mode: str, *, steps: int = STEPS) -> list[dict]:
    """What each rank's snapshots tell at the end."""
    (tmp / "logs").mkdir(exist_ok=True)
    return ranks.run(world_size, trains, str(tmp), mode, steps)


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


@pytest.fixture(scope="module", params=["overlap", pytest.param("hook", marks=pytest.mark.slow)])
def undisturbed(request, ranks, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("undisturbed")
    return request.param, tmp, run(ranks, tmp, 2, request.param)


def test_the_last_two_snapshots_stay_and_are_told(undisturbed):
    mode, tmp, everyone = undisturbed
    assert sorted(each.name for each in (tmp / "snapshots").glob("step-*")) == ["step-36", "step-40"]
    for told in everyone:
        assert (told["step"], told["every"], told["failed"], told["error"]) == (40, 4, 0, None)
        # In overlap mode all but the last one were copied behind updates, some of them in several parts.
        assert told["parts"] > 9 if mode == "overlap" else told["parts"] == 0
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


def test_a_resumed_training_has_the_bits_of_the_undisturbed(undisturbed, ranks, tmp_path):
    mode, whole, _ = undisturbed
    run(ranks, tmp_path, 2, mode, steps=18)
    run(ranks, tmp_path, 2, mode)
    for rank in range(2):
        assert surviving(tmp_path, rank) == surviving(whole, rank)
    assert len(lines(tmp_path, 0)) == 18 + STEPS - 18 + 2  # from step 16 on
    require_each_sample_once(tmp_path, 2)


@pytest.mark.slow
def test_torchrun_begins_again_where_the_snapshot_is(undisturbed, tmp_path):
    mode, whole, _ = undisturbed
    (tmp_path / "logs").mkdir()
    folders = (str(tmp_path / "snapshots"), str(tmp_path / "logs"))
    torchrun("-m", "snapshots.program", *folders, str(STEPS), mode, "4", "waits", DIES_AT="18")
    for rank in range(2):
        assert surviving(tmp_path, rank) == surviving(whole, rank)
        assert len(lines(tmp_path, rank)) in (STEPS + 1, STEPS + 2)  # steps 17 and 18 once more


@pytest.mark.slow
def test_another_number_of_workers_goes_on_without_a_sample_twice(ranks, tmp_path):
    # Of 120 samples, 8 steps of 4 x 2 and 8 of 3 x 2 leave one step of 4 x 2; each run ends behind its last snapshot.
    history, begin = [], 0
    for world_size, steps, snapshot in ((4, 10, 8), (3, 18, 16), (4, 17, 17)):
        before = [len(lines(tmp_path, rank)) if begin else 0 for rank in range(4)]
        run(ranks, tmp_path, world_size, "overlap", steps=steps)
        for rank in range(world_size):
            history += [i for step, ids, _ in lines(tmp_path, rank)[before[rank] :] if step <= snapshot for i in ids]
        begin = snapshot
    assert sorted(history) == list(range(program.SAMPLES))
