"""What the callbacks of frameworks share for snapshots, and what they refuse."""

import contextlib
from pathlib import Path

import pytest

import gradcast
from gradcast.snapshots import store
from training.needs import torch


def module_and_optimizer():
    module = torch.nn.Linear(2, 2)
    return module, torch.optim.SGD(module.parameters(), 0.1)


def taken(folder):
    """A snapshot of a training's only step."""
    from gradcast.frameworks.snapshots import LoopState

    module, optimizer = module_and_optimizer()
    handle = gradcast.attach(module, optimizer)
    made = 0
    loop = LoopState(lambda: {"steps": made})
    handle.snapshots(folder, every=1, extra={"loop": loop})
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    made += 1
    handle.detach()


def written(whole, place):
    place.write_text(str(whole.step))


def test_a_checkpoint_is_made_once_and_goes_with_its_snapshot(tmp_path):
    from gradcast.frameworks.snapshots import FrameworkSnapshots

    assert FrameworkSnapshots(tmp_path, {}).checkpoint("some", written) is None
    taken(tmp_path)
    first = FrameworkSnapshots(tmp_path, {}).checkpoint("some", written)
    assert first == tmp_path / "step-1" / "framework" / "some"
    made = []
    again = FrameworkSnapshots(tmp_path, {}).checkpoint("some", lambda whole, place: made.append(place))
    assert (again, made) == (first, [])
    first.write_text("damaged")
    assert FrameworkSnapshots(tmp_path, {}).checkpoint("some", written).read_text() == "1"


def test_what_another_process_has_made_meanwhile_is_taken(tmp_path, monkeypatch):
    """On a file system without locks."""
    from gradcast.frameworks import snapshots

    monkeypatch.setattr(snapshots, "_alone", lambda _: contextlib.nullcontext())
    taken(tmp_path)

    def made(text):
        def write(whole, place):
            place.mkdir()
            (place / "model").write_text(text)
            if text == "ours":
                snapshots.FrameworkSnapshots(tmp_path, {}).checkpoint("some", made("theirs"))

        return write

    found = snapshots.FrameworkSnapshots(tmp_path, {}).checkpoint("some", made("ours"))
    assert (found / "model").read_text() == "theirs"
    assert sorted(each.name for each in found.parent.iterdir()) == [".some.json", "some"]


def test_what_does_not_fit_is_refused(tmp_path):
    from gradcast.frameworks.snapshots import FrameworkSnapshots

    with pytest.raises(gradcast.Error, match="got every, keep, but no folder for snapshots"):
        FrameworkSnapshots(None, {"every": 3, "keep": 2})
    with pytest.raises(gradcast.Error, match="no folder for snapshots; add snapshots=FOLDER"):
        FrameworkSnapshots(None, {}).checkpoint("some", written)
    taken(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")  # of another program, as it were
    module, optimizer = module_and_optimizer()
    handle = gradcast.attach(module, optimizer)
    snapshots = FrameworkSnapshots(tmp_path / "b", {})
    with pytest.raises(
        gradcast.Error, match=r"step 1, from which .* does not go on; give the trainer AttachCallback.ch"
    ):
        snapshots.take(handle, module, 0)
    with pytest.raises(
        gradcast.Error, match=r"taken under a framework; give its trainer AttachCallback.checkpoint\(\)"
    ):
        gradcast.resume(tmp_path / "b", module, optimizer, extra={"loop": snapshots_of_a_loop()})
    (tmp_path / "b" / "step-1" / "__0_0.distcp").unlink()
    with pytest.raises(gradcast.Error, match=r"no snapshot in .* is whole: .*__0_0\.distcp"):
        FrameworkSnapshots(tmp_path / "b", {}).checkpoint("some", written)


def snapshots_of_a_loop():
    from gradcast.frameworks.snapshots import LoopState

    return LoopState(dict)


def test_more_ranks_go_on_and_all_have_to(ranks, tmp_path):
    taken(tmp_path)
    for refusal, steps in ranks.run(2, goes_on, str(tmp_path)):
        assert "from which this training does not go on" in refusal
        assert steps == [1, 2]


def goes_on(rank, folder):
    from gradcast.frameworks.snapshots import FrameworkSnapshots, LoopState

    module, optimizer = module_and_optimizer()
    handle = gradcast.attach(module, optimizer)
    snapshots = FrameworkSnapshots(folder, {"every": 1})
    if rank.index == 0:
        snapshots.checkpoint("some", written)
    with pytest.raises(gradcast.Error) as caught:
        snapshots.take(handle, module, 1)
    snapshots.checkpoint("some", written)
    snapshots.take(handle, module, 1, extra={"loop": LoopState(lambda: {"steps": 2})})
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    handle.detach()
    return str(caught.value), store.complete_steps(Path(folder))
