"""A Python that counts references in another way is refused where the part for torch is loaded."""

from types import SimpleNamespace

import pytest

import gradcast

pytest.importorskip("torch", reason="this needs PyTorch, which is not installed: pip install torch")
from gradcast.training.compat import extension, reference_counts

NATIVE = extension.load()
# One too many, and one too few.
MISCOUNTED = {
    "a gradient in Python": {"held_elsewhere": lambda tensors, known, are: [0, 1] if are else [1]},
    "a tensor": {"held_elsewhere": lambda tensors, known, are: [1] if are else []},
    "an entry of a state": {"entries_held": lambda attributes: set()},
}


@pytest.mark.parametrize("what", MISCOUNTED)
def test_a_wrong_count_is_refused(what, monkeypatch):
    right = {name: getattr(NATIVE, name) for name in ("held_elsewhere", "entries_held")}
    reference_counts.check(SimpleNamespace(**right))
    wrong = SimpleNamespace(**(right | MISCOUNTED[what]))
    monkeypatch.setattr(extension, "_import", lambda path: wrong)
    monkeypatch.setattr(extension, "_module", None)
    with pytest.raises(gradcast.Error, match=r"reference counts in this Python .*; train with CPython") as raised:
        extension.load()
    assert raised.value.code == "environment"
    assert extension.loaded() is None


@pytest.mark.parametrize("counted", [2, 4])
def test_a_wrong_count_of_an_attribute_is_refused(counted, monkeypatch):
    monkeypatch.setattr(reference_counts.sys, "getrefcount", lambda value: counted)
    with pytest.raises(gradcast.Error, match="reference counts"):
        reference_counts.check(NATIVE)
