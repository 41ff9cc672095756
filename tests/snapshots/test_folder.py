"""The folder of snapshots: files of others in it, names that are no snapshots, links, and metadata that is wrong."""

import json
import os
from pathlib import Path

import pytest

import gradcast
from gradcast.snapshots import store
from snapshots.damage import Training
from training.attached import error_of, not_refused
from training.needs import torch
from training.pool import on_ranks


def contents(folder):
    """The bytes of files by path, and None for folders."""
    return {
        str(each.relative_to(folder)): each.read_bytes() if each.is_file() else None
        for each in sorted(folder.rglob("*"))
    }


def others(folder):
    """Checkpoints of other programs, as torchtitan lays them out and as people do, and what is named like them."""
    for name in ("step-10/.metadata", "step-10/__0_0.distcp", "step-1000/model.pt", "step-7.tmp/part", ".rank-0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return contents(folder)


def is_untouched(folder, before):
    after = contents(folder)
    return all(name in after and after[name] == content for name, content in before.items())


def test_checkpoints_of_others_stay_and_are_refused(tmp_path):
    """At the start: another program would take gradcast's snapshots for its own, or delete them."""
    before = others(tmp_path)
    training = Training()
    with pytest.raises(gradcast.Error, match=r"step-7\.tmp, which is no snapshot .* a folder of its own, such as"):
        training.take_snapshots(tmp_path, 5, 1)
    with pytest.raises(gradcast.Error, match="which is no snapshot"):
        training.resume(tmp_path)
    assert contents(tmp_path) == before
    training.handle.detach()


def test_checkpoints_that_come_later_stay(tmp_path, caplog):
    """Another program writes where a snapshot is due, and into a snapshot."""
    Training().take_snapshots(tmp_path, 5, 2)
    for name in ("notes", "step-4/model.pt", "step-6/model.pt", "step-100/model.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = {name: each for name, each in contents(tmp_path).items() if each == b"mine"}
    again = Training()
    assert again.resume(tmp_path) == 4
    again.take_snapshots(tmp_path, 9, 2)
    assert store.complete_steps(tmp_path) == [10, 12]
    assert is_untouched(tmp_path, before)
    assert sorted(each.name for each in (tmp_path / "step-4").iterdir()) == [store.MARK, "model.pt"]
    assert any("step-6 is there already; move it elsewhere" in each.getMessage() for each in caplog.records)
    assert Training().resume(tmp_path) == 12


def test_names_that_no_snapshot_has_block_nothing(tmp_path):
    names = ["step-0099", "step-٩", "step-1e3", "step--5", "step-", "step-9.tmp.old", "step-99999999999999999999999999"]
    Training().take_snapshots(tmp_path, 5, 2)
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    assert Training().resume(tmp_path) == 4
    again = Training()
    again.resume(tmp_path)
    again.take_snapshots(tmp_path, 5, 2)
    assert [(tmp_path / name / ".metadata").exists() for name in names] == [True] * len(names)


@pytest.mark.parametrize("kind", ["a file", "nothing", "a link to nothing", "below a link to nothing", "below a file"])
def test_what_is_no_folder_is_refused(tmp_path, kind):
    """Before, a training began anew in silence."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "that is not mounted")
    folder = {
        "a file": tmp_path / "file",
        "nothing": "",
        "a link to nothing": tmp_path / "link",
        "below a link to nothing": tmp_path / "link" / "runs",
        "below a file": tmp_path / "file" / "runs",
    }[kind]
    training, before = Training(), contents(tmp_path)
    with pytest.raises(gradcast.Error, match="folder"):
        training.resume(folder)
    with pytest.raises(gradcast.Error, match="folder"):
        training.take_snapshots(folder, 3, 1)
    assert contents(tmp_path) == before
    training.handle.detach()


def test_no_link_is_followed_when_something_is_written(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in (".rank-0", ".training", store.MARK):
        (folder / name).symlink_to(outside / "file")
    for number in range(2, 20, 2):  # of a snapshot, and of its parts
        (folder / f"step-{number}").symlink_to(outside)
        (folder / f"step-{number + 1}.tmp").symlink_to(outside)
    training, before = Training(), contents(outside)
    with pytest.raises(gradcast.Error):
        training.take_snapshots(folder, 9, 1)
    training.handle.detach()
    for each in folder.iterdir():
        if each.name == store.MARK or each.name == "step-4":
            each.unlink()
    Training().take_snapshots(tmp_path / "own", 1, 1)
    (tmp_path / "own" / "step-1").rename(folder / "step-1")
    again = Training()
    assert again.resume(folder) == 1
    again.take_snapshots(folder, 9, 1)
    assert contents(outside) == before


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    Training().take_snapshots(tmp_path, 1, 1)
    monkeypatch.setattr(Path, "iterdir", lambda _: (_ for _ in ()).throw(PermissionError(13, "not yours")))
    with pytest.raises(gradcast.Error, match="not yours"):
        Training().resume(tmp_path)


WRONG = {
    "world_size is missing": lambda fields: fields.pop("world_size") and None,
    "step is a str": lambda fields: fields.update(step="1"),
    "is_local is a int": lambda fields: fields.update(is_local=0),
    "files is a list": lambda fields: fields.update(files=[]),
    "files: common.pt: sha256 is missing": lambda fields: fields["files"].update({"common.pt": {"bytes": 1}}),
    "files: ../x is no file": lambda fields: fields["files"].update({"../x": {"bytes": 1, "sha256": ""}}),
    "gradcast.json: files: common.pt is missing": lambda fields: fields["files"].pop("common.pt") and None,
    "world_size is 1000000000": lambda fields: fields.update(world_size=10**9),
    "step is 7": lambda fields: fields.update(step=7),
    "in version 2, and this gradcast reads version 3": lambda fields: fields.update(version=2),
    "in version 4, and this gradcast reads version 3": lambda fields: fields.update(version=4),
    "in version None": lambda fields: fields.update(version=None),
    "gradcast.json is not an object": lambda fields: "3",
    "gradcast.json is not JSON": lambda fields: "[" * 100_000,
}


@on_ranks(2)
def test_wrong_metadata_is_refused_on_all_ranks(rank, tmp_path):
    """With its key, and before anything has changed."""
    from gradcast.snapshots.files import sealed

    Training().take_snapshots(tmp_path, 1, 1)
    file, found = tmp_path / "step-1" / store.METADATA, []
    text = file.read_text()
    for words, change in WRONG.items():
        fields = json.loads(text)
        fields.pop("sha256")
        result = change(fields)
        torch.distributed.barrier()
        if rank.index == 0:
            file.write_bytes(sealed(fields) if result is None else result.encode())
        torch.distributed.barrier()
        training = Training()
        before = training.digest(tmp_path)
        code, message = error_of(lambda training=training: training.resume(tmp_path))
        if code != "invalid_use" or words not in message or training.digest(tmp_path) != before:
            found.append(f"{words}: {message}")
    return found


@on_ranks(2)
def test_what_one_rank_raises_all_ranks_raise(rank, tmp_path):
    """Arguments, the folder, objects of the program: no rank waits for one that has raised."""
    Training().take_snapshots(tmp_path / "runs", 1, 1)
    (tmp_path / "file").touch()
    odd = rank.index == 1

    class Odd:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            raise RuntimeError("odd")

    def resume(folder=tmp_path / "runs", model=None, optimizer=None, **named):
        training = Training()
        scheduler = {"extra": {"scheduler": training.scheduler}}
        before = [each.clone() for each in training.module.parameters()]
        model = training.module if model is None else model
        named = {"loader": training.loader} | scheduler | named
        error = error_of(lambda: gradcast.resume(folder, model, optimizer or training.optimizer, **named))
        return *error, all(map(torch.equal, before, training.module.parameters()))

    cases = {
        "is a file": resume(tmp_path / "file" if odd else tmp_path / "runs"),
        "3 is no module": resume(model=3 if odd else None),
        "3 is no optimizer": resume(optimizer=3 if odd else None),
        "extra is a list": resume(extra=[1] if odd else {}),
        "rank 1: extra['scheduler'] does not take its state of step 1 (RuntimeError: odd)": resume(
            extra={"scheduler": Odd()} if odd else {"scheduler": Training().scheduler}
        ),
    }
    fits = [(code, words in message, same) for words, (code, message, same) in cases.items()]
    return [] if fits == [("invalid_use", True, True)] * len(cases) else [str(cases)]


@on_ranks(2)
def test_what_one_rank_raises_no_rank_takes_snapshots_with(rank, tmp_path):
    training, found = Training(), []
    training.handle = gradcast.attach(training.module, training.optimizer)
    (tmp_path / "file").touch()
    odd = rank.index == 1

    class Raises:
        def state_dict(self):
            raise OSError("odd")

        def load_state_dict(self, state):
            pass

    class Fine(Raises):
        def state_dict(self):
            return {}

    for words, named in {
        "is a file": {"folder": tmp_path / ("file" if odd else "runs")},
        "extra is a int": {"extra": 3 if odd else {}},
        "rank 1: extra['x'] has no state (OSError: odd)": {"extra": {"x": Raises() if odd else Fine()}},
        "3 is no optimizer": {"optimizer": 3 if odd else training.optimizer},
    }.items():
        named = {"folder": tmp_path / "runs"} | named
        found += not_refused(lambda named=named: training.handle.snapshots(**named), words)
    training.handle.detach()
    return found


def test_snapshots_of_the_former_format_are_refused_and_stay(tmp_path):
    """It had no hashes, and its objects were pickles of any kind."""
    place = tmp_path / "step-16"
    place.mkdir()
    (tmp_path / ".training").write_text("0123456789abcdef")
    (place / ".metadata").write_bytes(b"pickle")
    with pytest.raises(gradcast.Error, match=r"step-16, which is no snapshot of this version .* \(no \.gradcast"):
        Training().resume(tmp_path)
    assert os.listdir(place) == [".metadata"]


def test_a_disk_that_is_full_at_the_start_is_told(tmp_path, monkeypatch):
    def is_full(*_):
        raise OSError(28, "No space left on device")

    training = Training()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", is_full)
        with pytest.raises(
            gradcast.Error, match=r"cannot be written \(\[Errno 28\] No space .* make room or name another"
        ):
            training.take_snapshots(tmp_path, 1, 1)
    assert os.listdir(tmp_path) == []
    training.handle.detach()
