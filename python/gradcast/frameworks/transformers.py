"""For the Trainer of Hugging Face: ``trainer.add_callback(AttachCallback(trainer))``."""

import dataclasses
import json
import weakref
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

import gradcast
from gradcast.frameworks.accelerate import CLIP_CALLS, take_over
from gradcast.frameworks.clipping import ClipCalls, give_back, tell_scaler, with_clipping
from gradcast.frameworks.snapshots import FrameworkSnapshots, LoopState
from gradcast.snapshots.whole import Whole
from gradcast.training.attach import attach_inside
from gradcast.training.attached_modules import detach_left
from gradcast.training.compat.wrappers import the_ddp

# A Trainer keeps its DDP module when its training has ended, also while another Trainer trains the same model.
_trained_before: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()


class AttachCallback(TrainerCallback):
    """Attaches when training begins, after checkpoint and optimizer are restored, and detaches when it ends. If it ends
    with an error, as attempts of auto_find_batch_size do, it is detached when the next training begins.

    ``trainer``: the Trainer that the callback is added to. ``overlap``: overlap mode, in which gradients are also sent
    during the next forward pass; False for hook mode. In overlap mode gradcast also clips where the Trainer would
    (``max_grad_norm``); a step whose norm is logged waits. ``options``: as for ``gradcast.attach``. ``handle``:
    returned by ``attach``, None before.

    ``snapshots``: a folder that all ranks see, for snapshots of the training, from which
    ``trainer.train(resume_from_checkpoint=callback.checkpoint())`` resumes. ``snapshot_options``: arguments of
    ``handle.snapshots``.
    """

    def __init__(
        self,
        trainer: Trainer,
        overlap: bool = True,
        options: gradcast.Options | None = None,
        snapshots: str | Path | None = None,
        **snapshot_options: Any,
    ) -> None:
        self.trainer, self.overlap, self.options = trainer, overlap, options
        self.handle: gradcast.Handle | None = None
        self._snapshots = FrameworkSnapshots(snapshots, snapshot_options)

    def checkpoint(self) -> str | None:
        """The newest snapshot, as a folder of a checkpoint of the Trainer; None if there is none. Raises
        Error(invalid_use) if the snapshot lacks files, and OSError."""
        place = self._snapshots.checkpoint("trainer", _write_checkpoint)
        return None if place is None else str(place)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # model_wrapped is the DDP module, which callbacks do not get.
        optimizer = self.trainer.optimizer if self.overlap else None
        self._give_back()
        detach_left(self.trainer.model_wrapped)
        options = self._options(args) if self.overlap else self.options
        ddp = the_ddp(self.trainer.model_wrapped)
        idle = [each for each in _trained_before if each is not ddp]
        self.handle = attach_inside(idle, self.trainer.model_wrapped, optimizer, None, options)
        if ddp is not None:
            _trained_before.add(ddp)
        if self.overlap:
            take_over(self.trainer.accelerator, ClipCalls(self.handle, options))
        # WORKAROUND(transformers 5.23, Trainer._get_grad_norm): even without clipping, the Trainer computes the norm of
        # all gradients in each step for its log, so every step would wait for all of them.
        if self.overlap and not args.max_grad_norm:
            self.trainer._get_grad_norm = lambda *args, **kwargs: None
        if self._snapshots.is_on:
            self._snapshots.take(
                self.handle,
                self.trainer.model_wrapped,
                state.global_step,
                extra={"loop": LoopState(lambda: _loop_state(self.trainer))},
                optimizer=None if self.overlap else self.trainer.optimizer,
            )

    def _options(self, args: Any) -> gradcast.Options | None:
        setting = f"TrainingArguments have max_grad_norm={args.max_grad_norm}"
        if not args.max_grad_norm:
            return self.options
        if getattr(self.trainer.accelerator, "scaler", None) is not None:
            if args.process_index == 0:
                tell_scaler(setting)
            return self.options
        return with_clipping(self.options, setting, norm=float(args.max_grad_norm))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._give_back()
        self.handle.detach()

    def _give_back(self) -> None:
        give_back(self.trainer.accelerator, *CLIP_CALLS)
        give_back(self.trainer, "_get_grad_norm")


def _loop_state(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's checkpoint without model, optimizer and random states."""
    state = dataclasses.asdict(trainer.state)
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    state["stateful_callbacks"] = {type(e).__name__: e.state() for e in callbacks if isinstance(e, ExportableState)}
    scaler = getattr(trainer.accelerator, "scaler", None)
    own = {"state": state, "scheduler": trainer.lr_scheduler.state_dict(), "scaler": scaler and scaler.state_dict()}
    return own | {"steps": trainer.state.global_step}


def _write_checkpoint(whole: Whole, place: Path) -> None:
    place.mkdir(exist_ok=True)
    loop = whole.extra["loop"]
    save_file(whole.model(), place / "model.safetensors", metadata={"format": "pt"})
    torch.save(whole.optimizers()[0], place / "optimizer.pt")
    torch.save(loop["scheduler"], place / "scheduler.pt")
    if loop["scaler"] is not None:
        torch.save(loop["scaler"], place / "scaler.pt")
    (place / "trainer_state.json").write_text(json.dumps(loop["state"]))
