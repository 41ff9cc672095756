"""For Lightning: ``Trainer(strategy="ddp", callbacks=[AttachCallback()])``."""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

import gradcast
from gradcast.training.attached_modules import detach_left

_log = logging.getLogger("gradcast")
# After an error of all ranks, gradients in flight arrive soon; after an error of this rank alone they never do.
_AFTER_ERROR_S = 10.0


class AttachCallback(Callback):
    """Attaches when the fit begins, after checkpoint and optimizers are restored, and detaches when it ends or fails.

    ``overlap``: overlap mode, in which gradients also travel during the next forward pass; False for hook mode.
    ``options``: as for ``gradcast.attach``. ``handle``: what ``attach`` returned, None before.
    """

    def __init__(self, overlap: bool = True, options: gradcast.Options | None = None) -> None:
        self.overlap, self.options = overlap, options
        self.handle: gradcast.Handle | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers if self.overlap else None
        detach_left(trainer.strategy.model)
        self.handle = gradcast.attach(trainer.strategy.model, optimizers, options=self.options)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.handle.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.handle is None:
            return
        try:
            self.handle.detach(wait_s=_AFTER_ERROR_S)
        except gradcast.Error as error:
            _log.error("after the error of the fit: %s", error)
