"""Measured steps, held against what the model makes of their own compute and network."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import gradcast
from conftest import link_of
from gradcast import _core
from gradcast.lab.replays import Step, last_steps, replay
from gradcast.training.measure.step_trace import StepRecord, StepTrace

MS = 1e6


@pytest.fixture
def profile():
    tensors = [
        gradcast.Tensor(name="first", bytes=12_000_000, ready_ns=200 * MS, need_ns=0),
        gradcast.Tensor(name="last", bytes=6_000_000, ready_ns=100 * MS, need_ns=50 * MS),
    ]
    return gradcast.Profile(
        name="small", forward_ns=100 * MS, backward_ns=200 * MS, tensors=tensors, world_size=2, link=link_of(0, 8.0)
    )


def played(profile, plan, backward, forward, link):
    """A step by play in which everything takes so many times as long: what each rank would have noted."""
    longer = gradcast.Profile(
        name="longer",
        forward_ns=forward * profile.forward_ns,
        backward_ns=backward * profile.backward_ns,
        tensors=[
            gradcast.Tensor(
                name=tensor.name,
                bytes=tensor.bytes,
                ready_ns=backward * tensor.ready_ns,
                need_ns=forward * tensor.need_ns,
            )
            for tensor in profile.tensors
        ],
        world_size=2,
    )
    timeline = _core.play(longer, profile.link.scaled(link, link), plan)
    link_ns = sum(block.finish_ns - block.launch_ns for block in timeline.blocks)
    busy_ns = longer.backward_ns + longer.forward_ns
    wait_ns = timeline.iteration_ns - busy_ns
    return Step(0, 0, timeline.iteration_ns, None, longer.backward_ns, longer.forward_ns, 0.0, wait_ns, link_ns)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_steps_that_go_as_the_model_says_are_replayed_exactly(profile, mode):
    plan = gradcast.make_plan(profile, profile.link, mode=mode)
    steps = [played(profile, plan, *factors) for factors in ((1, 1, 1), (1.3, 1, 0.8), (1, 2.0, 1.5))]
    found = replay(profile, plan, [(step, step) for step in steps])
    assert found.replayed_ms == pytest.approx(found.measured_ms, rel=1e-5)
    assert found.measured_ms * MS == sorted(step.step_ns for step in steps)[1]
    assert replay(profile, plan, []) is None


def test_a_step_waits_for_the_slower_rank_and_the_network_counts_where_nobody_waited(profile):
    plan = gradcast.make_plan(profile, profile.link)
    slow = played(profile, plan, 1.4, 1, 1)
    # The faster rank's blocks are due before the other's gradients exist.
    shorter = {"backward_ns": 150 * MS, "forward_ns": 90 * MS, "wait_ns": slow.step_ns - 240 * MS}
    fast = dataclasses.replace(slow, link_ns=slow.link_ns + 100 * MS, **shorter)
    for ranks in ((slow, fast), (fast, slow)):
        assert replay(profile, plan, [ranks]).replayed_ms * MS == pytest.approx(slow.step_ns, rel=1e-5)


def test_the_last_steps_are_taken_from_what_the_session_has_kept():
    """Without those that followed another plan; where blocks follow each other they count once."""
    plan, trace = object(), StepTrace(5)
    for number in range(5):
        start_ns = 1000 * MS * number
        trace.begin(StepRecord(number, number, "another" if number == 2 else plan, None, start_ns))
        for name, begin_ms, end_ms in (("backward", 0, 60), ("wait", 60, 70), ("update", 70, 72)):
            trace.span(name, start_ns + begin_ms * MS, start_ns + end_ms * MS)
    blocks = [SimpleNamespace(due_ns=lo * MS, finish_ns=hi * MS) for lo, hi in ((10, 30), (30, 35), (50, 60))]
    timeline = [SimpleNamespace(iteration=number, blocks=blocks) for number in range(5)]
    report = SimpleNamespace(plan=plan, trace=trace)
    session = SimpleNamespace(report=report, exchange=SimpleNamespace(timeline=lambda: timeline))
    handle = gradcast.Handle(torch.nn.Linear(1, 1), mock.Mock(session=session), [], [])
    times = [each * MS for each in (60, 928, 2, 10, 35)]
    assert last_steps(handle, 3) == [
        Step(number, 1000 * MS * number, 1000 * MS, None, *times, update_calls=0) for number in (1, 3)
    ]
