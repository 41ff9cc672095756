"""For the Trainer of Hugging Face: ``trainer.add_callback(AttachCallback(trainer))``."""

from typing import Any

from transformers import Trainer, TrainerCallback

import gradcast
from gradcast.frameworks.accelerate import CLIP_CALLS, take_over
from gradcast.frameworks.clipping import ClipCalls, give_back, tell_scaler, with_clipping
from gradcast.training.attached_modules import detach_left


class AttachCallback(TrainerCallback):
    """Attaches when training begins, after checkpoint and optimizer are restored, and detaches when it ends. If it ends
    with an error, as attempts of auto_find_batch_size do, it is detached when the next training begins.

    ``trainer``: the Trainer that the callback is added to. ``overlap``: overlap mode, in which gradients also travel
    during the next forward pass; False for hook mode. In overlap mode gradcast also clips where the Trainer would
    (``max_grad_norm``); a step whose norm is logged waits. ``options``: as for ``gradcast.attach``. ``handle``: what
    ``attach`` returned, None before.
    """

    def __init__(self, trainer: Trainer, overlap: bool = True, options: gradcast.Options | None = None) -> None:
        self.trainer, self.overlap, self.options = trainer, overlap, options
        self.handle: gradcast.Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # model_wrapped is the DDP module, which callbacks do not get.
        optimizer = self.trainer.optimizer if self.overlap else None
        self._give_back()
        detach_left(self.trainer.model_wrapped)
        options = self._options(args) if self.overlap else self.options
        self.handle = gradcast.attach(self.trainer.model_wrapped, optimizer, options=options)
        if self.overlap:
            take_over(self.trainer.accelerator, ClipCalls(self.handle, options))
        # WORKAROUND(transformers 5.23, Trainer._get_grad_norm): even without clipping, the Trainer computes the norm of
        # all gradients in each step for its log, so every step would wait for all of them.
        if self.overlap and not args.max_grad_norm:
            self.trainer._get_grad_norm = lambda *args, **kwargs: None

    def _options(self, args: Any) -> gradcast.Options | None:
        """Those that were given, with the Trainer's clipping."""
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
