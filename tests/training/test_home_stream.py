"""Which stream updates run on, on streams of the test's own: no GPU is needed."""

import contextlib

import pytest

from gradcast.training.home_stream import HomeStream
from training.needs import torch


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
    return streams


@pytest.fixture
def home(streams):
    home = HomeStream(torch.device("cuda", 0))
    home.step_called()
    return home


def test_where_everything_is_on_one_stream_nothing_waits(streams, home):
    home.parameter_read()
    with home.entered():
        assert streams.current is streams.a
    assert not home.left
    assert streams.a.behind == []


def test_updates_run_at_home_and_whoever_asked_runs_behind_them(streams, home):
    with streams.on(streams.b), home.entered():
        assert streams.current is streams.a
        assert streams.b.behind == []
    assert streams.b.behind == ["a"]
    assert streams.a.behind == []


def test_a_step_on_another_stream_is_before_its_updates(streams, home):
    with streams.on(streams.b):
        home.step_called()
    assert streams.a.behind == ["b"]


def test_a_parameter_that_is_read_elsewhere_is_noticed(streams, home):
    with streams.on(streams.b):
        home.parameter_read()
    assert home.left


def test_nothing_is_known_before_the_first_step(streams):
    home = HomeStream(torch.device("cuda", 0))
    home.parameter_read()
    with streams.on(streams.b), home.entered():
        assert streams.current is streams.b
    assert not home.left
    assert streams.b.behind == []


def test_on_the_cpu_there_are_no_streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("there is no CUDA"))
    home = HomeStream(torch.device("cpu"))
    home.step_called()
    home.parameter_read()
    with home.entered():
        pass
    assert not home.left
