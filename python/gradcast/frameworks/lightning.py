"""For Lightning: ``Trainer(strategy="ddp", callbacks=[AttachCallback()])``."""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

import gradcast
from gradcast.training.handle import detach_left

_log = logging.getLogger("gradcast")
# What is in flight arrives at once where all ranks have met the error, and never where only this one has.
_AFTER_ERROR_S = 10.0


class AttachCallback(Callback):
    """Attaches when the fit begins, checkpoint and optimizers restored, and detaches when it has ended, also with an
    error.

    ``overlap``: gradients travel under the next forward pass too; otherwise hook mode. ``options``: as for
    ``gradcast.attach``. ``handle``: what that returned, None before.
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
