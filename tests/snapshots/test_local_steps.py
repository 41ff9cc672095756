"""Snapshots of local steps, where every rank has a state of its own: they go on with its bits, also inside a round."""

import functools

import pytest

import gradcast
from gradcast.snapshots import reading, resuming, store
from snapshots import program
from training.attached import attach, error_of, not_refused
from training.local.reference import net, train
from training.local.test_rounds import adamw
from training.needs import torch
from training.pool import on_ranks

FORMS = {
    "blocking": {"overlap": 0},
    "streamed": {"overlap": 3},
    "mean": {"overlap": 2, "outer": "average"},
    "int8": {"overlap": 3, "wire": "int8"},
    "blocking int8": {"overlap": 0, "wire": "int8"},
}
END = 19


def digest(module, optimizer, handle):
    """A digest of all that a rank keeps; what travels is left out."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    entries = {names[id(parameter)]: dict(entry) for parameter, entry in optimizer.state.items()}
    rounds = {f"{what}.{k}": v for what, kept in handle.state_dict()["tensors"].items() for k, v in kept.items()}
    return program.digest({"model": module.state_dict() | rounds, "optimizer": entries})


def begin(wire="fp32", **local):
    resuming.resumed.clear()
    module = net(0)
    optimizer = adamw(module)
    return module, optimizer, attach(module, optimizer, wire=wire, local=gradcast.LocalSteps(5, **local))


def run(rank, folder, end, *, every=2, ends=False, **options):
    """Trains on with snapshots. Returns the step from which it goes on, and the digest of each step."""
    module, optimizer, handle = begin(**options)
    first = 0
    if folder is not None:
        first = gradcast.resume(folder, module, optimizer) or 0
        snapshots = handle.snapshots(folder, every=every)
    digests = {}
    for step in range(first, end):
        train(module, optimizer, rank.index, step)
        digests[step + 1] = digest(module, optimizer, handle)
        if folder is not None:
            snapshots.wait()
    if ends:
        handle.end_round()
        digests["end"] = digest(module, optimizer, handle)
    handle.detach()
    assert folder is None or snapshots.stats()["failed"] == 0, snapshots.stats()
    return first, digests


def goes_on(rank, folder, form):
    """From the first round, from where fragments travel, and where a round ends. The snapshot is copied where the
    program ends, or where the next step begins."""
    options, found = FORMS[form], []
    whole = run(rank, None, END, ends=True, **options)[1]
    for cut, end in ((3, 3), (6, 7), (8, 8), (10, 11)):
        begins, _ = run(rank, f"{folder}/{cut}", end, every=cut, **options)
        first, digests = run(rank, f"{folder}/{cut}", END, ends=True, **options)
        found += [] if (begins, first) == (0, cut) else [f"goes on from step {first} in place of {cut}"]
        found += [f"cut at {cut}: {step}" for step, each in digests.items() if each != whole[step]]
    return found


@pytest.mark.parametrize(
    "form",
    [pytest.param(each, marks=pytest.mark.slow if each in ("mean", "int8", "blocking int8") else ()) for each in FORMS],
)
def test_a_training_goes_on_with_the_bits_of_every_rank(ranks, tmp_path, form):
    assert ranks.run(2, goes_on, str(tmp_path), form) == [[]] * 2


def goes_on_with_others(rank, folder, end, every, options, ends=False):
    """Returns the step, the error, and a digest of the parameters behind the last step."""
    module, optimizer, handle = begin(**options)
    code, message = error_of(lambda: gradcast.resume(folder, module, optimizer))
    if code is None:
        handle.snapshots(folder, every=every)
        for step in range(handle.stats()["step"], end):
            train(module, optimizer, rank.index, step)
        if ends:
            handle.end_round()
    done, parameters = handle.stats()["step"], dict(module.named_parameters())
    handle.detach()
    return done, message, program.digest({"model": parameters, "optimizer": {}})


@pytest.mark.parametrize("form", ["streamed", "blocking int8"])
def test_another_number_of_ranks_goes_on_where_a_round_has_ended(ranks, tmp_path, form):
    """In the blocking form that is every step in which one ends."""
    options, folder = FORMS[form], str(tmp_path)
    end = 7 if form == "streamed" else 5
    before = ranks.run(2, goes_on_with_others, folder, end, end, options, form == "streamed")
    assert store.complete_steps(tmp_path)[-1] == end
    resumed = ranks.run(3, goes_on_with_others, folder, end, 6, options)
    assert [each[2] for each in resumed] == [before[0][2]] * 3
    after = ranks.run(3, goes_on_with_others, folder, end + 6, 6, options)
    assert [done for done, _, _ in after] == [end + 6] * 3
    for done, message, _ in ranks.run(2, goes_on_with_others, folder, 20, 6, options):
        assert done == 0
        assert "inside a round with world_size 3, and here it is 2" in message
        assert "handle.end_round()" in message


@on_ranks(2)
def test_what_resume_refuses(rank, tmp_path):
    run(rank, str(tmp_path / "local"), 2)
    module = net(0)
    optimizer, found = adamw(module), []
    resume = functools.partial(gradcast.resume, tmp_path / "local", module, optimizer)
    found += not_refused(resume, "gradcast.attach() with options.local")
    plain = attach(module, optimizer, "hook")
    plain.snapshots(tmp_path / "plain", every=1, optimizer=optimizer)
    train(module, optimizer, 0, 0)
    plain.detach()
    module, optimizer, handle = begin()
    resume = functools.partial(gradcast.resume, tmp_path / "plain", module, optimizer)
    found += not_refused(resume, "omit options.local")
    handle.detach()
    return found


@on_ranks(1)
def test_one_worker_has_no_network_to_wait_for(rank, tmp_path):
    module, optimizer, handle = begin()
    snapshots = handle.snapshots(tmp_path, every=2, over_network=True)
    for step in range(3):
        train(module, optimizer, rank.index, step)
        snapshots.wait()
    handle.detach()
    return [] if store.complete_steps(tmp_path) == [2] else [str(snapshots.stats())]


@pytest.mark.parametrize("damaged", ["model", "optimizer", "momentum"])
@on_ranks(2)
def test_damage_that_only_one_rank_meets_is_refused_on_both_before_anything_changes(rank, tmp_path, damaged):
    run(rank, str(tmp_path), 2)
    if rank.index == 1:
        found = reading.Reading(store.place_of(tmp_path, 2))
        file, each = next((f, e) for f, v in found.values.items() for e in v if e.path[:3] == ("local", "1", damaged))
        with (found.place / file).open("r+b") as stream:
            stream.seek(each.offset)
            stream.write(b"damaged")
    torch.distributed.barrier()
    module, optimizer, handle = begin()
    before = digest(module, optimizer, handle)
    code, message = error_of(lambda: gradcast.resume(tmp_path, module, optimizer))
    same = digest(module, optimizer, handle) == before
    handle.detach()
    is_right = code == "invalid_use" and "step 2 (rank 1: __1_0.distcp has other bytes than were written)" in message
    return [] if same and is_right else [f"{same}: {message}"]


@on_ranks(2)
def test_a_host_gets_only_what_its_ranks_read(rank, tmp_path):
    own = tmp_path / str(rank.index)
    run(rank, str(own), 2)
    before = {each.name for each in (own / "step-2").iterdir()}
    first, _ = run(rank, str(own), 3)
    new = {each.name for each in (own / "step-2").iterdir()} - before
    return [] if first == 2 and new == set() else [f"{first}: {new}"]


class WithHidden(torch.nn.Module):
    """``hidden``: a buffer that each rank moves, and that no state dict has."""

    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(2, 2)
        self.register_buffer("hidden", torch.zeros(3), persistent=False)

    def forward(self, given):
        if self.training:
            self.hidden += given.sum().item()
        return self.inside(given)


@on_ranks(2)
def test_a_buffer_that_no_state_dict_has_goes_on(rank, tmp_path):
    ends = []
    for folder, cut in ((tmp_path / "whole", 7), (tmp_path / "parts", 3)):
        for end in dict.fromkeys((cut, 7)):
            resuming.resumed.clear()
            torch.manual_seed(1)
            module = WithHidden()
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            handle = attach(module, optimizer, local=gradcast.LocalSteps(5, overlap=0))
            first = gradcast.resume(folder, module, optimizer) or 0
            snapshots = handle.snapshots(folder, every=3)
            for step in range(first, end):
                module(torch.full((1, 2), rank.index + step + 1.0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                snapshots.wait()
            ends.append((first, module.hidden.tolist()))
            handle.detach()
    return [] if ends[2] == (3, ends[0][1]) else [str(ends)]


@on_ranks(2)
def test_a_forward_pass_of_the_global_copy_takes_no_snapshot(rank, tmp_path):
    module, optimizer, handle = begin(overlap=3)
    snapshots = handle.snapshots(tmp_path, every=7)
    for step in range(8):
        train(module, optimizer, rank.index, step)
        with handle.global_model():
            module(torch.ones(2, 40), rank.index)  # running statistics change, too, but only those that are lent
        if step == 6:
            own = {name: each.clone() for name, each in module.state_dict().items()}
    handle.detach()
    module, optimizer, handle = begin(overlap=3)
    step = gradcast.resume(tmp_path, module, optimizer)
    found = [name for name, each in module.state_dict().items() if not torch.equal(each, own[name])]
    handle.detach()
    return found + ([] if step == 7 else [f"step {step}"]) + ([] if snapshots.stats()["failed"] == 0 else ["failed"])
