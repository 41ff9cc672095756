"""One rank of a world of processes, with torch: `transport_ranks.py PROGRAM STORE_FILE RANK WORLD_SIZE`.

PROGRAM may end in a wire format, as in "conformance+fp16". A program prints a line for each thing that it found to be
as it should, and ends with a traceback otherwise.
"""

import functools
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

import _testing
import gradcast
from gradcast.training.compat import extension
from transport_conformance import LIMIT_NS, MOMENT_NS, Case, Rank, everywhere, succeed

TIMEOUT = timedelta(seconds=30)


class C10dRank(Rank):
    """Each transport has a process group of its own."""

    wire = "fp32"
    ranks_per_host = 1

    def transport(self, buffers: Sequence[np.ndarray]) -> object:
        return self.transport_of([torch.from_numpy(buffer) for buffer in buffers])

    def transport_of(self, tensors: Sequence[torch.Tensor], wire: str = "") -> object:
        group = dist.new_group(timeout=TIMEOUT, backend="gloo")
        host_of = [rank // self.ranks_per_host for rank in range(self.world_size)] if self.ranks_per_host > 1 else []
        return extension.load().Transport(group, tensors, wire or self.wire, host_of)

    def drive_of(self, tensors: Sequence[torch.Tensor], wire: str = "") -> _testing.TransportDriver:
        return _testing.TransportDriver(self.transport_of(tensors, wire))

    def barrier(self) -> None:
        dist.barrier()


class Fp16Rank(C10dRank):
    """No sum of the cases is above 2048, up to where fp16 has every whole number."""

    RANK_STEP = 100
    wire = "fp16"


class TwoLevels(C10dRank):
    """Two hosts."""

    @property
    def ranks_per_host(self) -> int:
        return self.world_size // 2


# --- Cases that only torch has ---


def sums_every_floating_type(rank: C10dRank) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.full((33,), rank.rank + 1.0, dtype=dtype)
        driver = rank.drive_of([tensor])
        size_bytes = tensor.element_size()
        driver.start(0, [(0, 30 * size_bytes), (31 * size_bytes, 33 * size_bytes)])
        succeed(driver, 0)
        expected = torch.full((33,), sum(range(1, rank.world_size + 1)), dtype=dtype)
        expected[30] = rank.rank + 1
        assert torch.equal(tensor, expected), tensor
        driver.close()


def leaves_the_version_counter_alone(rank: C10dRank) -> None:
    """Autograd's count of changes to a gradient is about the user's changes."""
    flat = torch.ones(10)
    driver = rank.drive_of([flat])
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
    driver = rank.drive_of([tensor])
    driver.start(0, [(0, 8)])
    error = driver.wait(0, LIMIT_NS)
    assert error is not None
    assert "all_reduce" in error
    assert "scalar type" in error
    assert "frame #" not in error, "the list of addresses is nothing for users"
    driver.close()


def rounded_once_there_and_once_back(rank: C10dRank, terms: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What a wire format has to give, in plain torch: each host's sum cast, their sum in fp32 and in order, cast."""
    size = rank.ranks_per_host
    hosts = [functools.reduce(torch.add, terms[first : first + size]) for first in range(0, len(terms), size)]
    return functools.reduce(torch.add, [each.to(dtype).float() for each in hosts]).to(dtype).float()


WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adds_up_in_fp32_what_travels_in_16_bits(rank: C10dRank) -> None:
    """The bits of the reference: all magnitudes, packed and in place, short and empty parts, several in flight."""
    for wire, dtype in WIRES.items():
        for count in (1, 2, 3, 5, 1000, 100_003, 1_300_001):
            terms = [numbers_of_all_magnitudes(each, count) for each in range(rank.world_size)]
            expected = rounded_once_there_and_once_back(rank, terms, dtype)
            tensor = terms[rank.rank].clone()
            driver = rank.drive_of([tensor], wire)
            third = count // 3
            blocks = [[(0, 4 * count)]]
            if third > 0:
                expected[third] = tensor[third]  # in no block
                blocks = [[(0, 4), (4 * (third + 1), 4 * count)]] + ([[(4, 4 * third)]] if third > 1 else [])
            for ticket, ranges in enumerate(blocks):
                driver.start(ticket, ranges)
            succeed(driver, *range(len(blocks)))
            assert torch.equal(tensor, expected), (wire, count)
            driver.close()


def numbers_of_all_magnitudes(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator) * torch.logspace(-9, 3, count)


def carries_what_is_not_finite(rank: C10dRank) -> None:
    """What fp16 cannot hold arrives as inf, in a term or in the sum; inf and nan arrive as they are."""
    values = torch.tensor([1e5, 65504.0, float("inf"), float("nan"), -1e5, 3e38, 1.0])
    for wire, dtype in WIRES.items():
        tensor = values.clone()
        driver = rank.drive_of([tensor], wire)
        driver.start(0, [(0, 28)])
        succeed(driver, 0)
        expected = rounded_once_there_and_once_back(rank, [values] * rank.world_size, dtype)
        assert torch.equal(tensor.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), (wire, tensor)
        assert tensor[3].isnan()
        assert tensor[0].isinf() == (wire == "fp16")
        driver.close()


def casts_fp32_alone(rank: C10dRank) -> None:
    """Other types travel as they are, in one order with what is cast."""
    single, double = torch.full((4096,), 0.1), torch.full((4096,), 0.1, dtype=torch.float64)
    driver = rank.drive_of([single, double], "bf16")
    for ticket in range(8):
        quarter_bytes = 4096 * (1 + ticket % 2)
        lo_bytes = ticket // 2 * quarter_bytes
        driver.start(ticket, [(lo_bytes, lo_bytes + quarter_bytes)], buffer=ticket % 2)
    succeed(driver, *range(8))
    terms = [torch.full((4096,), 0.1)] * rank.world_size
    assert torch.equal(single, rounded_once_there_and_once_back(rank, terms, torch.bfloat16))
    assert torch.allclose(double, torch.full((4096,), 0.1 * rank.world_size, dtype=torch.float64), rtol=1e-15)
    driver.close()


def knows_its_wire_formats(rank: C10dRank) -> None:
    with pytest.raises(gradcast.Error, match="'int4'; one of fp32, bf16, fp16, int8"):
        rank.transport_of([torch.zeros(2)], "int4")


TORCH_CASES: list[Case] = [
    sums_every_floating_type,
    leaves_the_version_counter_alone,
    says_what_it_does_not_take,
    passes_on_what_the_backend_says,
    adds_up_in_fp32_what_travels_in_16_bits,
    carries_what_is_not_finite,
    casts_fp32_alone,
    knows_its_wire_formats,
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


PROGRAMS = (conformance, peer_dies, leaves_with_an_operation_in_flight, outlives_the_default_group)


def say(text: str) -> None:
    print(text, flush=True)


def main(program: str, store: str, rank: str, world_size: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world_size), timeout=TIMEOUT
    )
    name, _, wire = program.partition("+")
    kind = {"": C10dRank, "fp16": Fp16Rank, "hosts": TwoLevels}[wire]
    {each.__name__: each for each in PROGRAMS}[name](kind(int(rank), int(world_size)))


if __name__ == "__main__":
    main(*sys.argv[1:])
