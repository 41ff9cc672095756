"""Under the Trainer of Hugging Face, every way of sending the gradients ends where its own DDP ends, bit for bit."""

import dataclasses

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
pytest.importorskip("accelerate", reason="the Trainer needs Accelerate, which is not installed: pip install accelerate")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

MODULE = "frameworks.trainer_cases"
NORM, CLIPPED_NORM = "max_grad_norm", 0.55  # that of the cases
# Of 10 steps, 3 of which are the warm-up's; an evaluation follows the last one. The norms of two are logged.
DEFERRED = {"plain": 7, "accumulated": 7, "bf16": 7, "clipped": 7 - 2}


@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_the_callback_gives_the_numbers_of_ddp(told, kind, way):
    told.check_way(kind, way, DEFERRED[kind])


def test_the_kinds_of_training_differ(told):
    told.check_kinds_differ(DEFERRED)


def use_gradients(told, case) -> list[bool]:
    """By rank: whether something uses gradients between backward and step()."""
    return ["uses gradients between backward and step()" in rank["waits"] for rank in told[case]]


def test_the_trainers_clipping_is_taken_over_and_the_norm_is_logged(told):
    """It clips by default. A norm is read where it is logged, so the step waits there, and nowhere else."""
    (default,) = (each.default for each in dataclasses.fields(transformers.TrainingArguments) if each.name == NORM)
    assert default == 1.0
    norms = told["clipped stock"][0]["norms"]
    assert min(norms) < CLIPPED_NORM < max(norms)
    for case in ("clipped overlap", "set twice"):
        assert told.digests(case) == told.digests("clipped stock")
        assert told[case][0]["norms"] == norms
        assert [rank["deferred"] for rank in told[case]] == [5, 5]
        assert use_gradients(told, case) == [False, False]


def test_steps_that_need_no_clipping_are_certified(told):
    assert told.digests("certified") == told.digests("plain stock")
    assert told["certified"][0]["norms"] == told["plain stock"][0]["norms"]
    assert [rank["clipping"]["certified_share"] for rank in told["certified"]] == [1.0, 1.0]


def test_settings_that_disagree_are_refused(told):
    for rank in told["disagreeing"]:
        assert "TrainingArguments have max_grad_norm=1.1" in rank["refused"]
        assert "Clip(norm=0.55)" in rank["refused"]
        assert rank["steps"] == 0


def test_clipping_inside_gives_the_same_numbers_and_leaves_the_updates_to_forward(told):
    assert told.digests("clipped inside") == told.digests("clipped stock")
    assert [rank["deferred"] for rank in told["clipped inside"]] == [7, 7]
    assert use_gradients(told, "clipped inside") == [False, False]


def test_without_the_callback_the_norm_for_the_log_takes_the_overlap(told):
    """Why AttachCallback leaves the norm out of the log; where this fails, the Trainer has learned to do without."""
    assert told.digests("norm in any case") == told.digests("plain stock")
    assert [rank["deferred"] for rank in told["norm in any case"]] == [0, 0]
    assert use_gradients(told, "norm in any case") == [True, True]
    norms = told["plain stock"][0]["norms"]
    assert told["norm in any case"][0]["norms"] == told["plain hook"][0]["norms"] == norms
    assert set(told["plain overlap"][0]["norms"]) == {None}


def test_training_goes_on_from_a_checkpoint_that_was_written_while_gradients_travelled(told):
    assert told.digests("resumed overlap") == told.digests("resumed stock")
    # The second half has a warm-up of its own.
    assert [rank["deferred"] for rank in told["resumed overlap"]] == [7 + 2] * 2


@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_a_batch_size_is_found_by_trainings_that_are_out_of_memory(told, way):
    assert told.digests(f"batch size found {way}") == told.digests("batch size found stock")
    assert [rank["mode"] for rank in told[f"batch size found {way}"]] == [way] * 2


@pytest.mark.parametrize(("mode", "step"), [("overlap", 6), ("hook", 4)])
def test_training_goes_on_from_a_snapshot_with_the_bits_of_one_that_was_not_interrupted(told, mode, step):
    assert told.digests(f"interrupted in {mode} mode") == told.digests("plain stock")
    assert [rank["found"] for rank in told[f"interrupted in {mode} mode"]] == [f"step-{step}/trainer"] * 2


@pytest.mark.parametrize("way", ["hook", "overlap"])
def test_another_trainer_goes_on_with_the_model_of_one_that_is_kept(told, way):
    assert len(told.digests("in stages stock")) == 1
    assert told.digests(f"in stages {way}") == told.digests("in stages stock")
    assert [rank["mode"] for rank in told[f"in stages {way}"]] == [way] * 2
