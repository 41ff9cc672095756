"""Snapshots of two ranks that do not do the same, and of trainings that do more than plain steps."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import gradcast
from gradcast import _core
from gradcast.snapshots import reading, resuming, store, writer, writing
from snapshots import program
from training.attached import attach, error_of, heard, hosts_of, planning
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks

KINDS = {
    "accumulated": {"accumulate": 3},
    "with a scaler": {"scaler": True},
    "int8": {"wire": "int8"},
    "clipped": {"clip": 0.1},
    "several optimizers": {"optimizers": 2},
    "weighted": {"weighs": True},
}


class Place:
    """The next step's number in the data, which the program keeps itself."""

    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def train(
    rank, folder, end, *, mode="overlap", accumulate=1, scaler=False, wire="fp32", clip=None, optimizers=1, weighs=False
):
    """Returns the digests of the steps. With ``scaler`` the gradients of one step overflow, so it is skipped."""
    resuming.resumed.clear()
    torch.manual_seed(3 + rank)
    module, data = program.model(), torch.stack([row for _, row in program.dataset()])
    parameters = list(module.parameters())
    parts = [parameters] if optimizers == 1 else [parameters[:3], parameters[3:]]
    made = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
    extra = {"place": Place()}
    if scaler:
        extra["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    gradcast.resume(folder, module, made, extra=extra)
    place, digests = extra["place"], {}
    options = gradcast.Options(plan=planning("p3"), wire=wire, clip=gradcast.Clip(norm=clip))
    handle = gradcast.attach(module, made if mode == "overlap" else None, options=options)
    snapshots = handle.snapshots(folder, every=2, extra=extra, optimizer=None if mode == "overlap" else made)
    while place.at < end:
        for part in range(accumulate):
            rows = data[(place.at * accumulate + part) * 2 + rank :][:2]
            overflows = scaler and place.at == 4 and rank == 0
            weight = handle.weight(3 * rank + place.at % 5 + 2) if weighs else contextlib.nullcontext()
            with weight, handle.no_sync() if part + 1 < accumulate else contextlib.nullcontext():
                loss = module(rows).square().mean() * (torch.inf if overflows else 1.0)
                (extra["scaler"].scale(loss) if scaler else loss).backward()
        for each in made:
            extra["scaler"].step(each) if scaler else each.step()
        if scaler:
            extra["scaler"].update()
        for each in made:
            each.zero_grad()
        place.at += 1
        digests[place.at] = program.digest({"model": module.state_dict(), "optimizer": {}})
        snapshots.wait()
    assert snapshots.stats()["failed"] == 0
    handle.detach()
    return digests


def goes_on(rank, folder, mode, kind):
    """The steps of a training that has begun again whose bits are not those of one that has not."""
    named = KINDS[kind] | {"mode": mode}
    whole = train(rank.index, f"{folder}/whole", 12, **named)
    train(rank.index, f"{folder}/parts", 9, **named)
    after = train(rank.index, f"{folder}/parts", 12, **named)
    assert len(after) in (3, 4), "the snapshot of step 8 is resumed"
    return [step for step, digest in after.items() if digest != whole[step]]


@pytest.mark.parametrize(
    ("mode", "kind"), [*(("overlap", kind) for kind in KINDS), ("hook", "accumulated"), ("hook", "with a scaler")]
)
def test_a_training_goes_on_with_its_bits(ranks, tmp_path, mode, kind):
    assert ranks.run(2, goes_on, str(tmp_path), mode, kind) == [[]] * 2


def two_layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def begun(rank, folder, resumes=False, plan=None, **named):
    """A module and its optimizer with snapshots, and what makes a step."""
    resuming.resumed.clear()
    module = two_layers()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    if resumes:
        assert gradcast.resume(folder, module, optimizer) is None
    handle = attach(module, optimizer, plan=plan or planning(adapt=True))

    def step():
        module(torch.full((2, 8), float(rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.optimizer = optimizer
    return handle, handle.snapshots(folder, **named), step


def trained(handle, snapshots, step, steps=4):
    for _ in range(steps):
        step()
        snapshots.wait()
    handle.detach()


def told_that_ended(messages):
    return [each for each in messages if "snapshots have ended" in each]


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_ends_its_snapshots_alone_keeps_nobody_waiting(ranks, tmp_path, leaver):
    told = ranks.run(2, one_leaves, str(tmp_path), leaver)
    assert told[leaver] == []
    assert len(told[1 - leaver]) == 1
    assert f"on rank {1 - leaver} at step" in told[1 - leaver][0]
    assert "closed" in told[1 - leaver][0]
    assert len(store.complete_steps(tmp_path)) > 0


def one_leaves(rank, folder, leaver):
    with heard() as messages:
        handle, snapshots, step = begun(rank.index, folder, every=3)
        for number in range(60):
            step()
            time.sleep(0.01)
            if number == 10 and rank.index == leaver:
                snapshots.close()
        handle.detach()
    return told_that_ended(messages)


def test_a_rank_that_never_writes_holds_up_no_end(ranks, tmp_path):
    told = ranks.run(2, one_is_stuck, str(tmp_path))
    assert told[0] == ["the snapshot of step 3 is not complete: rank 1 did not answer"]
    assert store.complete_steps(tmp_path) == []


def one_is_stuck(rank, folder):
    stuck = threading.Event()
    with heard() as messages, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_OTHERS_AT_CLOSE_S", 0.5)
        if rank.index == 1:
            patch.setattr(writing.Writing, "write_part", lambda *_: stuck.wait(30))
        handle, _, step = begun(rank.index, folder, every=3)
        for _ in range(4):
            step()
        if rank.index == 0:
            handle.detach()
        torch.distributed.barrier()
        stuck.set()
        handle.detach()
    return [each for each in messages if "not complete" in each]


def test_a_rank_without_samples_takes_part_in_snapshots(ranks, tmp_path):
    assert ranks.run(2, has_no_samples, str(tmp_path)) == [(8, 0, None)] * 2


def has_no_samples(rank, folder):
    handle, snapshots, step = begun(rank.index, folder, every=2)
    for number in range(1, 10):
        if rank.index == 1 and number > 4:
            with handle.weight(0):
                pass
            step.optimizer.step()
        else:
            with handle.weight(2):
                step()
        snapshots.wait()
    stats = snapshots.stats()
    handle.detach()
    return stats["step"], stats["failed"], stats["error"]


def test_what_cannot_be_copied_on_one_rank_ends_no_training(ranks, tmp_path):
    told = ranks.run(2, one_cannot_copy, str(tmp_path))
    assert [failed for failed, _ in told] == [1, 1]
    for _, error in told:
        assert "rank 0: copying: MemoryError: no room" in error
    assert store.complete_steps(tmp_path)[-1] >= 6


class FailsOnce(Place):
    calls = 0

    def state_dict(self):
        self.calls += 1
        if self.calls == 2:  # the first one is at the start
            raise MemoryError("no room")
        return {}


def one_cannot_copy(rank, folder):
    handle, snapshots, step = begun(rank.index, folder, every=3, extra={"fails": FailsOnce()})
    errors = []
    for _ in range(12):
        step()
        snapshots.wait()
        errors.append(snapshots.stats()["error"])
    handle.detach()
    return snapshots.stats()["failed"], next(each for each in errors if each)


def test_a_part_that_is_cut_off_is_refused_before_anything_changes(ranks, tmp_path):
    for cut in range(2):
        assert ranks.run(2, resumes_cut, str(tmp_path / str(cut)), cut) == [None, None]


def resumes_cut(rank, folder, cut):
    handle, snapshots, step = begun(rank.index, folder, every=3)
    trained(handle, snapshots, step)
    part = Path(folder) / "step-3" / f"__{cut}_0.distcp"
    if rank.index == 0:
        part.write_bytes(part.read_bytes()[:-10])
    torch.distributed.barrier()
    module = two_layers()
    before = [each.clone() for each in module.parameters()]
    with pytest.raises(gradcast.Error, match=rf"no snapshot .* step 3 \(rank 0: __{cut}_0.distcp has \d+ bytes"):
        gradcast.resume(folder, module, torch.optim.SGD(module.parameters(), 0.01))
    assert all(map(torch.equal, before, module.parameters()))


def test_what_only_one_rank_has_wrong_is_refused_on_both(ranks, tmp_path):
    for rank, (unreadable, foreign) in enumerate(ranks.run(2, resumes_wrongly, str(tmp_path))):
        assert "on rank 1 of 2: OSError: gone" in unreadable, rank
        assert "parameters of the module only" in foreign, rank


def resumes_wrongly(rank, folder):
    handle, snapshots, step = begun(rank.index, folder, every=3)
    trained(handle, snapshots, step)
    module, other = two_layers(), two_layers()
    with pytest.MonkeyPatch.context() as patch:
        if rank.index == 1:
            patch.setattr(reading.Reading, "object", fails_to_read)
        with pytest.raises(gradcast.Error) as unreadable:
            gradcast.resume(folder, module, torch.optim.SGD(module.parameters(), 0.01))
    updated = module if rank.index == 0 else other
    with pytest.raises(gradcast.Error) as foreign:
        gradcast.resume(folder, module, torch.optim.SGD(updated.parameters(), 0.01))
    return str(unreadable.value), str(foreign.value)


def fails_to_read(*_):
    raise OSError("gone")


def test_a_step_that_one_rank_does_not_see_is_refused(ranks, tmp_path):
    for rank, error in enumerate(ranks.run(2, resumes_apart, str(tmp_path))):
        assert "rank 1 sees a snapshot of step 3" in error, rank
        assert "rank 0 does not" in error


def resumes_apart(rank, folder):
    if rank.index == 1:
        place = Path(folder) / "1" / "step-3"
        place.mkdir(parents=True)
        for name in (store.MARK, store.METADATA):
            (place / name).touch()
    module = torch.nn.Linear(1, 1)
    with pytest.raises(gradcast.Error) as caught:
        gradcast.resume(f"{folder}/{rank.index}", module, torch.optim.SGD(module.parameters(), 0.1))
    return str(caught.value)


@on_ranks(2)
def test_a_first_snapshot_that_only_one_rank_has_completed_is_begun_anew(rank, tmp_path):
    folder = tmp_path / str(rank.index)
    place = folder / ("step-3" if rank.index == 0 else "step-3.tmp")
    place.mkdir(parents=True)
    for name in [store.MARK, store.METADATA][: 2 - rank.index]:
        (place / name).touch()
    handle, snapshots, step = begun(rank.index, str(folder), resumes=True, every=3)
    assert store.listed(folder) == ([], [], [])
    trained(handle, snapshots, step)
    assert store.complete_steps(folder) == [3]


@on_ranks(2)
def test_a_host_with_damage_gets_the_file_of_another(rank, tmp_path):
    """Of folders of their own. Where nobody has it, all ranks take the snapshot before."""
    folder = tmp_path / str(rank.index)
    handle, snapshots, step = begun(rank.index, folder, every=2)
    trained(handle, snapshots, step, steps=5)
    steps, found = store.complete_steps(folder), []
    whole = (tmp_path / "0" / f"step-{steps[-1]}" / "__0_0.distcp").read_bytes()
    file = folder / f"step-{steps[-1]}" / "__0_0.distcp"
    for content in (None, whole, b"damaged", whole[:-1] + b"!"):
        if rank.index == 1 and content is not None:
            file.write_bytes(content)
        torch.distributed.barrier()
        module = two_layers()
        found.append(gradcast.resume(folder, module, torch.optim.SGD(module.parameters(), 0.01)))
        assert file.read_bytes() == whole
    file.write_bytes(b"damaged")
    with heard() as messages:
        found.append(gradcast.resume(folder, module, torch.optim.SGD(module.parameters(), 0.01)))
    told = [each for each in messages if f"step {steps[-1]} (rank 0: __0_0.distcp has 7 bytes of" in each]
    is_right = found == [*[steps[-1]] * 4, steps[-2]] and len(told) == (rank.index == 0)
    return [] if is_right else [f"{found} of {steps}, {messages}"]


@on_ranks(2)
def test_parts_of_different_trainings_are_refused(rank, tmp_path):
    """Of the same step, on hosts with folders of their own."""
    for name in ("a", "b"):
        handle, snapshots, step = begun(rank.index, tmp_path / f"{name}{rank.index}", every=2)
        step.optimizer.param_groups[0]["lr"] = 0.5 if name == "b" else 0.25
        trained(handle, snapshots, step)
    folder = tmp_path / ("a0" if rank.index == 0 else "b1")
    module = two_layers()
    code, message = error_of(lambda: gradcast.resume(folder, module, torch.optim.SGD(module.parameters(), 0.01)))
    is_right = code == "invalid_use" and "ranks 0 and 1 have parts of different snapshots" in message
    return [] if is_right else [message]


@on_ranks(2)
def test_the_ranks_ask_for_the_same(rank, tmp_path):
    with pytest.raises(gradcast.Error, match="alike on all ranks"):
        begun(rank.index, str(tmp_path), every=3 + rank.index)


@on_ranks(2)
def test_ranks_name_the_same_signals_in_any_way(rank, tmp_path):
    first, second = signal.SIGRTMIN + 1, signal.SIGTERM
    same = ((first, second), frozenset([int(second), int(first)]))
    handle, _, _ = begun(rank.index, str(tmp_path), signals=same[rank.index])
    others, wrong = ([second], [int(second), first]), ([second], [[second]])
    with pytest.raises(gradcast.Error, match=rf"'signals': \[15\].* 'signals': \[15, {first}\]"):
        handle.snapshots(tmp_path, signals=others[rank.index])
    with pytest.raises(gradcast.Error, match="give a list of signals"):
        handle.snapshots(tmp_path, signals=wrong[rank.index])
    handle.detach()


@on_ranks(2)
def test_no_rank_writes_into_a_folder_that_another_training_has_taken(rank, tmp_path):
    handle, snapshots, step = begun(rank.index, str(tmp_path), every=3)
    if rank.index == 0:
        store.take_over(tmp_path, "another")
    torch.distributed.barrier()
    trained(handle, snapshots, step)
    assert "another training writes its snapshots into" in snapshots.stats()["error"]
    assert [each.name for each in tmp_path.iterdir()] == [store.MARK]


@pytest.mark.parametrize("receiver", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_on_one_rank_brings_a_last_snapshot(ranks, tmp_path, receiver):
    told = ranks.run(2, gets_a_signal, str(tmp_path), receiver)
    assert told[0]["last"] == told[1]["last"]
    assert told[receiver]["sent_at"] <= told[0]["last"] <= told[receiver]["passed_on_at"] < 400
    assert store.complete_steps(tmp_path) == [told[0]["last"]]


def gets_a_signal(rank, folder, receiver):
    """Handles SIGTERM itself, behind the snapshots."""
    told = {"sent_at": None, "passed_on_at": None}
    before = signal.signal(signal.SIGTERM, lambda *_: told.update(passed_on_at=number))
    handle, snapshots, step = begun(rank.index, folder, every=100_000)
    for number in range(1, 400):
        step()
        time.sleep(0.005)
        if number == 20 and rank.index == receiver:
            told["sent_at"] = number
            os.kill(os.getpid(), signal.SIGTERM)
        if any(rank.gather(f"step {number}", told["passed_on_at"])):
            break
    handle.detach()
    signal.signal(signal.SIGTERM, before)
    return told | {"last": snapshots.stats()["step"]}


def with_shares(rank, folder, steps):
    """Trains one epoch on, with the last rank computing more slowly. Returns the step and sample that it begins with,
    its samples, and the last shares."""
    resuming.resumed.clear()
    torch.manual_seed(3)
    module = torch.nn.Linear(1, 4)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    handle = gradcast.attach(module, optimizer, options=gradcast.Options(plan=planning()))
    samples = torch.arange(240.0).unsqueeze(1)
    sampler = gradcast.BalancedBatchSampler(samples, handle, 12, every=2)
    loader = gradcast.ResumableLoader(torch.utils.data.DataLoader(samples, batch_sampler=sampler))
    begins = gradcast.resume(folder, module, optimizer, loader=loader), sampler.position
    snapshots = handle.snapshots(folder, every=1, loader=loader)
    live, used = session_of(handle).controller, []
    live.meter.exposed.own_stages_ns = lambda *_: {"backward": 1e6, "loop": 1e6, "forward": 1e6}
    for batch, _ in zip(loader, range(steps), strict=False):
        busy_ns = 1e6 * len(batch) * (2 if rank.index == rank.size - 1 else 1)
        live.meter._own_facts = lambda _, ns=busy_ns: _core.RankFacts(step_ns=2e7, busy_ns=ns, link_ns=1e6)
        module(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.wait()
        used += batch.flatten().tolist()
    shares = sampler.shares
    handle.detach()
    return begins, used, shares


def test_balanced_shares_go_on_with_another_number_of_ranks(ranks, tmp_path):
    first = ranks.run(3, with_shares, str(tmp_path), 12)
    assert [shares for _, _, shares in first] == [(5, 5, 2)] * 3
    second = ranks.run(2, with_shares, str(tmp_path), 100)
    step, position = second[0][0]
    assert step in (11, 12)
    assert all((begins, shares) == ((step, 12 * step), (8, 4)) for begins, _, shares in second), position
    rest = sorted(sample for _, used, _ in second for sample in used)
    before = sorted(sample for _, used, _ in first for sample in used)
    assert len(set(rest)) == len(rest) == 240 - 12 * step
    assert len(set(before)) == len(before) == 12 * 12
    assert set(rest) | set(before) == set(map(float, range(240)))


def on_hosts_of_their_own(rank, folder, steps):
    """Trains on, and returns the step from which it goes on, and whether it measures then."""
    resuming.resumed.clear()
    module = two_layers()
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    begins = gradcast.resume(folder, module, optimizer)
    with hosts_of(1):
        handle = gradcast.attach(module, optimizer, options=gradcast.Options(plan=planning(adapt=True)))
    snapshots = handle.snapshots(folder, every=1)
    measures = handle.measuring
    for _ in range(steps):
        module(torch.full((2, 8), float(rank.index))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots.wait()
    world_size = handle.profile.world_size
    handle.detach()
    return begins is not None, measures, world_size


@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3)])
def test_with_another_number_of_ranks_a_plan_is_there_from_the_first_step(ranks, tmp_path, before, now):
    """Also on ranks that the snapshot knows nothing of."""
    assert ranks.run(before, on_hosts_of_their_own, str(tmp_path), 8) == [(False, True, before)] * before
    assert ranks.run(now, on_hosts_of_their_own, str(tmp_path), 2) == [(True, False, now)] * now


@on_ranks(2)
def test_over_the_network_a_plan_without_a_measured_link_predicts_nothing(rank, tmp_path):
    plan = planning()
    with hosts_of(1):
        handle, snapshots, step = begun(rank.index, tmp_path / "measured", False, plan, every=2, over_network=True)
    predicted = []
    for _ in range(8):
        step()
        snapshots.wait()
        predicted.append(snapshots.stats()["predicted_network_ms"])
    assert predicted[2] is None
    assert predicted[-1] is not None
    assert snapshots.stats()["failed"] == 0
    path = tmp_path / f"{rank.index}.json"
    handle.save_plan(path)
    handle.detach()
    plan = dataclasses.replace(plan, file=str(path))
    with hosts_of(1):
        handle, snapshots, step = begun(rank.index, tmp_path / "pinned", False, plan, every=2, over_network=True)
    for _ in range(8):
        step()
        snapshots.wait()
    stats = snapshots.stats()
    handle.detach()
    assert (stats["failed"], stats["error"], stats["predicted_network_ms"]) == (0, None, None)
    assert stats["step"] in (6, 8)
