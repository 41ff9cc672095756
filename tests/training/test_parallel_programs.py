"""Random training programs over FSDP2's features and over pipelines: the native bits, or a refusal."""

import pytest

from training import pipeline_programs, sharded_programs
from training.random_campaign import campaign

COUNT = 16


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sharded_programs, pipeline_programs])
def test_random_programs_train_as_natively(ranks, kind):
    told: list[str] = []
    states = campaign(ranks, list(map(kind.program_of, range(COUNT))), told.append)
    assert states.keys() <= {"equal", "refused", "invalid"}, "\n".join(told)
    assert states["equal"] >= 0.75 * COUNT, "\n".join(told)
