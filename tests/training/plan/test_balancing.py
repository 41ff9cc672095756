"""Balanced shares on real ranks: the faster rank gets more samples, and the training is that of one process.

How long a rank computes is given to it here, as in test_adapt.py.
"""

import collections
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from training import compare
from training.attached import attach, heard, not_refused, planning
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
import gradcast
from gradcast import BalancedBatchSampler
from gradcast.training.plan import balancing

nn = torch.nn
BATCH, LR = 24, 0.1
PER_SAMPLE_NS = 2e6
TIMES = {"fast": (1.0, 1.0, 1.0), "slow": (1.0, 1.0, 2.0)}


def make_module(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), *extra, nn.Tanh(), nn.Linear(30, 5)).double()


def data(count=400):
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(1)).double()


def ahead(iterator, count):
    """As a loader that has drawn ``count`` batches more than it has handed out."""
    queue = collections.deque()
    for each in iterator:
        queue.append(each)
        if len(queue) > count:
            yield queue.popleft()
    yield from queue


class Training:
    """A module under gradcast, trained with balanced batches, and beside it one process with the whole batches."""

    def __init__(self, rank, mode, *, depth=0, every=4, module=None, **options):
        self.rank, self.module, self.depth = rank.index, module or make_module(), depth
        self.whole = make_module()
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=LR) for each in (self.module, self.whole)]
        self.handle = attach(self.module, self.optimizers[0], mode, **options)
        self.sampler = BalancedBatchSampler(range(400), self.handle, BATCH, every=every)
        self.samples, self.step, self.sizes = data(), 0, []
        self.slowness = TIMES["fast"]
        self.live = session_of(self.handle).controller
        self.live.meter.exposed.own_stages_ns = lambda *_: {"backward": 1e6, "loop": 1e6, "forward": 1e6}
        self.live.meter._own_facts = lambda _: self.facts()

    def facts(self):
        if not self.sizes:
            return None
        busy_ns = PER_SAMPLE_NS * self.slowness[self.rank] * self.sizes[-1]
        return _core.RankFacts(step_ns=60e6, busy_ns=busy_ns, link_ns=5e6)

    def epoch(self, steps=100):
        """One epoch, or some steps of it."""
        order = self.sampler
        for number, own in zip(range(steps), ahead(iter(order), self.depth), strict=False):
            self.train(0, self.samples[own])
            self.sizes.append(len(own))
            start = number * BATCH
            whole = order.order()[start : start + BATCH]
            self.train(1, self.samples[whole])
            self.step += 1
        self.handle.flush()

    def train(self, which, samples):
        module, optimizer = (self.module, self.whole)[which], self.optimizers[which]
        optimizer.zero_grad()
        module(samples).square().mean(0).sum().backward()
        optimizer.step()

    def differences(self):
        return compare.apart(dict(self.module.named_parameters()), dict(self.whole.named_parameters()), 1e-12)


@pytest.mark.parametrize("adapt", [False, True])
@on_ranks(3)
def test_samples_move_to_faster_ranks_and_the_numbers_are_those_of_one_process(rank, mode, adapt):
    """Ranks whose loaders are differently far ahead; then the slow rank is as fast as the others again."""
    with heard() as lines:
        training = Training(rank, mode, depth=(0, 3, 1)[rank.index], plan=planning(adapt=adapt))
        training.slowness = TIMES["slow"]
        found, shares = [], []
        for epoch in range(6):
            training.slowness = TIMES["slow" if epoch < 3 else "fast"]
            training.epoch()
            found += training.differences()
            shares.append(training.sampler.shares)
        training.handle.detach()
    found += [] if shares[1] == shares[2] == (10, 10, 4) and shares[5] == (8, 8, 8) else [f"shares {shares}"]
    said = [line for line in lines if "times as slowly" in line or "compute alike" in line]
    if rank.index == 0:
        words = ("rank 2 computes 2.0 times as slowly: even shares", "10, 10, 4 samples a rank after")
        found += [] if all(word in said[0] for word in words) else said
        found += [] if len(said) == 2 and "the ranks compute alike" in said[1] else said
    elif lines:
        found.append(f"one rank speaks for all: {lines}")
    # Steps and blocks take what the facts say, which no plan has predicted.
    return found + [alarm.sentence for alarm in training.handle.alarms() if alarm.cause == "compute"]


@on_ranks(2)
def test_equal_ranks_keep_even_shares_and_the_bits_of_one_plan(rank):
    training = Training(rank, "overlap")
    training.slowness = (1.0, 1.02, 1.0)
    training.epoch()
    training.epoch()
    shares = training.sampler.shares
    training.handle.detach()
    return training.differences() + ([] if shares == (12, 12) else [f"shares {shares}"])


