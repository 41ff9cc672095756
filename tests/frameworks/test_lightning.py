"""Under Lightning, every way of sending the gradients ends where Lightning's own DDP ends, bit for bit on two ranks."""

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")

MODULE = "frameworks.lightning_cases"
# Of 12 steps, with accumulation 6, of which 3 are the warm-up's. After each half comes a validation, which completes
# updates before it begins.
DEFERRED = {"plain": 7, "accumulated": 2, "manual": 7, "clipped": 7, "value": 7}


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_the_callback_gives_the_numbers_of_ddp(told, kind, way):
    told.check_way(kind, way, DEFERRED[kind])


def test_the_kinds_of_training_differ(told):
    told.check_kinds_differ(DEFERRED)


@pytest.mark.parametrize("kind", ["clipped", "value"])
def test_lightnings_clipping_is_taken_over(told, kind):
    """That the updates are left to forward, check_way has seen."""
    for rank in told[f"{kind} overlap"]:
        assert "uses gradients between backward and step()" not in rank["waits"]


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_fabrics_own_call_is_taken_over(told, kind):
    stock, taken = told[f"fabric {kind} stock"], told[f"fabric {kind} taken over"]
    assert told.digests(f"fabric {kind} stock") == told.digests(f"fabric {kind} taken over")
    for rank in taken:
        assert rank["norms"] == stock[0]["norms"]
        # Not the 3 of the warm-up, and not the last one, which no forward pass follows.
        assert rank["deferred"] == 12 - 3 - 1
    if kind == "norm":
        assert min(stock[0]["norms"]) < 0.7 < max(stock[0]["norms"])


def test_clipping_inside_gives_the_same_numbers_and_leaves_the_updates_to_forward(told):
    assert told.digests("clipped inside") == told.digests("clipped stock")
    assert [rank["deferred"] for rank in told["clipped inside"]] == [7, 7]
    for rank in told["clipped inside"]:
        assert "uses gradients between backward and step()" not in rank["waits"]


def test_the_hook_of_the_strategy(told):
    assert told.digests("strategy") == told.digests("plain stock")
    assert [rank["hooks"] for rank in told["strategy"]] == [["comm_hook"], ["comm_hook"]]


def test_lightning_leaves_the_hook_of_the_strategy_out_on_cpu(told):
    """docs/guide/frameworks.md says so; where this fails, Lightning has learned it."""
    assert [rank["hooks"] for rank in told["strategy on cpu"]] == [[], []]


def test_training_goes_on_from_a_checkpoint_that_was_written_while_gradients_travelled(told):
    assert told.digests("resumed overlap") == told.digests("resumed stock")
    # The second half has a warm-up of its own, and ends in a validation, too.
    assert [rank["deferred"] for rank in told["resumed overlap"]] == [7 + 2] * 2


@pytest.mark.parametrize(
    ("how", "step"),
    {"in overlap mode": 8, "in hook mode": 4, "between epochs": 6}.items(),
    ids=lambda value: str(value),
)
def test_training_goes_on_from_a_snapshot_with_the_bits_of_one_that_was_not_interrupted(told, how, step):
    assert told.digests(f"interrupted {how}") == told.digests("uninterrupted")
    for rank in told[f"interrupted {how}"]:
        assert rank["found"] == f"step-{step}/lightning.ckpt"
        assert f"begins at step 0, and the snapshot is of its step {step}" in rank["refused"]


def test_a_loader_whose_place_would_be_saved_too_late_is_refused_with_snapshots_alone(told):
    for rank in told["stateful loader"]:
        assert "refused" not in rank
        assert rank["steps"] == 12
    for rank in told["stateful loader with snapshots"]:
        assert "cannot save the place of a StatefulLoader under Lightning" in rank["refused"]


@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_a_fit_after_one_that_has_raised(told, way):
    assert told.digests(f"again {way}") == told.digests("again stock")
    assert [rank["mode"] for rank in told[f"again {way}"]] == [way] * 2
