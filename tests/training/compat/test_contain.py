"""Containers of many objects, compared at once."""

import pytest

from gradcast.training.compat import extension


def test_containers_are_compared_one_after_the_other():
    contain, one, other = extension.load().contain, object(), object()
    assert contain([{"a": one, "b": other}, [one], {}], [one, other, one])
    assert not contain([[one, other]], [one])
    assert not contain([[one]], [one, other])
    assert not contain([{"a": other}], [one])
    with pytest.raises(TypeError):
        contain([(one,)], [one])
