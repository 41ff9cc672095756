"""Random training programs over FSDP2's features: native HSDP's bits, or a refusal."""

import pytest

from training.sharded_programs import campaign

COUNT = 16


@pytest.mark.slow
def test_random_programs_train_as_under_native_hsdp(ranks):
    told: list[str] = []
    states = campaign(ranks, range(COUNT), told.append)
    assert states.keys() <= {"equal", "refused", "invalid"}, "\n".join(told)
    assert states["equal"] >= 0.75 * COUNT, "\n".join(told)
