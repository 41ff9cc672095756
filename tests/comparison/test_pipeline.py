"""The profile of a pipeline's rank, against its schedule played operation by operation."""

import pytest

from gradcast import _core
from gradcast.comparison.compare import compare
from gradcast.comparison.pipeline import Pipeline, step_of
from gradcast.errors import Error

FORWARD_NS, BACKWARD_NS = 600.0, 1200.0  # of a rank's micro-batch


def order_of(rank, pipeline):
    """The operations of a rank: (is forward, chunk, micro-batch)."""
    stages, chunks, count = pipeline.stages, pipeline.chunks, pipeline.micro_batches
    total = count * chunks
    ahead = 2 * (stages - rank - 1) + (chunks - 1) * stages if chunks > 1 else stages - rank - 1

    def operation(number, is_forward):
        chunk = number % (stages * chunks) // stages
        batch = number // (stages * chunks) * stages + number % stages
        return is_forward, chunk if is_forward else chunks - 1 - chunk, batch

    found = [operation(each, True) for each in range(min(ahead, total))]
    for number in range(total):
        if number + ahead < total:
            found.append(operation(number + ahead, True))
        found.append(operation(number, False))
    return found


def played(pipeline):
    """The begin and end of each operation, by (rank, is forward, chunk, micro-batch)."""
    queues = [order_of(rank, pipeline) for rank in range(pipeline.stages)]
    free, times = [0.0] * pipeline.stages, {}
    last = pipeline.stages - 1
    while any(queues):
        began = len(times)
        for rank, queue in enumerate(queues):
            while queue:
                is_forward, chunk, batch = queue[0]
                step, edge = (-1, 0) if is_forward else (1, last)
                before = (rank + step, is_forward, chunk, batch)
                if rank == edge:  # the neighbour is at the other end, in another chunk
                    before = (last - edge, is_forward, chunk + step, batch)
                if not 0 <= before[2] < pipeline.chunks:
                    before = None if is_forward else (rank, True, chunk, batch)
                if before is not None and before not in times:
                    break
                start = max(free[rank], 0.0 if before is None else times[before][1])
                free[rank] = start + (FORWARD_NS if is_forward else BACKWARD_NS) / pipeline.chunks
                times[(rank, *queue.pop(0))] = start, free[rank]
        assert len(times) > began, "the schedule is stuck"
    return times


def profile_of(chunks):
    """A tensor per chunk, needed where its forward begins and ready where its backward ends."""
    tensors = [
        _core.Tensor(
            name=str(chunk),
            bytes=4000,
            need_ns=chunk * FORWARD_NS / chunks,
            ready_ns=(chunks - chunk) * BACKWARD_NS / chunks,
        )
        for chunk in range(chunks)
    ]
    return _core.Profile(name="stage", forward_ns=FORWARD_NS, backward_ns=BACKWARD_NS, tensors=tensors)


@pytest.mark.parametrize(
    "pipeline",
    [Pipeline(1, p, m, v) for p, m, v in [(1, 1, 1), (1, 4, 1), (2, 2, 1), (4, 8, 1), (3, 7, 1), (2, 4, 2), (4, 8, 3)]],
    ids=str,
)
def test_the_first_rank_has_the_times_of_the_schedule(pipeline):
    times = played(pipeline)
    step = step_of(profile_of(pipeline.chunks), pipeline)
    assert step.forward_ns + step.backward_ns == pytest.approx(max(end for _, end in times.values()))
    compute = pipeline.micro_batches * (FORWARD_NS + BACKWARD_NS)
    assert step.forward_ns + step.backward_ns == pytest.approx(compute * (1 + pipeline.bubble))
    for chunk, tensor in enumerate(step.tensors):
        assert tensor.need_ns == pytest.approx(times[0, True, chunk, 0][0])
        last = times[0, False, chunk, pipeline.micro_batches - 1][1]
        assert tensor.ready_ns + step.forward_ns == pytest.approx(last)


@pytest.mark.parametrize("pipeline", [Pipeline(1, 4, 8, 1), Pipeline(1, 4, 8, 2)], ids=str)
def test_no_other_rank_has_less_time(pipeline):
    times = played(pipeline)
    for chunk in range(pipeline.chunks):
        slack = [
            times[rank, True, chunk, 0][0] - times[rank, False, chunk, pipeline.micro_batches - 1][1]
            for rank in range(pipeline.stages)
        ]
        assert slack[0] == min(slack)


def test_tensor_parallelism_divides_bytes_and_compute():
    whole, part = profile_of(1), step_of(profile_of(1), Pipeline(tensor=3))
    assert (part.forward_ns, part.backward_ns) == (whole.forward_ns / 3, whole.backward_ns / 3)
    assert part.tensors[0].bytes == 1336  # whole elements


def test_more_micro_batches_leave_less_to_gain():
    link = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=10.0, beta_ns_per_byte=0.2)])
    gains = []
    for count in (1, 4, 16):
        found = compare(step_of(profile_of(3), Pipeline(micro_batches=count)), link, ["ddp", "forecast"])
        gains.append(found.ddp.predicted_ns / found.rows[0].plan.predicted_ns)
    assert gains[0] > gains[1] > gains[2] > 1


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((1, 1, 4, 2), "nothing to interleave"), ((1, 4, 3, 1), "do not fill"), ((1, 4, 6, 2), "a multiple of 4")],
)
def test_what_no_schedule_runs_is_refused(numbers, words):
    with pytest.raises(Error, match=words):
        Pipeline(*numbers)
