"""Trainings with the Trainer of Hugging Face, all of the same small GPT-2: python -m frameworks.trainer_cases FOLDER"""

import contextlib
import functools
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, logging
from transformers.trainer_callback import PrinterCallback

import gradcast
from frameworks.watch import WARMUP_STEPS, Watch, cases_of, options, run
from gradcast.frameworks.transformers import AttachCallback

STEPS, BATCH = 10, 2
CLIPPED_NORM, LARGE_NORM = 0.55, 1.2  # some steps are clipped, others not; no step is clipped


class Steps(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_optimizer_step(self, *_, **__) -> None:
        self.watch.after_step()

    def on_log(self, args, state, control, logs, **_) -> None:
        if "loss" in logs:
            self.watch.notes.setdefault("norms", []).append(logs.get("grad_norm"))


class OutOfMemoryOnce(TrainerCallback):
    """On every rank."""

    failed = False

    def on_step_end(self, args, state, control, **_) -> None:
        if not self.failed and state.global_step == WARMUP_STEPS + 2:
            self.failed = True
            raise RuntimeError("CUDA out of memory.")


class PlainAttach(TrainerCallback):
    """What a user would write who does not know that the Trainer computes the norm of the gradients in any case."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_, **__) -> None:
        self.handle = gradcast.attach(self.trainer.model_wrapped, self.trainer.optimizer, options=options())

    def on_train_end(self, *_, **__) -> None:
        self.handle.detach()


def make_model() -> GPT2LMHeadModel:
    """Its dropout is left on: gradcast must not draw from the random numbers of the training."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def train(watch: Watch, *, attach=None, **arguments) -> GPT2LMHeadModel:
    with tempfile.TemporaryDirectory() as folder:
        return fit(watch, folder, attach, save_strategy="no", **arguments)


def resumed(watch: Watch, *, attach=None) -> GPT2LMHeadModel:
    """Trains to the end with a checkpoint in the middle, then goes on from that with a new model in a new Trainer."""
    folder = str(Path(sys.argv[1]) / ("stock" if attach is None else "attached"))  # of both ranks
    fit(watch, folder, attach, save_steps=STEPS // 2, max_grad_norm=0.0)
    checkpoint = f"{folder}/checkpoint-{STEPS // 2}"
    return fit(watch, folder, attach, resume=checkpoint, save_strategy="no", max_grad_norm=0.0)


class FailsAt(TrainerCallback):
    """On every rank, when the last snapshot is complete."""

    def __init__(self, attach: AttachCallback, step: int) -> None:
        self.attach, self.step = attach, step

    def on_step_end(self, args, state, control, **_) -> None:
        self.attach.handle._snapshots.wait()
        if state.global_step == self.step:
            raise NoMoreDataError


class NoMoreDataError(Exception):
    pass


def interrupted(watch: Watch, *, overlap: bool, step: int) -> GPT2LMHeadModel:
    """A training that fails behind this step, and another one that goes on from its snapshot."""
    snapshots = Path(sys.argv[1]) / f"snapshots {overlap} {step}"
    made: list[AttachCallback] = []

    def attach(trainer: Trainer) -> AttachCallback:
        made.append(AttachCallback(trainer, overlap, options(), snapshots=snapshots, every=2))
        if len(made) == 1:
            trainer.add_callback(FailsAt(made[0], step))
        return made[-1]

    more = {"save_strategy": "no", "max_grad_norm": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(NoMoreDataError):
            fit(watch, folder, attach, **more)
        torch.manual_seed(9)
        return fit(watch, folder, attach, resume="snapshot", **more)


def in_stages(watch: Watch, *, attach=None) -> GPT2LMHeadModel:
    """Two Trainers of one model, of which the first, with its DDP module, is kept while the second trains."""
    model, trainers = make_model(), []
    for transformer_learns in (False, True):
        model.transformer.h.requires_grad_(transformer_learns)
        with tempfile.TemporaryDirectory() as folder:
            fit(watch, folder, attach, model=model, keep=trainers, save_strategy="no", max_grad_norm=0.0)
    return model


def fit(
    watch: Watch, folder: str, attach, resume: str | None = None, fails=False, model=None, keep=None, **arguments
) -> GPT2LMHeadModel:
    model = watch.of(model or make_model())
    texts = torch.randint(32, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    settings = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        logging_steps=3,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    trainer = Trainer(model, settings, train_dataset=data, eval_dataset=data[:8], callbacks=[Steps(watch)])
    trainer.remove_callback(PrinterCallback)  # standard output is the test's
    if fails:
        trainer.add_callback(OutOfMemoryOnce())
    if attach is not None:
        trainer.add_callback(callback := attach(trainer))
    if resume == "snapshot":
        resume = callback.checkpoint()
        watch.notes["found"] = "/".join(Path(resume).parts[-3::2])
    trainer.train(resume_from_checkpoint=resume)
    if keep is not None:
        keep.append(trainer)
    if attach is not None:
        watch.end(callback.handle)
        assert "_get_grad_norm" not in vars(trainer)
        assert "clip_grad_norm_" not in vars(trainer.accelerator)
    return model


WAYS = {
    "stock": None,
    "hook": functools.partial(AttachCallback, overlap=False, options=options()),
    "overlap": functools.partial(AttachCallback, options=options()),
}
KINDS = {
    "plain": {"max_grad_norm": 0.0},
    "accumulated": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2},
    "clipped": {"max_grad_norm": CLIPPED_NORM},
    "bf16": {"max_grad_norm": 0.0, "bf16": True},
}
CLIPPING = functools.partial(AttachCallback, options=options(clip=gradcast.Clip(CLIPPED_NORM)))


def disagreeing(watch: Watch) -> GPT2LMHeadModel:
    """Norms in the options and in the arguments."""
    try:
        return train(watch, attach=CLIPPING, max_grad_norm=2 * CLIPPED_NORM)
    except gradcast.Error as error:
        watch.notes["refused"] = str(error)
        return torch.nn.Linear(1, 1)


UNCLIPPED = {"max_grad_norm": 0.0}
CASES = (
    cases_of(train, KINDS, WAYS)
    | cases_of(train, {"batch size found": {"fails": True, "auto_find_batch_size": True, **UNCLIPPED}}, WAYS)
    | {
        "clipped inside": functools.partial(train, attach=CLIPPING, **UNCLIPPED),
        "set twice": functools.partial(train, attach=CLIPPING, max_grad_norm=CLIPPED_NORM),
        "certified": functools.partial(train, attach=WAYS["overlap"], max_grad_norm=LARGE_NORM),
        "disagreeing": disagreeing,
        "resumed stock": resumed,
        "resumed overlap": functools.partial(resumed, attach=WAYS["overlap"]),
        "in stages stock": in_stages,
        "in stages hook": functools.partial(in_stages, attach=WAYS["hook"]),
        "in stages overlap": functools.partial(in_stages, attach=WAYS["overlap"]),
        "interrupted in overlap mode": functools.partial(interrupted, overlap=True, step=7),
        "interrupted in hook mode": functools.partial(interrupted, overlap=False, step=5),
        "norm in any case": functools.partial(train, attach=PlainAttach, **UNCLIPPED),
    }
)

if __name__ == "__main__":
    logging.set_verbosity_error()
    run(CASES)
