"""How long operations run in a step, and so how much of it goes by between them: launching, Python, the framework.

Some of the doctor's steps on this rank alone are recorded by torch's profiler. On a GPU the device computes while a
kernel or a copy runs there; that it has nothing to do is the time in which it waits for the next launch (what
"launch-bound" means). A CPU computes while an operation of torch runs, or a node of autograd, also one that is written
in Python; the rest is the modules' Python, autograd's engine and DDP.
"""

import bisect
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gradcast.diagnosis.probes import STAGE_MARK, Prober

# In the first the profiler sets itself up.
_LEFT_OUT_STEPS, _STEPS = 1, 4
_LAST_STAGE = "update"
# RecordScope of c10: FUNCTION and BACKWARD_FUNCTION.
_OPERATION_SCOPES = (0, 1)
# The engine's work around a node; where it stores a gradient and calls DDP; traffic.
_NO_OPERATIONS = (
    "autograd::engine::evaluate_function",
    "torch::autograd::AccumulateGrad",
    "c10d::",
    "gloo:",
    "nccl:",
    "mpi:",
)


@dataclass(frozen=True)
class Span:
    begin_ns: float
    end_ns: float


@dataclass(frozen=True)
class Stretch(Span):
    """In which operations run without a gap. ``inside``: how many of them begin after the first one."""

    inside: int


def runs() -> bool:
    """Whether torch's profiler is in use: there is one per process."""
    return torch.autograd._profiler_enabled()


def computing_ms(
    prober: Prober, model: Any, device: torch.device, usual_ms: Mapping[str, float]
) -> dict[str, list[float]]:
    """By stage, of each recorded step. ``usual_ms``: what the stages take when nothing is recorded. Collective, like
    all steps of ``prober``. REQUIRES: not ``runs``."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _no_complaints(on_gpu), profile(activities=activities, acc_events=True) as recorded:
        prober.steps(model, _LEFT_OUT_STEPS + _STEPS)
    events = [event for event in recorded.events() if not event.is_async]
    marks = [(event.name.removeprefix(STAGE_MARK), _span(event)) for event in events if _is_mark(event)]
    if on_gpu:
        # A kernel takes no longer because the host records its launch.
        return by_stage(marks, stretches([_span(event) for event in events if _is_kernel(event)]), [], {})
    found = stretches([_span(event) for event in events if _is_operation(event)])
    return by_stage(marks, found, sorted(_span(event).begin_ns for event in events), usual_ms)


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
    """ms of computing in each stage of each step but the first. Pure.

    Recording an event takes a microsecond or so. What a stage has become longer than usual is spread evenly over its
    events, and the share of those that lie within a stretch is taken from it. ``marks``: the stages in order, the last
    one of a step ending it. ``recordings_ns``: when events began, in order; of none, nothing is taken off.
    """
    steps: list[dict[str, float]] = [{}]
    for stage, span in marks:
        steps[-1][stage] = steps[-1].get(stage, 0.0) + _computing_ms(
            span, computing, recordings_ns, usual_ms.get(stage)
        )
        if stage == _LAST_STAGE:
            steps.append({})
    counted = steps[_LEFT_OUT_STEPS:-1]
    return {stage: [step[stage] for step in counted] for stage in counted[0]}


def _computing_ms(
    stage: Span, computing: Sequence[Stretch], recordings_ns: Sequence[float], usual_ms: float | None
) -> float:
    within = [each for each in computing if each.begin_ns < stage.end_ns and each.end_ns > stage.begin_ns]
    found_ns = sum(min(each.end_ns, stage.end_ns) - max(each.begin_ns, stage.begin_ns) for each in within)
    events = bisect.bisect(recordings_ns, stage.end_ns) - bisect.bisect(recordings_ns, stage.begin_ns)
    if usual_ms is None or events == 0:
        return found_ns / 1e6
    longer_ms = max(0.0, (stage.end_ns - stage.begin_ns) / 1e6 - usual_ms)
    return max(0.0, found_ns / 1e6 - longer_ms * sum(each.inside for each in within) / events)


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
    """torch built for CUDA otherwise prints an error where there is no device for its profiler."""
    name = "KINETO_LOG_LEVEL"
    if on_gpu or name in os.environ:
        yield
        return
    os.environ[name] = "6"  # above all of its levels
    try:
        yield
    finally:
        del os.environ[name]
