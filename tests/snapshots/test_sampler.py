"""Each sample is trained on once in the history that survives, over any number of crashes and worker counts."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from gradcast import Error, ResumableLoader, ResumableSampler


def loaders(size, world_size, batch_size=1, **named):
    """One counted loader for each rank; the samples are the numbers below ``size``."""
    data = range(size)
    samplers = [ResumableSampler(data, rank=rank, world_size=world_size, seed=3) for rank in range(world_size)]
    return [ResumableLoader(DataLoader(data, batch_size=batch_size, sampler=each, **named)) for each in samplers]


RUNS = st.lists(
    st.tuples(
        st.integers(1, 5),  # workers
        st.integers(1, 4),  # samples of a batch
        st.integers(0, 12),  # steps until the crash
        st.integers(1, 5),  # steps between two snapshots
    ),
    min_size=1,
    max_size=6,
)


@given(size=st.integers(1, 60), runs=RUNS)
def test_every_sample_once_in_the_history_that_survives(size, runs):
    """Runs with other numbers of workers crash anywhere; each resumes from the last snapshot. The log is of what each
    rank's loop was handed; what a crash has undone is cut off."""
    log, saved, saved_length = [], None, 0
    for world_size, batch_size, crash_after, every in [*runs, (1, 1, 10**6, 1)]:
        ranks = loaders(size, world_size, batch_size)
        del log[saved_length:]
        for each in ranks if saved is not None else ():
            each.load_state_dict(saved)
        iterators = [iter(each) for each in ranks]
        for step in range(1, crash_after + 1):
            batches = [next(each, None) for each in iterators]
            if batches[0] is None:
                assert batches == [None] * world_size  # equally many batches on all ranks
                break
            log += [sample for batch in batches for sample in batch.tolist()]
            if step % every == 0:
                states = [each.state_dict() for each in ranks]
                assert all(state == states[0] for state in states)  # one place for all ranks
                saved, saved_length = states[0], len(log)
        if ranks[0].sampler.epoch == 1:
            break
    assert max(collections.Counter(log).values(), default=0) <= 1
    assert len(log) > size - world_size  # only the tail that cannot be shared out is missing


@given(size=st.integers(1, 40), world_size=st.integers(1, 4), batch_size=st.integers(1, 5), drop_last=st.booleans())
def test_epochs_follow_one_another(size, world_size, batch_size, drop_last):
    first, second = ([], [])
    for each in loaders(size, world_size, batch_size, drop_last=drop_last):
        for epoch, seen in enumerate((first, second)):
            assert each.sampler.epoch == epoch
            batches = [batch.tolist() for batch in each]
            assert len(batches) == len(each)
            seen.append([sample for batch in batches for sample in batch])
        assert (each.sampler.epoch, each.sampler.position) == (2, 0)
    for seen in (first, second):
        assert len({len(own) for own in seen}) == 1
        assert len(set().union(*seen)) == sum(map(len, seen))
    assert size < 12 or world_size > 1 or drop_last or first != second  # another order


def test_what_workers_have_prefetched_does_not_count():
    loader = loaders(64, 1, batch_size=4, num_workers=2, prefetch_factor=4)[0]
    handed = []
    for batch in loader:
        handed += batch.tolist()
        assert loader.state_dict()["position"] == len(handed)
        if len(handed) == 20:
            break
    other = loaders(64, 1, batch_size=4)[0]
    other.load_state_dict(loader.state_dict())
    handed += [sample for batch in other for sample in batch.tolist()]
    assert sorted(handed) == list(range(64))


def test_without_shuffling_the_order_is_that_of_the_data():
    ranks = [ResumableSampler(range(7), shuffle=False, rank=rank, world_size=2) for rank in range(2)]
    assert [list(each) for each in ranks] == [[0, 2, 4], [1, 3, 5]]


def test_set_epoch_keeps_the_place_in_the_current_epoch():
    sampler = ResumableSampler(range(10), rank=0, world_size=1)
    sampler.advance(4)
    sampler.set_epoch(0)
    assert sampler.position == 4
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.position) == (5, 0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ResumableSampler(range(11)), "samples 10, and this one has samples 11"),
        (ResumableSampler(range(10), seed=1), "seed 0, and this one has seed 1"),
        (ResumableSampler(range(10), shuffle=False), "shuffle True, and this one has shuffle False"),
    ],
)
def test_a_place_in_other_data_is_refused(other, words):
    with pytest.raises(Error, match=words):
        other.load_state_dict(ResumableSampler(range(10)).state_dict())


def test_loaders_that_cannot_be_counted_are_refused():
    data = range(8)
    sampler = ResumableSampler(data)
    for loader, words in (
        (DataLoader(data, shuffle=True), "RandomSampler"),
        (DataLoader(data, sampler=DistributedSampler(data, 2, 0)), "DistributedSampler"),
        (DataLoader(data, sampler=sampler, in_order=False, num_workers=1), "in_order"),
    ):
        with pytest.raises(Error, match=words):
            ResumableLoader(loader)
    with pytest.raises(Error, match="ranks count from 0"):
        ResumableSampler(data, rank=2, world_size=2)


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        sampler = ResumableSampler(range(50), seed=seed, rank=0, world_size=1)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    assert len({order(seed, epoch) for seed in range(3) for epoch in range(3)}) == 9
