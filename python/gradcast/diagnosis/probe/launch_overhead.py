"""Measures the time of operations in each stage of a step. The rest of the stage is launch overhead.

Some of the doctor's steps on this rank alone are recorded by torch's profiler. A GPU computes while a kernel or a copy
runs on it; when it idles, it waits for the next launch ("launch-bound"). A CPU computes while an operation of torch or
an autograd node runs, including nodes written in Python. The rest is the modules' Python code, autograd's engine and
DDP.
"""

import bisect
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gradcast.diagnosis.probe.prober import STAGE_MARK, WARMUP_STEPS_PER_TURN, Prober
from gradcast.intervals import united

_LAST_STAGE = "update"
# WORKAROUND(torch 2.11, Gloo): a thread of Gloo's wakes whoever waits for a future, and only then ends the record of
# the operation. Stopping the profiler frees the record's memory, so if the system has set that thread aside in between,
# it crashes. This is how long it may take.
_ENDS_RECORDS_WITHIN_S = 0.25
# RecordScope of c10: FUNCTION and BACKWARD_FUNCTION.
_OPERATION_SCOPES = (0, 1)
# Not compute: communication; the engine's work around a node; where it stores a gradient and calls DDP; and what
# torch.compile does around its graphs, whose own nodes count.
_NO_OPERATIONS = (
    "c10d::",
    "gloo:",
    "nccl:",
    "mpi:",
    "autograd::engine::evaluate_function",
    "torch::autograd::AccumulateGrad",
    "torch.distributed.ddp.reducer::",
    "Torch-Compiled Region",
    "TorchDynamo Cache Lookup",
    "Pregraph bytecode",
    "AOTDispatcher Runtime Wrapper Prologue",
)


class Interval(NamedTuple):
    """A time, with the number of operations that begin inside it after the first one."""

    begin_ns: float
    end_ns: float
    inside: int = 0


def computing_ms(
    prober: Prober, model: Any, device: torch.device, usual_ms: Mapping[str, float]
) -> dict[str, list[float]] | str:
    """Returns the computing ms of each recorded step, by stage; or a sentence that says why that is unknown.

    ``usual_ms`` has the stages' times without the profiler. Collective, also where the result is unknown.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    recorder = profile(activities=activities, acc_events=True)
    with _silent_profiler(on_gpu):
        in_use = torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled
        failure = "the script uses it" if in_use else _failure_of(recorder.start)
        prober.turn(model)
        time.sleep(_ENDS_RECORDS_WITHIN_S)
        # Stopping fails if another thread, or a schedule that has not begun, uses the profiler; there is no
        # way to know before.
        failure = failure or _failure_of(recorder.stop)
    if failure:
        return f"torch's profiler cannot record here: {failure}"
    return from_events(list(recorder.events()), usual_ms, on_gpu=on_gpu)


def _failure_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return None


def from_events(events: Sequence[Any], usual_ms: Mapping[str, float], *, on_gpu: bool) -> dict[str, list[float]] | str:
    events = [event for event in events if not event.is_async]
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    marks = [(e.name.removeprefix(STAGE_MARK), _span(e)) for e in on_host if e.name.startswith(STAGE_MARK)]
    marks.sort(key=lambda mark: mark[1].begin_ns)
    if on_gpu:
        found = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    else:
        found = [e for e in events if e.scope in _OPERATION_SCOPES and not e.name.startswith(_NO_OPERATIONS)]
    operations = [_span(event) for event in found]
    if not marks or not operations:
        return f"torch's profiler has recorded no {'kernels' if marks and on_gpu else 'operations'}"
    # On a GPU, recording a launch on the host does not make the kernel longer.
    recordings_ns = [] if on_gpu else sorted(_span(event).begin_ns for event in events)
    return by_stage(marks, busy_intervals(operations), recordings_ns, usual_ms)


def busy_intervals(operations: Sequence[Interval]) -> list[Interval]:
    """Merges operations that overlap. Operations nest, and run beside each other on several threads. Pure."""
    begins_ns = sorted(each.begin_ns for each in operations)
    return [
        Interval(begin_ns, end_ns, bisect.bisect(begins_ns, end_ns) - bisect.bisect_left(begins_ns, begin_ns) - 1)
        for begin_ns, end_ns in united((each.begin_ns, each.end_ns) for each in operations)
    ]


def by_stage(
    marks: Sequence[tuple[str, Interval]],
    computing: Sequence[Interval],
    recordings_ns: Sequence[float],
    usual_ms: Mapping[str, float],
) -> dict[str, list[float]]:
    """Returns the computing ms in each stage of each counted step of a turn. Pure.

    Recording an event takes about a microsecond. The time by which a stage is longer than usual is spread evenly over
    its events, and the share of the events inside busy intervals is subtracted from them.

    ``marks`` are the stages in order; the last stage of a step ends it. ``recordings_ns`` are the sorted times at which
    events began; if it is empty, nothing is subtracted.
    """
    steps: list[dict[str, list[Interval]]] = [defaultdict(list)]
    for stage, span in marks:
        steps[-1][stage].append(span)
        if stage == _LAST_STAGE:
            steps.append(defaultdict(list))
    counted = steps[WARMUP_STEPS_PER_TURN:-1]
    return {
        stage: [_computing_ms(step[stage], computing, recordings_ns, usual_ms.get(stage)) for step in counted]
        for stage in counted[0]
    }


def _computing_ms(
    spans: Sequence[Interval], computing: Sequence[Interval], recordings_ns: Sequence[float], usual_ms: float | None
) -> float:
    """Returns the computing ms in one stage of one step, which may consist of several passes."""
    length_ms = found_ms = 0.0
    events = inside = 0
    for begin_ns, end_ns, _ in spans:
        length_ms += (end_ns - begin_ns) / 1e6
        events += bisect.bisect_left(recordings_ns, end_ns) - bisect.bisect_left(recordings_ns, begin_ns)
        for each in computing[bisect.bisect(computing, begin_ns, key=lambda interval: interval.end_ns) :]:
            if each.begin_ns >= end_ns:
                break
            found_ms += (min(each.end_ns, end_ns) - max(each.begin_ns, begin_ns)) / 1e6
            inside += each.inside
    if usual_ms is None or events == 0:
        return found_ms
    return max(0.0, found_ms - max(0.0, length_ms - usual_ms) * inside / events)


def _span(event: Any) -> Interval:
    return Interval(event.time_range.start * 1e3, event.time_range.end * 1e3)  # the profiler reports microseconds


@contextlib.contextmanager
def _silent_profiler(on_gpu: bool) -> Iterator[None]:
    """Keeps a torch built for CUDA from printing an error if its profiler finds no device."""
    name = "KINETO_LOG_LEVEL"
    if on_gpu or name in os.environ:
        yield
        return
    os.environ[name] = "6"  # above all of its levels
    try:
        yield
    finally:
        del os.environ[name]
