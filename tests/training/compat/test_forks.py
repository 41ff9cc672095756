"""fork() in the middle of training: the child sees finished values and can leave; the parent goes on."""

import pytest

from training import needs  # noqa: F401
from training.launch import launch


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.slow)])
def test_a_forked_child_sees_finished_values_and_leaves(mode):
    for end in launch(2, "forks", mode):
        assert end.code == 0, end.errors
        assert not end.left_behind
        assert len(end.told) == 6
        for child, parent in zip(end.told[::2], end.told[1::2], strict=True):
            assert parent["code"] == 0
            assert child == {"child": parent["parent"], "ordinary": True}
