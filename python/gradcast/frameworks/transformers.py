"""For the Trainer of Hugging Face: ``trainer.add_callback(AttachCallback(trainer))``."""

from typing import Any

from transformers import Trainer, TrainerCallback

import gradcast
from gradcast.training.handle import detach_left


class AttachCallback(TrainerCallback):
    """Attaches when training begins, checkpoint and optimizer restored, and detaches when it has ended. A training that
    ended with an error, as auto_find_batch_size tries them, is detached when the next one begins.

    ``trainer``: the one that it is added to. ``overlap``: gradients travel under the next forward pass too; otherwise
    hook mode. ``options``: as for ``gradcast.attach``. ``handle``: what that returned, None before.
    """

    def __init__(self, trainer: Trainer, overlap: bool = True, options: gradcast.Options | None = None) -> None:
        self.trainer, self.overlap, self.options = trainer, overlap, options
        self.handle: gradcast.Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The DDP module, which callbacks are not handed.
        optimizer = self.trainer.optimizer if self.overlap else None
        detach_left(self.trainer.model_wrapped)
        self.handle = gradcast.attach(self.trainer.model_wrapped, optimizer, options=self.options)
        # WORKAROUND(transformers 5.23, Trainer._get_grad_norm): also where it does not clip, the Trainer computes the
        # norm of all gradients in each step, for its log; every step would wait for all of them.
        if self.overlap and not args.max_grad_norm:
            self.trainer._get_grad_norm = lambda *args, **kwargs: None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.handle.detach()
        vars(self.trainer).pop("_get_grad_norm", None)
