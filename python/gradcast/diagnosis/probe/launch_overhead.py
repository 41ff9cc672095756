"""How long operations run in a step, and so how much of it goes by between them: launching, Python, the framework.

Some of the doctor's steps on this rank alone are recorded by torch's profiler. On a GPU the device computes while a
kernel or a copy runs there; that it has nothing to do is the time in which it waits for the next launch (what
"launch-bound" means). A CPU computes while an operation of torch runs, or a node of autograd, also one that is written
in Python; the rest is the modules' Python, autograd's engine and DDP.
"""

import bisect
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gradcast.diagnosis.probe.probes import LEFT_OUT_PER_TURN, STAGE_MARK, Prober

_LAST_STAGE = "update"
# RecordScope of c10: FUNCTION and BACKWARD_FUNCTION.
_OPERATION_SCOPES = (0, 1)
# Traffic; the engine's work around a node; where it stores a gradient and calls DDP; what torch.compile does around its
# graphs, whose own nodes count.
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


@dataclass(frozen=True)
class Span:
    begin_ns: float
    end_ns: float


@dataclass(frozen=True)
class Stretch(Span):
    """In which operations run without a gap. ``inside``: how many of them begin after the first one."""

    inside: int


def computing_ms(
    prober: Prober, model: Any, device: torch.device, usual_ms: Mapping[str, float]
) -> dict[str, list[float]] | str:
    """By stage, of each recorded step; or why this rank cannot tell. ``usual_ms``: what the stages take when nothing is
    recorded. Collective, like all steps of ``prober``, also on a rank that cannot tell."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    recorder = profile(activities=activities, acc_events=True)
    with _no_complaints(on_gpu):
        failure = "the script uses it" if _in_use() else _failure_of(recorder.start)
        prober.turn(model)
        # Also where another thread, or a schedule that has not begun, uses it: nothing says so before.
        failure = failure or _failure_of(recorder.stop)
    if failure:
        return f"torch's profiler cannot record here: {failure}"
    return _told(list(recorder.events()), usual_ms, on_gpu=on_gpu)


def _failure_of(action: Callable[[], None]) -> str | None:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return None


def _in_use() -> bool:
    return torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def _told(events: Sequence[Any], usual_ms: Mapping[str, float], *, on_gpu: bool) -> dict[str, list[float]] | str:
    events = [event for event in events if not event.is_async]
    marks = [(event.name.removeprefix(STAGE_MARK), _span(event)) for event in events if _is_mark(event)]
    marks.sort(key=lambda mark: mark[1].begin_ns)
    operations = [_span(event) for event in events if (_is_kernel if on_gpu else _is_operation)(event)]
    if not marks or not operations:
        return f"torch's profiler has recorded no {'kernels' if marks and on_gpu else 'operations'}"
    # A kernel takes no longer because the host records its launch.
    recordings = [] if on_gpu else sorted(_span(event).begin_ns for event in events)
    return by_stage(marks, stretches(operations), recordings, usual_ms)


def stretches(operations: Sequence[Span]) -> list[Stretch]:
    """Operations lie inside of others, and on several threads beside each other. Pure."""
    found: list[Stretch] = []
    for each in sorted(operations, key=lambda span: span.begin_ns):
        if found and each.begin_ns <= found[-1].end_ns:
            last = found[-1]
            found[-1] = Stretch(last.begin_ns, max(last.end_ns, each.end_ns), last.inside + 1)
        else:
            found.append(Stretch(each.begin_ns, each.end_ns, 0))
    return found


def by_stage(
    marks: Sequence[tuple[str, Span]],
    computing: Sequence[Stretch],
    recordings_ns: Sequence[float],
    usual_ms: Mapping[str, float],
) -> dict[str, list[float]]:
    """ms of computing in each stage of each step but those that are left out of a turn. Pure.

    Recording an event takes a microsecond or so. What a step's stage has become longer than usual is spread evenly over
    its events, and the share of those that lie within a stretch is taken from it. ``marks``: the stages in order, the
    last one of a step ending it. ``recordings_ns``: when events began, in order; of none, nothing is taken off.
    """
    steps: list[dict[str, _Stage]] = [{}]
    for stage, span in marks:
        steps[-1].setdefault(stage, _Stage()).add(span, computing, recordings_ns)
        if stage == _LAST_STAGE:
            steps.append({})
    counted = steps[LEFT_OUT_PER_TURN:-1]
    return {stage: [step[stage].computing_ms(usual_ms.get(stage)) for step in counted] for stage in counted[0]}


class _Stage:
    """Of one step, in as many passes as it has."""

    def __init__(self) -> None:
        self._length_ms = self._found_ms = 0.0
        self._events = self._inside = 0

    def add(self, span: Span, computing: Sequence[Stretch], recordings_ns: Sequence[float]) -> None:
        self._length_ms += (span.end_ns - span.begin_ns) / 1e6
        until, since = (bisect.bisect_left(recordings_ns, time_ns) for time_ns in (span.end_ns, span.begin_ns))
        self._events += until - since
        for each in computing[bisect.bisect(computing, span.begin_ns, key=lambda stretch: stretch.end_ns) :]:
            if each.begin_ns >= span.end_ns:
                break
            self._found_ms += (min(each.end_ns, span.end_ns) - max(each.begin_ns, span.begin_ns)) / 1e6
            self._inside += each.inside

    def computing_ms(self, usual_ms: float | None) -> float:
        if usual_ms is None or self._events == 0:
            return self._found_ms
        longer_ms = max(0.0, self._length_ms - usual_ms)
        return max(0.0, self._found_ms - longer_ms * self._inside / self._events)


def _span(event: Any) -> Span:
    return Span(event.time_range.start * 1e3, event.time_range.end * 1e3)  # the profiler says microseconds


def _is_mark(event: Any) -> bool:
    return event.device_type == DeviceType.CPU and event.name.startswith(STAGE_MARK)


def _is_kernel(event: Any) -> bool:
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def _is_operation(event: Any) -> bool:
    return event.scope in _OPERATION_SCOPES and not event.name.startswith(_NO_OPERATIONS)


@contextlib.contextmanager
def _no_complaints(on_gpu: bool) -> Iterator[None]:
    """torch built for CUDA otherwise prints an error where there is no device for its profiler, the first time."""
    name = "KINETO_LOG_LEVEL"
    if on_gpu or name in os.environ:
        yield
        return
    os.environ[name] = "6"  # above all of its levels
    try:
        yield
    finally:
        del os.environ[name]
