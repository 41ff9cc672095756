"""The comparison within rounding: what is near 0 may differ by the rounding of what is not."""

from training import compare
from training.needs import torch


def test_small_tensors_have_the_rounding_of_large_ones():
    theirs = {"weight": torch.tensor([2.0, -8.0]), "bias": torch.tensor([1e-9]), "count": torch.tensor(100)}
    near = {"weight": torch.tensor([2.0 + 4e-6, -8.0]), "bias": torch.tensor([-4e-6]), "count": torch.tensor(100)}
    assert compare.apart(theirs, theirs, 0.0) == []
    assert compare.apart(near, theirs, 1e-6) == []
    assert compare.apart(near, theirs, 1e-7) == ["weight differs by 4.05e-06", "bias differs by 4e-06"]
    far = near | {"bias": torch.tensor([float("nan")]), "count": torch.tensor(101)}
    assert compare.apart(far, theirs, 1e-6) == ["bias differs by nan", "count differs by 1"]
    assert compare.apart({}, theirs, 1e-6) == ["keys [] against ['bias', 'count', 'weight']"]
