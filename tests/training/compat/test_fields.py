"""Fields of many objects at once, as loops in Python would read and set them."""

import dataclasses
from types import SimpleNamespace

import pytest

from gradcast.training.compat import extension


@dataclasses.dataclass(slots=True, eq=False)
class Thing:
    number: int
    owner: object = None


@pytest.fixture
def things():
    return [Thing(number) for number in range(4)]


def test_fields_are_read_chosen_and_set(things):
    native, one, other = extension.load(), object(), object()
    assert native.fields(things, "number") == [0, 1, 2, 3]
    native.set_fields(things, "owner", [one, other, one, None, other])  # more than there are objects
    assert native.with_field(things, "owner", one) == [things[0], things[2]]
    assert native.with_field(things, "owner", None, False) == things[:3]
    assert native.with_other_field(things, "owner", [one, one, one, None]) == [things[1]]
    assert native.change_fields(things, "owner", (one, other), None) is things[3]
    assert native.fields(things, "owner") == [None] * 4
    for empty in (native.fields([], "number"), native.with_field([], "owner", one)):
        assert empty == []


@pytest.mark.parametrize(
    ("objects", "field", "error"),
    [
        ([Thing(0), SimpleNamespace(number=1)], "number", TypeError),
        ([SimpleNamespace(number=1)], "number", AttributeError),
        ([Thing(0)], "count", AttributeError),
        ([Thing(0)], "__doc__", TypeError),
        ([Thing.__new__(Thing)], "number", TypeError),
    ],
)
def test_what_has_no_such_slot_is_refused(objects, field, error):
    with pytest.raises(error):
        extension.load().fields(objects, field)


def test_too_few_values_are_refused(things):
    with pytest.raises(ValueError, match="as many values"):
        extension.load().set_fields(things, "owner", [None])


def test_containers_are_compared_one_after_the_other():
    contain, one, other = extension.load().contain, object(), object()
    assert contain([{"a": one, "b": other}, [one], {}], [one, other, one])
    assert not contain([[one, other]], [one])
    assert not contain([[one]], [one, other])
    assert not contain([{"a": other}], [one])
    with pytest.raises(TypeError):
        contain([(one,)], [one])
