"""Snapshots of one worker: what is refused, what fails, and what stays."""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import time

import pytest

import gradcast
from gradcast.snapshots import files, frequency, reading, resuming, store, writing
from snapshots import program
from training.needs import torch


@pytest.fixture(autouse=True)
def forget_what_was_resumed():
    resuming.resumed.clear()


def train(folder, steps=20, mode="hook", every=4):
    resuming.resumed.clear()
    random.seed(3)
    return program.train(folder, steps=steps, mode=mode, every=every, log=None, waits=True)


WRONG = [
    ({"keep": 0}, "keep=0"),
    ({"keep": 1.5}, "keep=1.5"),
    ({"every": 2.5}, "every=2.5"),
    ({"overhead": float("nan")}, "overhead=nan"),
    ({"overhead": "3%"}, "overhead='3%'"),
    ({"write_bytes_per_s": "1e6"}, "write_bytes_per_s='1e6'"),
    ({"signals": signal.SIGKILL}, "give a list of signals"),
    ({"signals": [signal.SIGKILL]}, "that a program can handle"),
    ({"signals": ["SIGTERM"]}, "that a program can handle"),
    ({"signals": [[signal.SIGTERM]]}, "that a program can handle"),
    ({"extra": ["scheduler"]}, "extra is a list; give a dict"),
]


def parts(folder):
    """A model, an optimizer and what else the program gives."""
    module, data = program.model(), program.dataset()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    sampler = gradcast.ResumableSampler(data)
    loader = gradcast.ResumableLoader(torch.utils.data.DataLoader(data, program.BATCH, sampler=sampler))
    return module, optimizer, loader, {"scheduler": scheduler}


@pytest.mark.parametrize("mode", ["hook", "overlap"])
def test_resuming_gives_the_bits_of_the_undisturbed(tmp_path, mode):
    train(tmp_path / "whole", mode=mode)
    train(tmp_path / "twice", steps=13, mode=mode)
    assert store.complete_steps(tmp_path / "twice") == [8, 12]
    train(tmp_path / "twice", mode=mode)
    states = []
    for name in ("whole", "twice"):
        module, optimizer, loader, extra = parts(tmp_path)
        assert gradcast.resume(tmp_path / name, module, optimizer, loader, extra) == 20
        states.append((module.state_dict(), optimizer.state_dict()["state"], loader.state_dict(), torch.rand(3)))
    (first, first_state, place, numbers), (second, second_state, other_place, other_numbers) = states
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(v, second_state[i][k]) for i, entry in first_state.items() for k, v in entry.items())
    assert place == other_place
    assert place["position"] == 40
    assert torch.equal(numbers, other_numbers)


def test_an_empty_folder_has_nothing_to_resume(tmp_path):
    assert gradcast.resume(tmp_path / "none", *parts(tmp_path)) is None


def test_other_trainings_are_refused_with_the_first_difference(tmp_path):
    train(tmp_path)
    module, optimizer, loader, extra = parts(tmp_path)
    wider = torch.nn.Sequential(torch.nn.Linear(program.FEATURES, 33))
    for message, arguments in {
        r"0.weight is \(33, 8\) in torch.float32 in the model": (wider, optimizer, loader, extra),
        "1.weight is missing in the model": (module[:1], torch.optim.AdamW(module[:1].parameters()), loader, extra),
        "a SGD, and it is of a AdamW": (module, torch.optim.SGD(module.parameters(), 0.1), loader, extra),
        r"other parameters \(0.weight\)": (module, torch.optim.AdamW(module[1:].parameters()), loader, extra),
        "loader=False": (module, optimizer, None, extra),
        r"extra=\[\]": (module, optimizer, loader, {}),
    }.items():
        before = {name: tensor.clone() for name, tensor in arguments[0].state_dict().items()}
        with pytest.raises(gradcast.Error, match=message):
            gradcast.resume(tmp_path, *arguments)
        assert all(torch.equal(tensor, before[name]) for name, tensor in arguments[0].state_dict().items())


def test_a_folder_that_was_not_resumed_is_refused(tmp_path):
    train(tmp_path)
    resuming.resumed.clear()
    module, optimizer, _, _ = parts(tmp_path)
    handle = gradcast.attach(module, optimizer)
    with pytest.raises(gradcast.Error, match="step 20, which this program has not resumed"):
        handle.snapshots(tmp_path)
    with pytest.raises(gradcast.Error, match="without state_dict"):
        handle.snapshots(tmp_path / "b", loader=[1])
    for wrong, words in WRONG:
        with pytest.raises(gradcast.Error, match=words):
            handle.snapshots(tmp_path / "b", **wrong)
    (tmp_path / "file").touch()
    with pytest.raises(gradcast.Error, match="is a file; name a folder"):
        handle.snapshots(tmp_path / "file")
    handle.detach()


