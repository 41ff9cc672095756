"""Objects in snapshots: plain data comes back as it was, and reading anything else runs no code."""

import hashlib
import io
import json
import pickle
import subprocess
import zipfile
from pathlib import Path

import numpy
import pytest

import gradcast
from gradcast.snapshots import store
from snapshots.damage import Training
from training.needs import torch


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return subprocess.check_call, (["touch", str(self.place)],)


def archive(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def sealed_anew(place):
    """As one who can write the files would."""
    from gradcast.snapshots.files import sealed

    fields = json.loads((place / store.METADATA).read_bytes())
    del fields["sha256"]
    for name in fields["files"]:
        data = (place / name).read_bytes()
        fields["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (place / store.METADATA).write_bytes(sealed(fields))


@pytest.mark.parametrize("is_sealed", [False, True])
def test_no_place_of_a_snapshot_runs_code(tmp_path, is_sealed):
    bomb, told = Bomb(tmp_path / "exploded"), {}
    Training().take_snapshots(tmp_path / "runs", 1, 1)
    place = tmp_path / "runs" / "step-1"
    metadata = (place / store.METADATA).read_bytes()
    for file in [*place.iterdir(), tmp_path / "runs" / store.MARK]:
        before = file.read_bytes()
        for data in (pickle.dumps(bomb), archive(bomb), archive({"extra": {"x": bomb}})):
            file.write_bytes(data)
            if is_sealed and file.name != store.METADATA:
                sealed_anew(place)
            training = Training()
            parameters = [each.clone() for each in training.module.parameters()]
            try:
                training.resume(tmp_path / "runs")
            except gradcast.Error as error:
                assert all(map(torch.equal, parameters, training.module.parameters()))
                told[file.name] = str(error)
            assert not (tmp_path / "exploded").exists(), file
        file.write_bytes(before)
        (place / store.METADATA).write_bytes(metadata)
    assert told.keys() >= {"common.pt", "rank-0.pt", "tensors.json", "gradcast.json", "__0_0.distcp"}
    words = "check_call, and reading more than plain data can run code" if is_sealed else "common.pt has"
    assert words in told["common.pt"]


def test_the_bomb_explodes(tmp_path):
    """As pickle reads it."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


def test_no_archive_of_a_tensor_is_unpickled(tmp_path):
    """A bomb in place of what says how a tensor is made."""
    Training().take_snapshots(tmp_path / "runs", 1, 1)
    place = tmp_path / "runs" / "step-1"
    whole = (place / "__0_0.distcp").read_bytes()
    begin = whole.index(b"PK\3\4")
    with zipfile.ZipFile(io.BytesIO(archive(torch.ones(1)))) as some:
        name = next(each for each in some.namelist() if each.endswith("data.pkl"))
    at = whole.index(name.encode(), begin)
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"), 2)
    start = whole.index(b"\x80\x02", at)
    (place / "__0_0.distcp").write_bytes(whole[:start] + bomb + whole[start + len(bomb) :])
    sealed_anew(place)
    Training().resume(tmp_path / "runs")
    assert not (tmp_path / "exploded").exists()


class State:
    """Holds anything."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Own:
    """A class of the program."""

    def __init__(self, number):
        self.number = number


def taken(folder, extra, steps=2):
    training = Training()
    training.handle = gradcast.attach(training.module, training.optimizer)
    snapshots = training.handle.snapshots(folder, every=1, extra=extra)
    for number in range(steps):
        training.module(torch.ones(2, 8)).sum().backward()
        training.optimizer.step()
        snapshots.wait()
        if number == 2:
            extra["x"].value = Own(3)
    training.handle.detach()
    return snapshots.stats()


def resumed(folder, extra):
    training = Training()
    gradcast.resume(folder, training.module, training.optimizer, extra=extra)
    return extra["x"].value


PLAIN = [
    None, True, 3, 1 << 70, 2.5, float("-inf"), "text", b"bytes", 1j, [1, (2, {3})], {"a": {1: 2}}, torch.Size([2]),
    torch.bfloat16, torch.device("cpu"), numpy.float64(0.1), numpy.int32(3), numpy.bool_(True),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back_as_it_was(tmp_path, value):
    taken(tmp_path, {"x": State(value)})
    found = resumed(tmp_path, {"x": State()})
    assert (type(found), found) == (type(value), value)


def test_arrays_and_tensors_come_back(tmp_path):
    value = [numpy.arange(6.0).reshape(2, 3), torch.ones(2, dtype=torch.float16)]
    taken(tmp_path, {"x": State(value)})
    array, tensor = resumed(tmp_path, {"x": State()})
    assert array.dtype == numpy.float64
    assert array.tolist() == value[0].tolist()
    assert torch.equal(tensor, value[1])


def test_a_schedule_with_numpy_goes_on(tmp_path):
    training = Training()
    schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 0.5 * (1 + numpy.cos(step)))
    taken(tmp_path, {"x": schedule})
    again = torch.optim.lr_scheduler.LambdaLR(Training().optimizer, lambda step: 0.5 * (1 + numpy.cos(step)))
    gradcast.resume(tmp_path, (other := Training()).module, other.optimizer, extra={"x": again})
    assert again.get_last_lr() == schedule.get_last_lr()


OTHERS = {
    "snapshots.test_plain.Own": Own(1),
    "pathlib.PosixPath": Path("/"),
    "builtins.range": {"a": [range(3)]},
    "cannot be saved": lambda: None,
}


@pytest.mark.parametrize("words", OTHERS)
def test_other_objects_are_refused_at_the_start(tmp_path, words):
    training = Training()
    training.handle = gradcast.attach(training.module, training.optimizer)
    with pytest.raises(gradcast.Error, match=rf"extra\['x'\] .*{words}.*plain data"):
        training.handle.snapshots(tmp_path, extra={"x": State(OTHERS[words])})
    training.optimizer.param_groups[0]["own"] = OTHERS[words]
    with pytest.raises(gradcast.Error, match=rf"the optimizer .*{words}.*plain data"):
        training.handle.snapshots(tmp_path)
    training.handle.detach()


def test_other_objects_that_come_later_end_no_training(tmp_path, caplog):
    stats = taken(tmp_path, {"x": State()}, steps=6)
    assert "extra['x'] holds snapshots.test_plain.Own, and a snapshot has room for plain data only" in stats["error"]
    assert 1 <= store.complete_steps(tmp_path)[-1] < 3


def test_a_class_that_the_program_allows_comes_back(tmp_path):
    with torch.serialization.safe_globals([Own]):
        taken(tmp_path, {"x": State(Own(7))})
        assert resumed(tmp_path, {"x": State()}).number == 7
    with pytest.raises(gradcast.Error, match=r"common\.pt holds snapshots\.test_plain\.Own.*add_safe_globals"):
        resumed(tmp_path, {"x": State()})
    assert all(each not in torch.serialization.get_safe_globals() for each in (Own, numpy.ndarray))
