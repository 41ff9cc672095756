"""Whatever shares follow one another, and however far each rank's loader is ahead: each sample of an epoch once."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from gradcast import BalancedBatchSampler, Error, Handle, ResumableLoader
from gradcast.training.ranks.group import Group
from training.plan.test_balancing import ahead


class Attached:
    """What gradcast is attached with on one rank, as far as a sampler uses it."""

    released = False

    def __init__(self, balance, rank, world_size):
        self.balance, self.session = balance, SimpleNamespace(released=False, group=Group(rank, world_size))


class Ranks:
    """Handles of ranks without processes: what their samplers agree on, all of them are told."""

    def __init__(self, world_size):
        self.schedules = []
        self.attached = [Attached(self._balance, rank, world_size) for rank in range(world_size)]
        self.handles = [Handle(torch.nn.Linear(1, 1), each, [], []) for each in self.attached]

    def _balance(self, call):
        self.schedules.append(call().schedule)

    def samplers(self, size, batch, **named):
        return [BalancedBatchSampler(range(size), handle, batch, seed=3, **named) for handle in self.handles]

    def change(self, shares):
        drawn = max(schedule._drawn for schedule in self.schedules)
        places = [schedule.change(shares, lambda _: drawn) for schedule in self.schedules]
        assert len(set(places)) == 1


def loader_of(sampler, workers=0):
    return DataLoader(range(60), batch_sampler=sampler, num_workers=workers)


CASES = st.integers(1, 4).flatmap(
    lambda world_size: st.tuples(
        st.just(world_size),
        st.integers(world_size, 60),  # samples
        st.integers(world_size, 20),  # of a batch
        st.lists(st.integers(0, 5), min_size=world_size, max_size=world_size),  # batches drawn ahead
        # When shares change, and to what proportion.
        st.dictionaries(
            st.integers(0, 40), st.lists(st.integers(1, 9), min_size=world_size, max_size=world_size), max_size=6
        ),
    )
)


@given(CASES)
def test_each_sample_of_an_epoch_once(case):
    world_size, size, batch, depths, changes = case
    ranks = Ranks(world_size)
    samplers = ranks.samplers(size, batch)
    step, seen_shares = 0, set()
    for epoch in range(3):
        seen = []
        loops = [ahead(iter(sampler), depth) for sampler, depth in zip(samplers, depths, strict=True)]
        for own in zip(*loops, strict=True):  # equally many batches on all ranks
            assert min(map(len, own)) >= 1
            whole = [sample for each in own for sample in each]
            assert len(whole) == min(batch, size - len(seen))
            seen += whole
            seen_shares.add(tuple(map(len, own)))
            if step in changes:
                ranks.change(proportional(batch, changes[step]))
            step += 1
        assert [sampler.epoch for sampler in samplers] == [epoch] * world_size
        assert len(set(seen)) == len(seen) > size - world_size
        assert len(seen) == size or size % batch < world_size


def proportional(batch, parts):
    shares = [max(1, batch * part // sum(parts)) for part in parts]
    shares[shares.index(max(shares))] += batch - sum(shares)
    return tuple(shares) if min(shares) >= 1 else (1,) * (len(parts) - 1) + (batch - len(parts) + 1,)


def test_new_shares_hold_behind_the_rank_that_is_farthest_ahead():
    ranks = Ranks(2)
    loops = [ahead(iter(each), depth) for each, depth in zip(ranks.samplers(80, 8), (0, 3), strict=True)]
    sizes = [[len(next(each)) for each in loops]]
    ranks.change((6, 2))
    sizes += [[len(next(each)) for each in loops] for _ in range(6)]
    assert sizes == [[4, 4]] * 4 + [[6, 2]] * 3


def test_the_order_is_the_same_for_any_number_of_ranks():
    def whole(world_size):
        ranks = Ranks(world_size)  # samplers do not keep what they are attached to
        loops = map(iter, ranks.samplers(50, 10))
        return [[sample for each in own for sample in each] for own in zip(*loops, strict=True)]

    assert whole(1) == whole(3) == whole(10)


def test_real_loaders_prefetch_as_far_as_they_like():
    ranks = Ranks(2)
    loaders = [iter(loader_of(each, workers)) for each, workers in zip(ranks.samplers(60, 6), (0, 2), strict=True)]
    seen, sizes = [], []
    for step in range(10):
        own = [next(each).tolist() for each in loaders]
        seen += own[0] + own[1]
        sizes.append(len(own[0]))
        if step == 2:
            ranks.change((4, 2))
    assert sorted(seen) == list(range(60))
    assert sizes == [3] * 7 + [4] * 3  # two workers, each with two batches


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(5, 40))
def test_a_place_survives_with_other_ranks_and_shares(before, after, steps, size):
    seen, state = [], None
    for world_size, count in ((before, steps), (after, 100)):
        ranks = Ranks(world_size)
        loaders = [ResumableLoader(loader_of(each)) for each in ranks.samplers(size, 5)]
        for each in loaders if state is not None else ():
            each.load_state_dict(state)
        assert len({len(each) for each in loaders}) == 1
        if world_size > 1:
            ranks.change((5 - (world_size - 1),) + (1,) * (world_size - 1))
        loops = [iter(each) for each in loaders]
        for _ in range(count):
            own = [next(each, None) for each in loops]
            if own[0] is None:
                break
            seen += [sample for each in own for sample in each.tolist()]
            states = [each.state_dict() for each in loaders]
            assert all(each == states[0] for each in states)
            state = states[0]
    assert len(set(seen)) == len(seen) or state["epoch"] > 1
    assert set(seen) == set(range(size)) or size % 5 < max(before, after)


def test_the_next_epoch_begins_by_itself_unless_the_loop_sets_it():
    (sampler,) = Ranks(1).samplers(10, 4)
    loader = loader_of(sampler)
    epochs = [[each.tolist() for each in loader] for _ in range(2)]
    assert (sampler.epoch, epochs[0] == epochs[1]) == (1, False)
    sampler.set_epoch(0)
    assert [each.tolist() for each in loader] == epochs[0]
    assert len(loader) == len(epochs[0]) == 3
    for _ in loader:  # left early: the epoch is not over
        break
    assert sampler.epoch == 1
    assert [each.tolist() for each in loader] == epochs[1]


def test_what_cannot_be_shared_out_is_refused():
    for size, batch, named, words in (
        (2, 8, {}, "a data set of 2 samples for 3 ranks"),
        (9, 2, {}, "batch=2; at least 3 are needed, one sample for each rank"),
        (9, 8.5, {}, "batch=8.5; at least 3"),
        (9, 8, {"every": 1}, "every=1; at least 2"),
    ):
        with pytest.raises(Error, match=words):
            Ranks(3).samplers(size, batch, **named)


def test_after_detach_no_batch_is_drawn():
    ranks = Ranks(2)
    loop = iter(ranks.samplers(40, 8)[0])
    next(loop)
    ranks.attached[0].released = True
    with pytest.raises(Error, match="gradcast was detached"):
        next(loop)


def test_a_module_in_place_of_the_handle_is_refused():
    with pytest.raises(Error, match="got a Linear as handle; pass what"):
        BalancedBatchSampler(range(8), torch.nn.Linear(1, 1), 4)