def test_hook_mode_needs_the_optimizer(tmp_path):
    module = program.model()
    handle = gradcast.attach(module)
    with pytest.raises(gradcast.Error, match="hook mode is not given"):
        handle.snapshots(tmp_path)
    with pytest.raises(gradcast.Error, match="parameters of the module only"):
        handle.snapshots(tmp_path, optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
    handle.detach()


def test_what_was_never_completed_is_not_there(tmp_path):
    train(tmp_path)
    store.begin(store.place_of(tmp_path, 24))
    (tmp_path / "step-16" / "gradcast.json").unlink()  # a deletion that was cut off
    assert store.complete_steps(tmp_path) == [20]
    store.remove_leftovers(tmp_path, 20)
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-20"]


@pytest.mark.parametrize("cause", ["part", "metadata"])
def test_a_failure_to_write_is_said_and_leaves_the_last_snapshot(tmp_path, monkeypatch, caplog, cause):
    written, failing = [], {8, 12}
    method = {"part": "write_part", "metadata": "complete"}[cause]
    before = getattr(writing.Writing, method)

    def fails(self, *arguments, **named):
        written.append(self._place.name)
        if int(self._place.name[5:]) in failing:
            raise OSError(28, "No space left on device")
        return before(self, *arguments, **named)

    monkeypatch.setattr(writing.Writing, method, fails)
    told = train(tmp_path)
    assert written == ["step-4", "step-8", "step-12", "step-16", "step-20"]
    assert store.complete_steps(tmp_path) == [16, 20]
    assert (told["failed"], told["error"]) == (2, None)
    warnings = [each.getMessage() for each in caplog.records if "could not be written" in each.getMessage()]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0]
    assert "the last snapshot is step 4" in warnings[0]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture
