"""What a device has copied to the host beside it is read one call later."""

from unittest import mock

from gradcast.training.compat import later_read
from training.needs import torch


def test_values_of_the_host_are_known_at_once():
    assert later_read.LaterRead().exchange(torch.tensor([1.5, 2.0]), "first") == ([1.5, 2.0], "first")


def test_values_of_a_device_are_known_a_call_later(monkeypatch):
    begun = []

    def copy(values):
        begun.append((values.clone(), mock.Mock()))
        return begun[-1]

    monkeypatch.setattr(later_read, "_is_on_device", lambda _: True)
    monkeypatch.setattr(later_read, "_begin_copy", copy)
    read = later_read.LaterRead()
    assert read.exchange(torch.tensor([1.0]), "first") is None
    assert not begun[0][1].synchronize.called
    assert read.exchange(torch.tensor([2.0]), "second") == ([1.0], "first")
    assert begun[0][1].synchronize.called
    assert not begun[1][1].synchronize.called
    assert read.exchange(torch.tensor([3.0]), "third") == ([2.0], "second")
