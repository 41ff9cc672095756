"""Reduce-scatter and all-gather where the block lies, over a backend that allows that: NCCL, or what passes for it."""

import pytest

from training.compiled_check import load_check
from training.needs import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def carry(tmp_path_factory):
    """carry(backend, scatters, element count, ranges in bytes) -> the elements, and whether memory was shared."""
    sources = ["collective.cc", "range_views.cc"]
    return load_check("in_place_check.cc", sources, tmp_path_factory.mktemp("in_place")).carry


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