def plain_sigterm():
    """SIGTERM ends the process: commands of the laboratory that have run in it raise SystemExit."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_forked_child_ends_at_a_signal_that_its_parent_holds_back(tmp_path, plain_sigterm):
    module, optimizer, _, _ = parts(tmp_path)
    handle = gradcast.attach(module, optimizer)
    handle.snapshots(tmp_path)
    begun, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(tells, b"!")  # Python forgets a signal that comes while it forks
            time.sleep(20)
        finally:
            os._exit(0)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    handle.detach()


def test_snapshots_end_where_another_training_takes_the_folder(tmp_path, caplog):
    train(tmp_path, steps=4)
    (module, optimizer, _, _), (other, its_optimizer, _, _) = parts(tmp_path), parts(tmp_path)
    data, found = torch.stack([row for _, row in program.dataset()]), []
    handles = [gradcast.attach(module, optimizer), gradcast.attach(other, its_optimizer)]
    for handle in handles:
        resuming.resumed[tmp_path] = resuming.Resumed(4)  # each in a process of its own
        found.append(handle.snapshots(tmp_path, every=2))
    for _ in range(5):
        for each, its, snapshots in zip((module, other), (optimizer, its_optimizer), found, strict=True):
            each(data[:2]).sum().backward()
            its.step()
            snapshots.wait()
    for handle in handles:
        handle.detach()
    assert [each.stats()["step"] for each in found] == [None, 8]
    assert "another training writes its snapshots into" in found[0].stats()["error"]
    assert any("snapshots have ended on rank 0 at step" in each.getMessage() for each in caplog.records)
    assert store.complete_steps(tmp_path) == [6, 8]


def test_snapshots_can_begin_again_in_one_program(tmp_path):
    """What was written stays, and steps count on."""
    (tmp_path / "step-3-best").mkdir()
    (tmp_path / "step-4.pt").touch()
    module, optimizer, _, _ = parts(tmp_path)
    handle = gradcast.attach(module, optimizer)
    for begin in (0, 6):
        snapshots = handle.snapshots(tmp_path, every=3)
        for step in range(begin + 1, begin + 7):
            module(torch.ones(4, program.FEATURES)).sum().backward()
            optimizer.step()
            snapshots.wait()
            assert store.complete_steps(tmp_path)[-1:] == [(step - 1) // 3 * 3][: step > 3]
    handle.detach()
    assert sorted(each.name for each in tmp_path.glob("step-*")) == ["step-12", "step-3-best", "step-4.pt", "step-9"]


def test_another_training_of_the_program_does_not_go_on_in_the_folder(tmp_path):
    for number in range(2):
        module, optimizer, _, _ = parts(tmp_path)
        handle = gradcast.attach(module, optimizer)
        if number == 0:
            snapshots = handle.snapshots(tmp_path, every=1)
            module(torch.ones(4, program.FEATURES)).sum().backward()
            optimizer.step()
        else:
            with pytest.raises(gradcast.Error, match="step 1, which this program has not resumed"):
                handle.snapshots(tmp_path)
        handle.detach()
    assert snapshots.stats()["step"] == 1


def test_another_version_of_the_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(store, "VERSION", 4)
        train(tmp_path)
    module, optimizer, loader, extra = parts(tmp_path)
    with pytest.raises(gradcast.Error, match=r"step-20/gradcast\.json is of .* version 4, and .* reads version 3"):
        gradcast.resume(tmp_path, module, optimizer, loader, extra)


def test_parameters_that_an_optimizer_gets_later_are_in_the_snapshot(tmp_path):
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    module = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(layers[0].parameters())
    handle = gradcast.attach(module, optimizer=None)
    snapshots = handle.snapshots(tmp_path, every=2, optimizer=optimizer)
    for step in range(1, 8):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 4:
            optimizer.add_param_group({"params": layers[1].parameters(), "lr": 0.5})
        snapshots.wait()
    handle.detach()
    again = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam([{"params": each.parameters()} for each in again])
    assert gradcast.resume(tmp_path, again, optimizer) == 6
    assert [float(optimizer.state[each.weight]["step"]) for each in again] == [6, 2]
    assert optimizer.param_groups[1]["lr"] == 0.5


def test_an_old_snapshot_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise PermissionError("not yours")

    monkeypatch.setattr(store, "keep_newest", fails)
    told = train(tmp_path)
    assert (told["step"], told["failed"], told["error"]) == (20, 0, None)
    assert [each.getMessage().endswith("cannot be removed (not yours)") for each in caplog.records].count(True) == 1


def write(folder, step, layout, tensors, paths=None, pace=None):
    one = writing.Writing(folder, step, 0, layout, pace or files.Pace())
    part = one.write_part(tensors, {"rank-0.pt": b"", "common.pt": b""})
    layout.take_in([part])
    one.complete([part], paths or list(tensors), world_size=1, is_local=False)


def read(folder, step):
    found = reading.Reading(store.place_of(folder, step))
    assert found.load(found.files) == {}
    return found


def test_a_writer_keeps_its_pace(tmp_path):
    """Half a second for as many bytes, and not before the network is idle."""
    layout, busy = writing.Layout(), iter([True, True, False])
    pace = files.Pace(bytes_per_s=4e6, is_network_busy=lambda: next(busy, False))
    values = {("model", "weight"): torch.arange(500_000.0)}
    start_s = time.monotonic()
    write(tmp_path, 1, layout, values, pace=pace)
    assert time.monotonic() - start_s >= 0.49
    assert list(busy) == []
    assert torch.equal(read(tmp_path, 1).tensors["model", "weight"], values["model", "weight"])


def test_a_folder_that_is_gone_does_not_end_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.Writing, "complete", lambda *_, **__: shutil.rmtree(tmp_path / "gone") or 1 / 0)
    told = train(tmp_path / "gone", steps=8)
    assert (told["step"], told["failed"]) == (None, 2)
    assert "ZeroDivisionError" in told["error"]


def test_frequency():
    assert frequency.steps_between(write_s=0.95, cost_s=0.01, step_s=0.1, overhead=0.035) == 11
    assert frequency.steps_between(write_s=0.05, cost_s=0.1, step_s=0.1, overhead=0.05) == 20
    assert frequency.steps_between(write_s=0.01, cost_s=0.0, step_s=0.1, overhead=0.05) == 2
    text = frequency.sentence(12, write_s=0.7, cost_s=0.0252, step_s=0.1)
    assert text == "a snapshot every 12 steps costs 2.1%; at most 20 steps are lost"
    text = frequency.sentence(10, write_s=0.3, cost_s=0.02, step_s=0.1, network_s=0.01)
    assert "costs 2.0% (1.0% predicted for the network); at most 14" in text


def test_what_slowed_steps_cost():
    """The cost of the first snapshot is told before the step in which it becomes complete is over."""
    times = frequency.StepTimes()
    assert times.cost_s(0.01) == (0.01, None)
    for _ in range(5):
        times.add(0.1, is_busy=False)
    times.touch()
    for _ in range(4):
        times.add(0.15, is_busy=True)
    assert times.cost_s(0.01) == pytest.approx((5 * 0.05, 0.1))
    assert times.cost_s(0.3) == pytest.approx((0.3, 0.1))
    times.add(0.17, is_busy=False)  # the step in which it was complete
    times.add(0.1, is_busy=False)
    for _ in range(2):
        times.add(0.4, is_busy=True)
        assert times.cost_s(0.01) == pytest.approx((4 * 0.05 + 0.07, 0.1)), "the one before"


def test_what_the_first_snapshot_costs_is_forgotten():
    costs, medians_s = frequency.Costs(), []
    assert costs.medians_s() is None
    for cost_s in (2.0, 3.0, 1.0, 1.5, 0.5):
        costs.add(4.0, cost_s, 0.5)
        medians_s.append(costs.medians_s())
    assert medians_s == [(4.0, cost_s, 0.5) for cost_s in (2.0, 3.0, 1.0, 1.25, 1.0)]


@pytest.mark.parametrize(
    ("busy_s", "reads_s", "size_bytes", "expected_s"),
    [
        # 4.5 pieces fit into the idle window of each step, so the fifth is 0.5 pieces late, and forward waits for it.
        ([(0.045, 0.1)], [(0.1, 0.1)], 50, 10 * 0.005),
        ([(0.045, 0.1)], [(0.1, 0.103)], 50, 10 * 0.002),  # less what is left until forward reads
        ([(0.045, 0.1)], [(0.1, 0.2)], 50, 0.0),
        # A short block is late by no more than it takes itself; the window behind it holds one piece.
        ([(0.04, 0.042), (0.045, 0.1)], [(0.042, 0.042), (0.1, 0.1)], 50, 10 * 0.007),
        ([(0.0, 0.1)], [(0.1, 0.1)], 21, 21 * 0.01),  # never idle: each piece is late
    ],
)
def test_what_writing_over_the_network_costs(busy_s, reads_s, size_bytes, expected_s):
    planned = frequency.PlannedStep(0.1, tuple(busy_s), tuple(reads_s), byte_s=0.01, ranks=1)
    cost_s = frequency.cost_over_network_s(planned, size_bytes, piece_bytes=1, longest_wait_s=0.2)
    assert cost_s == pytest.approx(expected_s)
    free = dataclasses.replace(planned, byte_s=0.0)
    assert frequency.cost_over_network_s(free, size_bytes, piece_bytes=1, longest_wait_s=0.2) == 0.0


@pytest.mark.parametrize("steps", [8, 9])
def test_what_the_program_does_between_epochs_is_not_repeated(tmp_path, steps):
    def begin():
        module, data = torch.nn.Linear(2, 1), torch.ones(8, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = torch.utils.data.DataLoader(data, 2, sampler=gradcast.ResumableSampler(data))
        return module, optimizer, scheduler, gradcast.ResumableLoader(loader)

    module, optimizer, scheduler, loader = begin()
    handle = gradcast.attach(module, optimizer)
    handle.snapshots(tmp_path, every=8, loader=loader, extra={"scheduler": scheduler})
    step = 0
    while step < steps:
        for batch in loader:
            module(batch).sum().backward()
            optimizer.step()
            step += 1
            if step == steps > 8:
                break
        else:
            scheduler.step()
    handle.detach()
    module, optimizer, scheduler, loader = begin()
    assert gradcast.resume(tmp_path, module, optimizer, loader, {"scheduler": scheduler}) == 8
    assert (loader.sampler.epoch, loader.sampler.position, scheduler.last_epoch) == (2, 0, 2)


def test_a_part_that_could_not_be_written_is_planned_again(tmp_path):
    layout = writing.Layout()
    (tmp_path / "step-1.tmp").mkdir()
    (tmp_path / "step-1.tmp" / "others").touch()
    for step in range(1, 4):
        values = {("model", "w"): torch.arange(3.0) * step}
        with pytest.raises(FileExistsError) if step == 1 else contextlib.nullcontext():
            write(tmp_path, step, layout, values)
        if step > 1:
            assert read(tmp_path, step).tensors["model", "w"].tolist() == [0.0, step, 2.0 * step]


def test_a_snapshot_that_lacks_a_value_is_not_complete(tmp_path):
    with pytest.raises(RuntimeError, match=r"no rank has written model\.v"):
        write(tmp_path, 1, writing.Layout(), {("model", "w"): torch.ones(1)}, [("model", "w"), ("model", "v")])
    assert store.complete_steps(tmp_path) == []


def test_a_sampler_in_place_of_its_loader_is_refused(tmp_path):
    module = torch.nn.Linear(2, 2)
    handle = gradcast.attach(module, torch.optim.SGD(module.parameters(), 0.1))
    with pytest.raises(gradcast.Error, match=r"ResumableSampler, whose place nobody counts; pass gradcast\.Resumable"):
        handle.snapshots(tmp_path, loader=gradcast.ResumableSampler([1, 2]))
