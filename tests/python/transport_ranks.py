"""One rank of a world of processes, with torch: `transport_ranks.py PROGRAM STORE_FILE RANK WORLD_SIZE`.

A program prints a line for each thing that it found to be as it should, and ends with a traceback otherwise.
"""

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradcast
from gradcast import _core
from gradcast.training import extension
from transport_conformance import LIMIT_NS, MOMENT_NS, Case, Rank, everywhere, succeed

TIMEOUT = timedelta(seconds=30)


class C10dRank(Rank):
    """Each transport has a process group of its own."""

    def transport(self, buffers: Sequence[np.ndarray]) -> object:
        return self.transport_of([torch.from_numpy(buffer) for buffer in buffers])

    def transport_of(self, tensors: Sequence[torch.Tensor]) -> object:
        return extension.load().Transport(dist.new_group(timeout=TIMEOUT, backend="gloo"), tensors)

    def barrier(self) -> None:
        dist.barrier()


# --- Cases that only torch has ---


def sums_every_floating_type(rank: C10dRank) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.full((33,), rank.rank + 1.0, dtype=dtype)
        driver = _core.TransportDriver(rank.transport_of([tensor]))
        size_bytes = tensor.element_size()
        driver.start(0, [(0, 30 * size_bytes), (31 * size_bytes, 33 * size_bytes)])
        succeed(driver, 0)
        expected = torch.full((33,), sum(range(1, rank.world_size + 1)), dtype=dtype)
        expected[30] = rank.rank + 1
        assert torch.equal(tensor, expected), tensor
        driver.close()


def leaves_the_version_counter_alone(rank: C10dRank) -> None:
    """Whoever asks autograd whether a gradient was changed means the user."""
    flat = torch.ones(10)
    driver = _core.TransportDriver(rank.transport_of([flat]))
    before = flat[2:4]._version
    driver.start(0, [(0, 20), (24, 40)])
    driver.start(1, [(0, 40)])
    succeed(driver, 0, 1)
    assert flat[2:4]._version == before
    driver.close()


def says_what_it_does_not_take(rank: C10dRank) -> None:
    module, group = extension.load(), dist.new_group(backend="gloo")
    for tensor in (torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(3).to_sparse()):
        with pytest.raises(gradcast.Error, match="flat, contiguous") as raised:
            module.Transport(group, [tensor])
        assert raised.value.code == "invalid_use"
    with pytest.raises(gradcast.Error, match="no backend for tensors on meta"):
        module.Transport(group, [torch.zeros(2, device="meta")])
    with pytest.raises(gradcast.Error, match="needs a process group"):
        module.Transport(None, [torch.zeros(2)])
    with pytest.raises(gradcast.Error, match="no buffer 3"):
        module.Transport(group, [torch.zeros(2)]).on_written(3, 0, 4)
    module.Transport(group, [torch.zeros(2)]).on_written(0, 0, 4)


def passes_on_what_the_backend_says(rank: C10dRank) -> None:
    tensor = torch.zeros(4, dtype=torch.int16)
    driver = _core.TransportDriver(rank.transport_of([tensor]))
    driver.start(0, [(0, 8)])
    error = driver.wait(0, LIMIT_NS)
    assert error is not None
    assert "all_reduce" in error
    assert "scalar type" in error
    assert "frame #" not in error, "the list of addresses is nothing for users"
    driver.close()


TORCH_CASES: list[Case] = [
    sums_every_floating_type,
    leaves_the_version_counter_alone,
    says_what_it_does_not_take,
    passes_on_what_the_backend_says,
]


# --- Programs ---


def conformance(rank: C10dRank) -> None:
    for case in [*everywhere(rank.world_size), *TORCH_CASES]:
        case(rank)
        rank.barrier()
        say(case.__name__)


def peer_dies(rank: C10dRank) -> None:
    """The last rank ends without a word while the others wait for it."""
    array = np.ones(1000, "float32")
    driver = rank.drive(array)
    driver.start(0, [(0, 4000)])
    succeed(driver, 0)
    rank.barrier()
    if rank.rank == rank.world_size - 1:
        os._exit(17)
    driver.start(1, [(0, 4000)])
    driver.start(2, [(0, 400), (800, 4000)])
    for ticket in (1, 2):
        error = driver.wait(ticket, LIMIT_NS)
        assert error, f"operation {ticket}: {'no completion' if error is None else 'success'}"
        say(error)
    driver.close()


def leaves_with_an_operation_in_flight(rank: C10dRank) -> None:
    """An exception ends rank 0 while nobody joins its operation. The others stay until it has gone."""
    array = np.ones(1000, "float32")
    driver = rank.drive(array)
    pids: list[int] = [0] * rank.world_size
    dist.all_gather_object(pids, os.getpid())
    if rank.rank == 0:
        driver.start(0, [(0, 4000)])
        assert driver.wait(0, MOMENT_NS) is None
        say("in flight")
        raise KeyError("the user's own exception")
    deadline_s = time.monotonic() + TIMEOUT.total_seconds() / 2
    while Path("/proc", str(pids[0])).exists():
        assert time.monotonic() < deadline_s, "rank 0 hangs while it ends"
        time.sleep(0.05)
    say("rank 0 has gone")


def outlives_the_default_group(rank: C10dRank) -> None:
    """destroy_process_group() takes away torch's own reference only; the transport has one more."""
    array = np.ones(1000, "float32")
    driver = rank.drive(array)
    rank.barrier()
    dist.destroy_process_group()
    for ticket in range(20):
        array[:] = rank.values(1000)
        driver.start(ticket, [(0, 4000)])
        succeed(driver, ticket)
        np.testing.assert_array_equal(array, rank.sums(1000))
    driver.close()
    say("works")


PROGRAMS = {
    program.__name__: program
    for program in (conformance, peer_dies, leaves_with_an_operation_in_flight, outlives_the_default_group)
}


def say(text: str) -> None:
    print(text, flush=True)


def main(program: str, store: str, rank: str, world_size: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size), timeout=TIMEOUT
    )
    PROGRAMS[program](C10dRank(int(rank), int(world_size)))


if __name__ == "__main__":
    main(*sys.argv[1:])
