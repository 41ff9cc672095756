"""Under Lightning, every way of sending the gradients ends where Lightning's own DDP ends, bit for bit on two ranks."""

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")

MODULE = "frameworks.lightning_cases"
# Of 12 steps, with accumulation 6, of which 3 are the warm-up's; a validation follows the last one.
DEFERRED = {"plain": 9, "accumulated": 3, "manual": 9, "clipped": 0}


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_the_callback_gives_the_numbers_of_ddp(told, kind, way):
    told.check_way(kind, way, DEFERRED[kind])


def test_the_kinds_of_training_differ(told):
    told.check_kinds_differ(DEFERRED)


def test_lightnings_clipping_takes_the_overlap_and_rank_0_says_so(told):
    first, second = told["clipped overlap"]
    assert len(first["warnings"]) == 1
    assert "as clipping does" in first["warnings"][0]
    assert second["warnings"] == []


def test_clipping_inside_gives_the_same_numbers_and_leaves_the_updates_to_forward(told):
    assert told.digests("clipped inside") == told.digests("clipped stock")
    assert [rank["deferred"] for rank in told["clipped inside"]] == [9, 9]
    assert [rank["warnings"] for rank in told["clipped inside"]] == [[], []]


def test_the_hook_of_the_strategy(told):
    assert told.digests("strategy") == told.digests("plain stock")
    assert [rank["hooks"] for rank in told["strategy"]] == [["comm_hook"], ["comm_hook"]]


def test_lightning_leaves_the_hook_of_the_strategy_out_on_cpu(told):
    """docs/guide/frameworks.md says so; where this fails, Lightning has learned it."""
    assert [rank["hooks"] for rank in told["strategy on cpu"]] == [[], []]


def test_training_goes_on_from_a_checkpoint_that_was_written_while_gradients_travelled(told):
    assert told.digests("resumed overlap") == told.digests("resumed stock")
    # Two steps end in a checkpoint, which waits for them; the second half has a warm-up of its own.
    assert [rank["deferred"] for rank in told["resumed overlap"]] == [9 - 2 + 3] * 2


@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_a_fit_after_one_that_has_raised(told, way):
    assert told.digests(f"again {way}") == told.digests("again stock")
    assert [rank["mode"] for rank in told[f"again {way}"]] == [way] * 2
