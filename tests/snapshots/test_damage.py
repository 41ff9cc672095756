"""Damaged snapshots: refused, an older one in place of them, or without effect on any bit of a training's state."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from gradcast.snapshots import store
from snapshots.damage import KINDS, Training, campaign
from training.needs import torch  # noqa: F401


def on_ranks_of(rank, folder, count, seed, is_local):
    Training(is_local).take_snapshots(Path(folder), 13, 4)
    found = campaign(Path(folder), count, seed, is_local=is_local, rank=rank)
    return [[kind, outcome, times] for (kind, outcome), times in sorted(found.items())]


def require_harmless(found, count):
    """``found``: kinds, outcomes, and how often."""
    print(json.dumps(found))
    assert {"refused", "older"} <= {outcome for _, outcome, _ in found} <= {"refused", "older", "no effect"}
    assert {kind for kind, _, _ in found} == set(KINDS)
    assert sum(times for _, _, times in found) == count


@pytest.mark.parametrize("count", [100, pytest.param(6000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_damage_of_a_snapshot_does_no_harm(tmp_path, count):
    Training().take_snapshots(tmp_path, 13, 4)
    found = campaign(tmp_path, count, 1)
    require_harmless([[kind, outcome, times] for (kind, outcome), times in sorted(found.items())], count)


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("count", [16, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_damage_does_no_harm_to_two_ranks(ranks, tmp_path, count, is_local):
    both = ranks.run(2, on_ranks_of, str(tmp_path), count, 2, is_local, timeout_s=1500.0)
    assert both[0] == both[1]
    require_harmless(both[0], count)


def test_archives_have_the_checksums_of_their_values(tmp_path):
    """In the first snapshot, which torch writes, and in later ones."""
    from torch.distributed.checkpoint import FileSystemReader

    Training().take_snapshots(tmp_path, 13, 4)
    for place in tmp_path.glob("step-*"):
        stored = FileSystemReader(place).read_metadata().storage_data
        for index, each in stored.items():
            data = (place / each.relative_path).read_bytes()[each.offset : each.offset + each.length]
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert archive.testzip() is None, f"{place.name} {index.fqn}"
        assert len(stored) > 10


def test_the_newest_whole_snapshot_is_taken_and_told(tmp_path, caplog):
    Training().take_snapshots(tmp_path, 13, 4)
    with (tmp_path / "step-12" / "__0_0.distcp").open("r+b") as file:
        file.seek(3000)
        file.write(b"damaged")
    training = Training()
    assert training.resume(tmp_path) == 8
    told = [each.getMessage() for each in caplog.records if "training goes on from step 8" in each.getMessage()]
    assert len(told) == 1
    assert "step 12 (rank 0: __0_0.distcp has other bytes than were written)" in told[0]
    training.take_snapshots(tmp_path, 5, 2)  # 4 of them, of which one is of step 12 again
    assert store.complete_steps(tmp_path) == [10, 12]
    kept = next(tmp_path.glob("step-12.damaged-*"))
    assert b"damaged" in (kept / "__0_0.distcp").read_bytes()
