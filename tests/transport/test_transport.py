"""Every transport passes the same cases (transport_conformance.py); what only the one over torch can do follows."""

import functools

import pytest

import _testing
from transport_conformance import everywhere
from transport_worlds import Ended, run_inproc, run_processes

pytest.importorskip("numpy", reason="the cases of the transports need NumPy, which is not installed: pip install numpy")


def cases_by_world(*world_sizes, marks_of=lambda _: (), wire=()):
    return [
        pytest.param(
            *wire,
            size,
            case,
            id="-".join(filter(None, [*wire, str(size), case.__name__])),
            marks=marks_of(size),
        )
        for size in world_sizes
        for case in everywhere(size)
    ]


@pytest.mark.parametrize(("world_size", "case"), cases_by_world(1, 2, 3, 5))
def test_inproc(world_size, case):
    run_inproc(world_size, case)


@pytest.fixture(scope="module")
def extension():
    """Compiled here, so that a missing compiler fails once and with its sentence."""
    pytest.importorskip("torch", reason="this needs PyTorch, which is not installed: pip install torch")
    from gradcast.training.compat import extension

    return extension.load()


# The transport over torch, and the same with a wire format, and on two levels.
TORCH = pytest.mark.parametrize("wire", ["", "+fp16"], ids=["fp32", "fp16"])
WORLDS = {"": (1, 2, 3, 4), "+fp16": (2, 3), "+hosts": (4, 6)}
SLOW = {"": (1, 4), "+fp16": (3,), "+hosts": (6,)}
LONG = {"": (2,), "+fp16": (2,), "+hosts": (4,)}


def marks_of(wire: str, world_size: int) -> list:
    return [pytest.mark.slow] * (world_size in SLOW[wire]) + [pytest.mark.long] * (world_size in LONG[wire])


@functools.cache
def conformance(world_size: int, wire: str) -> list[Ended]:
    """The processes of one world run all cases; they are started once."""
    return run_processes(f"conformance{wire}", world_size)


@pytest.mark.parametrize(
    ("wire", "world_size"),
    [pytest.param(wire, size, marks=marks_of(wire, size)) for wire, sizes in WORLDS.items() for size in sizes],
)
def test_the_cases_of_torch_run_to_the_end(extension, world_size, wire):
    assert_all_ended_well(conformance(world_size, wire))


@pytest.mark.parametrize(
    ("wire", "world_size", "case"),
    [
        case
        for wire in WORLDS
        for case in cases_by_world(*WORLDS[wire], marks_of=functools.partial(marks_of, wire), wire=[wire])
    ],
)
def test_c10d(extension, wire, world_size, case):
    ranks = conformance(world_size, wire)
    without = [rank for rank, ended in enumerate(ranks) if case.__name__ not in ended.lines]
    assert not without, f"ranks {without} did not get through:\n{said(ranks)}"


def test_sums_that_cannot_be_unpacked_fail_the_operation(extension):
    import torch
    from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

    class Group(ProcessGroup):
        """Rank 0 of two. An all-reduce is done at once, and leaves less than it was given."""

        def allreduce(self, tensors, options=None):
            tensors[0].resize_(1)
            done = torch.futures.Future()
            done.set_result(None)
            return torch._C._distributed_c10d._create_work_from_future(done)

    group = Group(0, 2)
    backend = ProcessGroupGloo(HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    driver = _testing.TransportDriver(extension.Transport(group, [torch.ones(8)]))
    driver.start(1, [(0, 8), (16, 24)])
    told = driver.wait(1, 10**10)
    assert told.startswith("all_reduce of 16 bytes failed on rank 0 of 2 (gloo): ")
    assert "exceeds dimension size" in told
    driver.close()


@pytest.mark.slow
@TORCH
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_peer_that_dies_fails_what_the_others_have_in_flight(extension, world_size, wire):
    ranks = run_processes(f"peer_dies{wire}", world_size)
    assert [ended.code for ended in ranks] == [0] * (world_size - 1) + [17], said(ranks)
    for rank, ended in enumerate(ranks[:-1]):
        assert len(ended.lines) == 2, said(ranks)
        for line, size_bytes in zip(ended.lines, (4000, 3600), strict=True):
            assert line.startswith(f"all_reduce of {size_bytes} bytes failed on rank {rank} of {world_size} (gloo): ")


@pytest.mark.slow
@TORCH
def test_an_exception_ends_the_process_though_an_operation_is_in_flight(extension, wire):
    """Gloo cannot interrupt an operation, and its destructor waits for it; the transport must not let it."""
    first, second = run_processes(f"leaves_with_an_operation_in_flight{wire}", 2)
    assert first.code == 1, said([first, second])
    assert first.lines == ["in flight"]
    assert "the user's own exception" in first.errors
    assert second.lines == ["rank 0 has gone"], said([first, second])


@pytest.mark.slow
@TORCH
def test_the_transport_works_on_when_the_default_group_is_gone(extension, wire):
    ranks = run_processes(f"outlives_the_default_group{wire}", 2)
    assert_all_ended_well(ranks)
    assert [ended.lines for ended in ranks] == [["works"], ["works"]]


def assert_all_ended_well(ranks: list[Ended]) -> None:
    assert all(ended.code == 0 for ended in ranks), said(ranks)


def said(ranks: list[Ended]) -> str:
    return "\n".join(
        f"--- rank {rank} ended with {ended.code}\n{' '.join(ended.lines)}\n{ended.errors}"
        for rank, ended in enumerate(ranks)
    )
