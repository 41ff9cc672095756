"""Plan and profile in a checkpoint, and comparing what the ranks have received."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import gradcast
from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.training.step.rank_consistency import RankConsistency
from training import compare
from training.attached import attach, heard, hosts_of, not_refused, planning
from training.inside import session_of
from training.models import TASKS
from training.needs import torch
from training.pair import Pair, Training
from training.pool import on_ranks


def save(rank, mode, path):
    ours = Training(rank.index, "plain", "adam plain", mode=mode, policy="fifo")
    ours.train(6)
    state = {
        "module": ours.module.state_dict(),
        "optimizer": ours.optimizer.state_dict(),
        "gradcast": ours.handle.state_dict(),
    }
    if rank.index == 0:
        torch.save(state, path)
    json.dumps(state["gradcast"])
    hash_ = ours.handle.plan.hash(ours.handle.profile)
    ours.handle.detach()
    return hash_


def load(rank, mode, path):
    """Goes on from the checkpoint, beside DDP that does the same."""
    pair = Pair(rank, "plain", "adam plain", mode=mode, policy="fifo")
    state = torch.load(path)
    for side in pair.sides:
        side.module.load_state_dict(state["module"])
        side.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # it would share its tensors
    before = pair.handle.plan_version
    pair.handle.load_state_dict(state["gradcast"])
    followed = pair.handle.plan.hash(pair.handle.profile)
    pair.train(4)
    assert pair.handle.plan_version == before + 1, "one plan, no warm-up"
    return pair.end(), followed


def test_the_plan_of_a_checkpoint_is_followed_at_once(ranks, tmp_path, mode):
    path = str(tmp_path / "checkpoint.pt")
    saved = ranks.run(2, save, mode, path)
    assert ranks.run(2, load, mode, path) == [([], saved[0])] * 2


def load_elsewhere(rank, path):
    ours = Training(rank.index, "plain", "adam plain", policy="fifo")
    before = ours.handle.plan_version
    ours.handle.load_state_dict(torch.load(path)["gradcast"])
    assert ours.handle.profile is None
    ours.train(4 if rank.size > 1 else 0)
    return ours.handle.plan_version - before


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_numbers_of_workers_measure_again(ranks, tmp_path, world_size):
    path = str(tmp_path / "checkpoint.pt")
    ranks.run(2, save, "overlap", path)
    versions = 3 if world_size > 1 else 0  # two more plans of the warm-up, then one of its own
    assert ranks.run(world_size, load_elsewhere, path) == [versions] * world_size


def save_on_hosts(rank, mode, path):
    with hosts_of(1):
        ours = Training(rank.index, "plain", "adam plain", mode=mode, plan=planning(adapt=True))
    ours.train(6)
    state = ours.handle.state_dict()
    if rank.index == 0:
        torch.save(state, path)
    ours.handle.detach()


def load_on_hosts(rank, mode, path):
    """Goes on beside DDP. Rank 0's state counts."""
    with hosts_of(1):
        pair = Pair(rank, "plain", "adam plain", mode=mode, plan=planning(adapt=True))
    state = torch.load(path) if rank.index == 0 else {}
    with heard() as lines:
        pair.handle.load_state_dict(state)
    profile, measures = pair.handle.profile, pair.handle.measuring
    pair.train(4)
    before = gradcast.Profile.from_json(torch.load(path)["profile"])
    byte_costs = [each.link.all_reduce.pieces[-1].beta_ns_per_byte for each in (profile, before)]
    found = [] if profile.world_size == rank.size else [f"a profile of {profile.world_size} workers"]
    found += [] if not measures else ["measures again"]
    found += [] if byte_costs[0] == pytest.approx(byte_costs[1] * 3 / 4) else [f"bytes cost {byte_costs}"]
    found += [] if compute_ns(profile) == compute_ns(before) else ["other compute"]
    said = any("of 3 workers; planned for 2 without measuring" in line for line in lines)
    return pair.end() + found + ([] if said == (rank.index == 0) else lines)


def test_other_numbers_of_hosts_are_planned_for_at_once(ranks, tmp_path, mode):
    path = str(tmp_path / "checkpoint.pt")
    ranks.run(3, save_on_hosts, mode, path)
    assert ranks.run(2, load_on_hosts, mode, path) == [[]] * 2


SAVED_EARLIER = Path(__file__).parent / "saved_earlier"  # of the plain model, by a version without a step message


@pytest.mark.parametrize("what", ["state", "state of the first release", "plan"])
@on_ranks(2)
def test_what_an_earlier_version_has_saved_is_measured_again(rank, what):
    with heard() as lines:
        file = str(SAVED_EARLIER / "plan.json") if what == "plan" else None
        pair = Pair(rank, plan=replace(planning(), file=file))
        if what != "plan":
            state = json.loads((SAVED_EARLIER / "state.json").read_text())
            pair.handle.load_state_dict(state if what == "state" else state | {"version": None})
        pair.train(6)
    said = [line for line in lines if "version of gradcast" in line and "measures" in line]
    assert len(said) == (rank.index == 0), lines
    assert pair.handle.profile is not None
    return pair.end()