@on_ranks(3)
def test_the_plan_is_made_again_for_the_new_shares(rank):
    """The compute of its profile is that of the slowest rank with the new shares."""
    training = Training(rank, "overlap", plan=planning(adapt=True))
    training.slowness = TIMES["slow"]
    seen = []
    for _ in range(2):
        for _ in training_steps(training):
            seen.append((training.handle.plan_version, training.live.agreed, training.sizes[-1]))
    first = next(n for n, (_, _, size) in enumerate(seen) if size != 8)
    # The step with the new shares is the first that shows them; the next one has the new plan.
    before, after = seen[first], seen[first + 1]
    busy_ms = (compute_ns(after[1].profile) + after[1].further_calls_ns) / 1e6
    found = [] if after[0] == before[0] + 1 else [f"plan {before[0]}, then {after[0]}"]
    found += [] if 19 < busy_ms < 21 else [f"the plan is for {busy_ms:.1f} ms of compute"]
    training.handle.detach()
    return found


def training_steps(training):
    for own in training.sampler:
        training.train(0, training.samples[own])
        training.sizes.append(len(own))
        training.step += 1
        yield


def test_a_change_of_one_ranks_compute_waits_until_shares_could_have_changed():
    schedule = balancing.ShareSchedule(BATCH, 3, 4, lambda: None)
    shares = balancing.Balancing(schedule, SimpleNamespace(rank=0, world_size=3))
    slow, alike, network = (
        SimpleNamespace(cause=c, rank=r) for c, r in (("compute", 2), ("compute", -1), ("network", -1))
    )
    assert [shares.defers(slow) for _ in range(5)] == [True] * 4 + [False]
    assert not shares.defers(alike)
    assert not shares.defers(network)
    assert shares.defers(slow), "the next one waits as long"


@on_ranks(2)
def test_samples_count_from_the_sampler_on_though_the_program_gave_weights_before(rank):
    module = nn.Linear(1, 1, bias=False)
    handle = attach(module, torch.optim.SGD(module.parameters(), 0.0))

    def gradient(batch):
        module.zero_grad()
        module(batch).mean().backward()
        return module.weight.grad.item()

    batch = [torch.ones(1, 1), torch.zeros(3, 1)][rank.index]
    with handle.weight(1):
        assert gradient(batch) == 0.5
    BalancedBatchSampler(range(8), handle, 4)
    assert gradient(batch) == 0.25
    handle.detach()


@on_ranks(2)
def test_different_samplers_are_refused_on_all_ranks(rank):
    module = make_module()
    handle = attach(module, torch.optim.SGD(module.parameters(), lr=LR))
    sizes, seeds = (40, 41), (0, 1)
    found = not_refused(
        lambda: BalancedBatchSampler(range(sizes[rank.index]), handle, 8),
        "samples=40 on rank 0 and samples=41 on rank 1",
    )
    found += not_refused(lambda: BalancedBatchSampler(range(40), handle, 8, seed=seeds[rank.index]), "seed=0 on rank 0")
    refusal = "a data set of 1 samples for 2 ranks"
    found += not_refused(lambda: BalancedBatchSampler(range((40, 1)[rank.index]), handle, 8), refusal)
    handle.detach()
    return found + not_refused(lambda: BalancedBatchSampler(range(40), handle, 8), "detached")


@pytest.mark.parametrize(
    ("disabled", "why"), [("0", "local steps send none"), ("1", "stock DDP counts all ranks alike")]
)
@on_ranks(2)
def test_what_counts_no_samples_is_refused(rank, disabled, why):
    module = make_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    local = None if disabled == "1" else gradcast.LocalSteps(4)
    with mock.patch.dict(os.environ, GRADCAST_DISABLE=disabled):
        handle = gradcast.attach(module, optimizer, options=gradcast.Options(local=local))
        found = not_refused(lambda: BalancedBatchSampler(range(40), handle, 8), why)
        handle.detach()
    return found


@on_ranks(2)
def test_batch_norm_is_warned_of_once(rank):
    with heard() as lines:
        training = Training(rank, "overlap", module=make_module(nn.BatchNorm1d(30)))
        training.slowness = (1.0, 2.0)
        for _ in range(2):
            for _ in training_steps(training):
                pass
        training.slowness = (2.0, 1.0)
        for _ in training_steps(training):
            pass
        shares = training.sampler.shares
        training.handle.detach()
    warned = [line for line in lines if "sees each rank's own samples" in line]
    found = [] if shares == (8, 16) else [f"shares {shares}"]
    return found + ([] if len(warned) == (rank.index == 0) else [f"warned: {warned}"])


@on_ranks(2)
def test_a_loader_that_another_sampler_follows_is_named(rank):
    """The ranks' weights never show the new shares."""
    with heard() as lines:
        training = Training(rank, "overlap", every=2)
        training.slowness = (1.0, 2.0)
        for _ in range(280):
            training.train(0, training.samples[:12])
            training.sizes.append(12)
        training.handle.detach()
    warned = [line for line in lines if "their weights do not show it" in line]
    return [] if len(warned) == (rank.index == 0) else [f"{len(warned)} warnings"]
