"""Under the Trainer of Hugging Face, every way of sending the gradients ends where its own DDP ends, bit for bit."""

import dataclasses

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
pytest.importorskip("accelerate", reason="the Trainer needs Accelerate, which is not installed: pip install accelerate")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

MODULE = "frameworks.trainer_cases"
NORM = "max_grad_norm"
# Of 10 steps, 3 of which are the warm-up's; an evaluation follows the last one.
DEFERRED = {"plain": 7, "accumulated": 7, "bf16": 7, "clipped": 0}


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_the_callback_gives_the_numbers_of_ddp(told, kind, way):
    told.check_way(kind, way, DEFERRED[kind])


def test_the_kinds_of_training_differ(told):
    told.check_kinds_differ(DEFERRED)


def warnings(told, case) -> list[int]:
    return sorted(sum("as clipping does" in line for line in rank["warnings"]) for rank in told[case])


def test_the_trainer_clips_by_default_and_that_takes_the_overlap(told):
    (default,) = (each.default for each in dataclasses.fields(transformers.TrainingArguments) if each.name == NORM)
    assert default == 1.0
    assert warnings(told, "clipped overlap") == [0, 1]


def test_clipping_inside_gives_the_same_numbers_and_leaves_the_updates_to_forward(told):
    assert told.digests("clipped inside") == told.digests("clipped stock")
    assert [rank["deferred"] for rank in told["clipped inside"]] == [7, 7]
    assert warnings(told, "clipped inside") == [0, 0]


def test_without_the_callback_the_norm_for_the_log_takes_the_overlap(told):
    """Why AttachCallback leaves the norm out of the log; where this fails, the Trainer has learned to do without."""
    assert told.digests("norm in any case") == told.digests("plain stock")
    assert [rank["deferred"] for rank in told["norm in any case"]] == [0, 0]
    assert warnings(told, "norm in any case") == [0, 1]
    assert told["norm in any case"][0]["norm logged"]
    assert not told["plain overlap"][0]["norm logged"]
    assert told["plain hook"][0]["norm logged"]


def test_training_goes_on_from_a_checkpoint_that_was_written_while_gradients_travelled(told):
    assert told.digests("resumed overlap") == told.digests("resumed stock")
    # The second half has a warm-up of its own.
    assert [rank["deferred"] for rank in told["resumed overlap"]] == [7 + 2] * 2


@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_a_batch_size_is_found_by_trainings_that_are_out_of_memory(told, way):
    assert told.digests(f"batch size found {way}") == told.digests("batch size found stock")
    assert [rank["mode"] for rank in told[f"batch size found {way}"]] == [way] * 2
