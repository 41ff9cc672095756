"""What every transport must do, as cases that all ranks of a world run at the same time (include/gradcast/transport.h).

A case is a function of a Rank. Buffers are flat NumPy arrays of small whole numbers: sums are exact in any order.
`everywhere` lists the cases for a world of a given size; transport_worlds.py has the worlds.
"""

import abc
import itertools
from collections.abc import Callable, Sequence

import numpy as np

import _testing

# How long a case waits for what must come, and for what must not come.
LIMIT_NS = 20_000_000_000
MOMENT_NS = 50_000_000


class Rank(abc.ABC):
    """One rank of a world. Transports of one case are made by all ranks, in the same order."""

    # By how much the values of neighbouring ranks differ. Sums have to be exact, also in a transport's wire format.
    RANK_STEP = 1000

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abc.abstractmethod
    def transport(self, buffers: Sequence[np.ndarray]) -> object:
        """A new one of the kind under test, over these buffers."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Returns when all ranks have come here; carries no bytes of the transport."""

    def drive(self, *buffers: np.ndarray) -> "_testing.TransportDriver":
        return _testing.TransportDriver(self.transport(buffers))

    def values(self, count: int, dtype: str = "float32") -> np.ndarray:
        return self.values_of(self.rank, count, dtype)

    def sums(self, count: int, dtype: str = "float32") -> np.ndarray:
        return sum(self.values_of(rank, count, dtype) for rank in range(self.world_size))

    @classmethod
    def values_of(cls, rank: int, count: int, dtype: str = "float32") -> np.ndarray:
        return (np.arange(count) % 101 + cls.RANK_STEP * rank).astype(dtype)


Case = Callable[[Rank], None]


def succeed(driver: "_testing.TransportDriver", *tickets: int) -> None:
    for ticket in tickets:
        error = driver.wait(ticket, LIMIT_NS)
        assert error == "", f"operation {ticket}: {'no completion' if error is None else error}"


def carry(rank: Rank, array: np.ndarray, *operations: list[tuple[int, int]], op: str = "all_reduce") -> None:
    """Carries out operations over ranges of elements, all started before the first is waited for."""
    driver = rank.drive(array)
    for ticket, elements in enumerate(operations):
        driver.start(ticket, [(array.itemsize * lo, array.itemsize * hi) for lo, hi in elements], op=op)
    succeed(driver, *range(len(operations)))
    driver.close()


# --- Sums ---


def knows_its_place(rank: Rank) -> None:
    driver = rank.drive(rank.values(4))
    assert (driver.rank, driver.world_size) == (rank.rank, rank.world_size)
    driver.close()


def sums_its_ranges_and_nothing_else(rank: Rank) -> None:
    """One range in place, and several in one message."""
    for elements in ([(10, 60)], [(0, 1), (7, 30), (31, 32), (90, 100)]):
        array, expected = rank.values(100), rank.values(100)
        for lo, hi in elements:
            expected[lo:hi] = rank.sums(100)[lo:hi]
        carry(rank, array, elements)
        np.testing.assert_array_equal(array, expected)


def sums_a_single_element_and_a_large_buffer(rank: Rank) -> None:
    for count in (1, 4 << 20):  # 16 MiB
        array = rank.values(count)
        carry(rank, array, [(0, count)])
        np.testing.assert_array_equal(array, rank.sums(count))


def keeps_buffers_and_their_types_apart(rank: Rank) -> None:
    arrays = [rank.values(50, "float32"), rank.values(50, "float64"), rank.values(3, "float32")]
    driver = rank.drive(*arrays)
    driver.start(0, [(0, 400)], buffer=1)
    driver.start(1, [(0, 200)], buffer=0)
    succeed(driver, 0, 1)
    np.testing.assert_array_equal(arrays[0], rank.sums(50, "float32"))
    np.testing.assert_array_equal(arrays[1], rank.sums(50, "float64"))
    np.testing.assert_array_equal(arrays[2], rank.values(3))
    driver.close()


def takes_what_is_in_the_buffer_at_the_start(rank: Rank) -> None:
    """The same bytes again and again, written anew between two operations, as in training."""
    array = np.zeros(256, "float32")
    driver = rank.drive(array)
    for ticket in range(200):
        array[:] = rank.values(256) + ticket
        driver.start(ticket, [(0, 1024)])
        succeed(driver, ticket)
        np.testing.assert_array_equal(array, rank.sums(256) + ticket * rank.world_size)
    driver.close()


def carries_many_in_flight(rank: Rank) -> None:
    """Small and large ones mixed, in place and packed."""
    count = 40_000
    array = rank.values(count)
    edges = [0, 1, 2, 500, 510, 20_000, 20_001, 39_000, count]
    blocks = [[pair] for pair in itertools.pairwise(edges)]
    carry(rank, array, blocks[0] + blocks[2], blocks[1], blocks[3], blocks[4] + blocks[6], blocks[5], blocks[7])
    np.testing.assert_array_equal(array, rank.sums(count))


def completes_each_operation_once(rank: Rank) -> None:
    array = rank.values(64)
    driver = rank.drive(array)
    for ticket in range(5, 55):
        driver.start(ticket, [(0, 128), (192, 256)] if ticket % 3 == 0 else [(0, 256)])
    succeed(driver, *range(5, 55))
    rank.barrier()
    driver.close()
    assert sorted(driver.completions()) == [(ticket, "") for ticket in range(5, 55)]


# --- The halves of an all-reduce ---


