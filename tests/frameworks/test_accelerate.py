"""Under Accelerate, every way of sending the gradients ends where its own DDP ends, bit for bit on two ranks."""

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")

MODULE = "frameworks.accelerate_cases"
# Of 12 steps, with accumulation 6: not the 3 of the warm-up, and not the last one, which no forward pass follows.
DEFERRED = {"plain": 8, "accumulated": 2, "clipped": 0, "scaler": 0}
USES = "uses gradients between backward and step()"


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("way", ["registered", "hook", "overlap", "inner"])
def test_prepared_objects_give_the_numbers_of_ddp(told, kind, way):
    """ "inner": attached to the optimizer inside of Accelerate's, which is what gradcast makes of the outer one."""
    told.check_way(kind, way, DEFERRED[kind])
    for rank in told[f"{kind} {way}"]:
        assert rank["rate"] == told[f"{kind} stock"][0]["rate"], "the scheduler has made another number of steps"


def test_the_kinds_of_training_differ(told):
    told.check_kinds_differ(DEFERRED)


def test_it_is_said_why_nothing_overlaps(told):
    for kind in ("clipped", "scaler"):
        for rank in told[f"{kind} overlap"]:
            assert rank["waits"] == [USES]
    counts = [sum("with a GradScaler" in line for line in rank["warnings"]) for rank in told["scaler overlap"]]
    assert sorted(counts) == [0, 1]


def test_clipping_inside_gives_the_same_numbers_and_leaves_the_updates_to_forward(told):
    assert told.digests("clipped inside") == told.digests("clipped stock")
    assert [rank["deferred"] for rank in told["clipped inside"]] == [8, 8]


@pytest.mark.parametrize(
    ("case", "stock", "deferred"),
    [("taken over", "clipped stock", 8), ("taken over accumulated", "clipped accumulated stock", 2)],
)
def test_accelerates_own_call_is_taken_over(told, case, stock, deferred):
    assert told.digests(case) == told.digests(stock)
    for rank in told[case]:
        assert rank["norms"] == told[stock][0]["norms"]
        assert rank["deferred"] == deferred
        assert USES not in rank["waits"]
    if case == "taken over":
        assert min(rank["norms"]) < 0.7 < max(rank["norms"])


def test_clipping_inside_is_refused_where_a_scaler_would_go_past_it(told):
    for rank in told["scaler refused"]:
        assert "GradScaler" in rank["refused"]
        assert rank["steps"] == 0
