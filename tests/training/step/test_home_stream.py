"""Which stream updates run on, on streams of the test's own: no GPU is needed."""

import contextlib

import pytest

import gradcast
from gradcast.training.step.update_stream import UpdateStream
from training.attached import Attached
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks

nn = torch.nn


class Stream:
    def __init__(self, name):
        self.name, self.behind = name, []

    def wait_stream(self, other):
        self.behind.append(other.name)


class Streams:
    def __init__(self):
        self.a, self.b = Stream("a"), Stream("b")
        self.current = self.a

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch):
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return streams


@pytest.fixture
def stream(streams):
    stream = UpdateStream(torch.device("cuda", 0))
    stream.follow_caller()
    return stream


def test_where_everything_is_on_one_stream_nothing_waits(streams, stream):
    stream.on_parameter_read()
    with stream.entered():
        assert streams.current is streams.a
    assert not stream.read_elsewhere
    assert streams.a.behind == []


def test_updates_run_on_the_update_stream_and_the_caller_is_ordered_behind_them(streams, stream):
    with streams.on(streams.b), stream.entered():
        assert streams.current is streams.a
        assert streams.b.behind == []
    assert streams.b.behind == ["a"]
    assert streams.a.behind == []


def test_a_step_on_another_stream_is_before_its_updates(streams, stream):
    with streams.on(streams.b):
        stream.follow_caller()
    assert streams.a.behind == ["b"]


def test_the_update_stream_moves_with_the_step_and_is_ordered_behind_the_old_one(streams, stream):
    with streams.on(streams.b):
        stream.on_parameter_read()
        assert stream.read_elsewhere
        stream.move_to_caller()
        assert not stream.read_elsewhere, "everything may be on one stream from now on"
        stream.follow_caller()
    assert streams.b.behind == ["a"]
    assert streams.a.behind == []
    with stream.entered():
        assert streams.current is streams.b
    assert streams.a.behind == ["b"]


def test_nothing_is_known_before_the_first_step(streams):
    stream = UpdateStream(torch.device("cuda", 0))
    stream.on_parameter_read()
    stream.move_to_caller()
    with streams.on(streams.b), stream.entered():
        assert streams.current is streams.b
    assert not stream.read_elsewhere
    assert streams.b.behind == []


def test_on_the_cpu_there_are_no_streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("there is no CUDA"))
    stream = UpdateStream(torch.device("cpu"))
    stream.follow_caller()
    stream.move_to_caller()
    stream.on_parameter_read()
    with stream.entered():
        pass
    assert not stream.read_elsewhere


class Watched(UpdateStream):
    """What a session asks of it."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.asked = []

    def follow_caller(self):
        self.asked.append("called")

    def on_parameter_read(self):
        self.asked.append("read")

    @contextlib.contextmanager
    def entered(self):
        self.asked.append("in")
        yield
        self.asked.append("out")


@on_ranks(2)
def test_a_session_watches_reads_and_updates_on_the_update_stream(rank):
    attached = Attached(nn.Linear(4, 4, bias=False))
    stream = session_of(attached.handle).cycle.steps.stream = Watched()
    steps = []
    for number in range(6):
        if number == 5:
            attached.handle.flush()
            stream.read_elsewhere = True
        stream.asked.clear()
        attached.step(torch.ones(2, 4))
        steps.append((list(stream.asked), session_of(attached.handle).cycle.gradients.states[0].is_update_due))
    for asked, is_due in steps[1:3]:  # the warm-up: read, and the step at once
        assert asked[0] == "read"
        assert not is_due
    update, backward_end, step = ["read", "in", "out"], ["called"], ["called", "in", "out"]
    assert steps[4] == (update + backward_end + step, True)
    assert not steps[5][1], "parameters are read elsewhere: the step is taken at once"


def test_a_stream_that_is_captured_in_a_graph_is_ordered_behind_nothing(streams, stream, monkeypatch):
    """CUDA would end the capture with an error that says nothing of the traffic."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with streams.on(streams.b):
        for order in (stream.follow_caller, stream.move_to_caller, stream.entered().__enter__):
            with pytest.raises(gradcast.Error, match="captured in a CUDA graph"):
                order()
    assert streams.a.behind == streams.b.behind == []