def part_of(rank: Rank, count: int) -> slice:
    part = -(-count // rank.world_size)
    return slice(min(count, rank.rank * part), min(count, (rank.rank + 1) * part))


def scatters_each_rank_its_part_of_the_sum(rank: Rank) -> None:
    for count in (1, rank.world_size, rank.world_size + 1, 100, 101, 1003):
        array = rank.values(count + 2)
        carry(rank, array, [(1, count + 1)], op="reduce_scatter")
        own = part_of(rank, count)
        inside, sums = array[1:-1], rank.sums(count + 2)[1:-1]
        np.testing.assert_array_equal(inside[own], sums[own])
        np.testing.assert_array_equal(array[[0, -1]], rank.values(count + 2)[[0, -1]])


def gathers_the_parts(rank: Rank) -> None:
    for count in (1, rank.world_size, rank.world_size + 1, 100, 101, 1003):
        whole = np.arange(count, dtype="float32")
        array = np.full(count, -1, "float32")
        array[part_of(rank, count)] = whole[part_of(rank, count)]
        carry(rank, array, [(0, count)], op="all_gather")
        np.testing.assert_array_equal(array, whole)


def scatter_and_gather_make_an_all_reduce(rank: Rank) -> None:
    for elements in ([(0, 1)], [(0, 100)], [(0, 1), (2, 5), (6, 101)], [(1, 2), (99, 100)]):
        array, whole = rank.values(101), rank.values(101)
        carry(rank, array, elements, op="reduce_scatter")
        carry(rank, array, elements, op="all_gather")
        carry(rank, whole, elements)
        np.testing.assert_array_equal(array, whole)


# --- Refusals, lateness, aborts, the end ---


def refuses_what_cannot_begin(rank: Rank) -> None:
    """By an error completion, not by an exception or a crash."""
    array = rank.values(8)
    driver = rank.drive(array)
    wrong = [([(0, 36)], 0), ([(0, 6)], 0), ([(2, 8)], 0), ([(0, 32)], 1), ([(0, 32)], -1), ([], 0), ([(8, 8)], 0)]
    for ticket, (ranges, buffer) in enumerate(wrong):
        driver.start(ticket, ranges, buffer=buffer)
        assert driver.wait(ticket, LIMIT_NS), f"{ranges} of buffer {buffer} did not fail"
    np.testing.assert_array_equal(array, rank.values(8))
    rank.barrier()
    driver.close()


def waits_for_a_late_rank(rank: Rank) -> None:
    array = rank.values(1000)
    driver = rank.drive(array)
    is_late = rank.rank == rank.world_size - 1
    if not is_late:
        driver.start(0, [(0, 4000)])
        assert driver.wait(0, MOMENT_NS) is None
    rank.barrier()
    if is_late:
        driver.start(0, [(0, 4000)])
    succeed(driver, 0)
    np.testing.assert_array_equal(array, rank.sums(1000))
    driver.close()


def aborts_what_another_rank_never_joins(rank: Rank) -> None:
    array = rank.values(1000)
    driver = rank.drive(array)
    if rank.rank == 0:
        driver.start(0, [(0, 400)])
        driver.start(1, [(400, 800), (1200, 1600)])
        assert driver.wait(0, MOMENT_NS) is None
        driver.abort("the model burnt down")
        driver.abort("a second reason, which comes too late")
        driver.start(2, [(0, 4000)])
        for ticket in range(3):
            assert driver.wait(ticket, LIMIT_NS) == "the model burnt down"
        assert sorted(ticket for ticket, _ in driver.completions()) == [0, 1, 2]
        driver.close()
    rank.barrier()
    driver.close()


def keeps_what_had_finished_before_an_abort(rank: Rank) -> None:
    array = rank.values(10)
    driver = rank.drive(array)
    driver.start(0, [(0, 40)])
    succeed(driver, 0)
    rank.barrier()
    driver.abort("no more")
    driver.start(1, [(0, 40)])
    assert driver.wait(1, LIMIT_NS) == "no more"
    assert driver.completions() == [(0, ""), (1, "no more")]
    np.testing.assert_array_equal(array, rank.sums(10))
    rank.barrier()
    driver.close()


def closes_without_any_operation(rank: Rank) -> None:
    driver = rank.drive(rank.values(4))
    driver.close()
    driver.close()
    assert driver.completions() == []


def lives_as_long_as_its_capsule(rank: Rank) -> None:
    array = rank.values(10)
    driver = _testing.TransportDriver(rank.transport([array]).capsule)
    driver.start(0, [(0, 40)])
    succeed(driver, 0)
    np.testing.assert_array_equal(array, rank.sums(10))
    driver.close()


_ALONE: list[Case] = [
    knows_its_place,
    sums_its_ranges_and_nothing_else,
    sums_a_single_element_and_a_large_buffer,
    keeps_buffers_and_their_types_apart,
    takes_what_is_in_the_buffer_at_the_start,
    carries_many_in_flight,
    completes_each_operation_once,
    scatters_each_rank_its_part_of_the_sum,
    gathers_the_parts,
    scatter_and_gather_make_an_all_reduce,
    refuses_what_cannot_begin,
    keeps_what_had_finished_before_an_abort,
    closes_without_any_operation,
    lives_as_long_as_its_capsule,
]
_TOGETHER: list[Case] = [waits_for_a_late_rank, aborts_what_another_rank_never_joins]


def everywhere(world_size: int) -> list[Case]:
    return _ALONE if world_size == 1 else _ALONE + _TOGETHER