CHANGES = {
    "half a plan": {"plan": '{"gradcast"'},
    "another version": {"version": 3},
    "too early": {"plan": None},
    "names of another model": {"unseen_reads": ["nobody"]},
}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("half a plan", "invalid_plan"),
        ("another program", "invalid_use"),
        ("names of another model", "invalid_use"),
        ("another version", None),
        ("another model", None),
        ("another mode", None),
        ("too early", None),
    ],
)
@on_ranks(2)
def test_a_checkpoint_that_does_not_fit(rank, change, code):
    """What is no checkpoint is an error; what is another training's leaves the warm-up going on."""
    ours = Training(rank.index, "plain", "adam plain", policy="fifo")
    ours.train(5)
    state = {"step": 3} if change == "another program" else ours.handle.state_dict() | CHANGES.get(change, {})
    if change == "another model":
        ours = Training(rank.index, "transformer", "adam plain", policy="fifo")
    elif change == "another mode":
        ours = Training(rank.index, "plain", "adam plain", mode="hook")
    words = ["state_dict"] if code == "invalid_use" else []
    return not_refused(lambda: ours.handle.load_state_dict(state), *words, code=code)


@pytest.mark.parametrize("where", [0, 150, -1])
@on_ranks(2)
def test_ranks_that_have_received_different_sums(rank, mode, where):
    """What rank 1 has received is changed in its memory before the ranks compare it."""
    ours = Training(rank.index, "plain", "sgd plain", mode=mode, policy="fifo", compare_every=6)
    consistency, buffers = session_of(ours.handle).cycle.consistency, session_of(ours.handle).exchange.buffers
    compare_ranks = consistency.compare_ranks

    def compare_damaged(iteration):
        if rank.index == 1 and iteration == 11:
            buffers.flats[0][where] += 1e-3
        compare_ranks(iteration)

    consistency.compare_ranks = compare_damaged
    with pytest.raises(gradcast.Error, match=r"iteration 11 .* rank 1 .* block \d+ \(.*\d\.(weight|bias)") as raised:
        ours.train(12)
    assert raised.value.code == "communication"


@on_ranks(2, timeout_s=20.0)
def test_a_rank_that_cannot_compare_is_named_by_all(rank, mode):
    """As where a device fails while it adds up."""
    ours = Training(rank.index, "plain", "sgd plain", mode=mode, policy="fifo", compare_every=6)
    if rank.index == 1:
        session_of(ours.handle).cycle.consistency._checksum = mock.Mock(side_effect=RuntimeError("a lost device"))
    with pytest.raises(gradcast.Error, match=r"comparing .* on rank 1 of 2: RuntimeError: a lost device") as raised:
        ours.train(12)
    assert raised.value.code == "communication"


def comparing(rank, mode, every, besides):
    """How many steps there were. ``besides(handle, module, batch)``: what is done before step()."""
    task = TASKS["plain"]
    module = task.module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = attach(module, sgd, mode, policy="fifo", compare_every=every)
    for number in range(12):
        sgd.zero_grad()
        task.loss(module, task.batch(rank.index, number)).backward()
        besides(handle, module, task.batch(rank.index, 50 + number))
        sgd.step()
    handle.flush()
    return handle.stats()["step"], compare.digest(module)


@on_ranks(2)
def test_comparing_goes_by_iterations(rank, mode):
    """Passes without sync write into what has arrived: no false alarm, no hang."""

    def pass_without_sync(handle, module, batch):
        with handle.no_sync():
            TASKS["plain"].loss(module, batch).backward()

    steps, _ = comparing(rank, mode, 3, pass_without_sync)
    return compare.trees(steps, 12, "steps")


@on_ranks(2, timeout_s=20.0)
def test_a_pass_that_comes_to_no_gradient_compares_nothing(rank, mode):
    """Before step(), rank 1 runs a backward pass that comes to none of the module's parameters."""

    def other_weights(handle, module, batch):
        if rank.index == 1:
            fast = {name: torch.nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
            torch.func.functional_call(module, fast, batch[:1]).sum().backward()

    result = comparing(rank, mode, 1, other_weights)
    return [each for each in rank.gather("result", result) if each != result]


@on_ranks(2)
def test_a_plan_that_is_loaded_between_backward_and_step(rank):
    """With another layout, before a step that clips: the gradients move."""
    first = Training(rank.index, "transformer", "sgd plain", policy="fifo")
    first.train(5)
    state = first.handle.state_dict()
    planned = [place.name for place in first.handle.layout]
    first.handle.detach()
    pair = Pair(rank, "transformer", "sgd plain", clip=gradcast.Clip(norm=0.05))
    assert planned != [place.name for place in pair.handle.layout], "so nothing is shown"
    for number, side in pair.rounds(4):
        side.optimizer.zero_grad()
        side.loss().backward()
        if side is pair.theirs:
            torch.nn.utils.clip_grad_norm_(side.module.parameters(), 0.05)
        elif number == 1:
            side.handle.load_state_dict(state)
        side.optimizer.step()
    return pair.differences()


@pytest.mark.parametrize("hi", [4, 8, 12, 16])
def test_checksums_are_of_any_number_of_bytes(hi):
    """The smallest gradients have less than the 8 bytes that are added up at a time."""
    flat = torch.arange(1.0, 9.0)
    exchange = SimpleNamespace(buffers=SimpleNamespace(flats=[flat]))
    block = _core.Block(ranges=[(0, hi)], buffer=0, reason="")
    before = RankConsistency._checksum(SimpleNamespace(_exchange=exchange), block)
    for element in range(8):
        flat[element] += 1
        changed = RankConsistency._checksum(SimpleNamespace(_exchange=exchange), block)
        flat[element] -= 1
        assert (changed != before) == (4 * element < hi)
