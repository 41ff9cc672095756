"""For Lightning: ``Trainer(strategy="ddp", callbacks=[AttachCallback()])``."""

from lightning.pytorch import Callback, LightningModule, Trainer

import gradcast


class AttachCallback(Callback):
    """Attaches when the fit begins, checkpoint and optimizers restored, and detaches when it has ended.

    ``overlap``: gradients travel under the next forward pass too; otherwise hook mode. ``options``: as for
    ``gradcast.attach``. ``handle``: what that returned, None before.
    """

    def __init__(self, overlap: bool = True, options: gradcast.Options | None = None) -> None:
        self.overlap, self.options = overlap, options
        self.handle: gradcast.Handle | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers if self.overlap else None
        self.handle = gradcast.attach(trainer.strategy.model, optimizers, options=self.options)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.handle.detach()
