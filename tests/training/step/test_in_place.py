"""Reduce-scatter and all-gather where the block lies, over a backend that allows that: NCCL, or what passes for it; and
16-bit numbers on a device's wire."""

import pytest

from training.compiled_check import load_check
from training.needs import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    sources = ["collective.cc", "range_views.cc"]
    return load_check("in_place_check.cc", sources, tmp_path_factory.mktemp("in_place"))


@pytest.fixture
def carry(check):
    """carry(backend, scatters, element count, ranges in bytes) -> the elements, and whether memory was shared."""
    return check.carry


@pytest.mark.parametrize("backend", ["nccl", "another"])
def test_a_block_that_divides_travels_where_it_lies(carry, backend):
    scattered, shared = carry(backend, True, 6, [(4, 20)])
    assert shared == (backend == "nccl")
    assert torch.equal(scattered, torch.tensor([0.0, 1, 2, 6, 8, 5])), "the part of rank 1, doubled"
    gathered, shared = carry(backend, False, 6, [(4, 20)])
    assert shared == (backend == "nccl")
    assert torch.equal(gathered, torch.tensor([0.0, 3, 4, 3, 4, 5]))


@pytest.mark.parametrize("backend", ["nccl", "another"])
@pytest.mark.parametrize("ranges", [[(4, 16)], [(4, 12), (16, 20)]], ids=["padded", "packed"])
def test_another_block_is_unpacked(carry, backend, ranges):
    touched = [element for lo, hi in ranges for element in range(lo // 4, hi // 4)]
    before = torch.arange(6.0)
    scattered, _ = carry(backend, True, 6, ranges)
    expected = before.clone()
    expected[touched[2]] *= 2
    assert torch.equal(scattered, expected), "the part of rank 1 has one element"
    gathered, _ = carry(backend, False, 6, ranges)
    expected = before.clone()
    expected[touched[0]], expected[touched[1]] = before[touched[2]], 0
    assert torch.equal(gathered, expected), "rank 0 is like rank 1, whose second element is padding"


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranges", [[(4, 20)], [(4, 16)], [(4, 12), (16, 20)]], ids=["whole", "padded", "packed"])
def test_on_a_device_16_bit_numbers_travel_and_their_sums_come_back(check, ranges, wire):
    touched = [element for lo, hi in ranges for element in range(lo // 4, hi // 4)]
    before = torch.tensor([0.1, 1 / 3, 1000 / 7, 2049 / 2048, 0.7, 9.9])
    found = before.clone()
    check.sum_narrow(found, ranges, wire)
    padded = torch.cat([before[touched], torch.zeros(-len(touched) % 2)])
    part = padded[len(padded) // 2 :].to(wire).float()  # of rank 1; what rank 0 sums is alike
    sums = (part + part).to(wire).float()
    expected = before.clone()
    expected[touched] = torch.cat([sums, sums])[: len(touched)]
    assert torch.equal(found, expected)


def test_operations_on_the_current_stream_are_not_asynchronous(check):
    """Which is torch's word for it; the bits are the same."""
    flags, left = check.carry_all(True)
    usual_flags, usual_left = check.carry_all(False)
    assert flags == [False] * 5
    assert usual_flags == [True] * 5
    assert all(map(torch.equal, left, usual_left))
    assert torch.equal(left[0], torch.tensor([0.0, 2, 4, 3, 8, 5]))
