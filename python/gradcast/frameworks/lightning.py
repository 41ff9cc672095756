"""For Lightning: ``Trainer(strategy="ddp", callbacks=[AttachCallback()])``."""

import logging

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

import gradcast
from gradcast.frameworks.clipping import ClipCalls, give_back, replace, tell_scaler, with_clipping
from gradcast.training.attached_modules import detach_left

_log = logging.getLogger("gradcast")
# After an error of all ranks, gradients in flight arrive soon; after an error of this rank alone they never do.
_AFTER_ERROR_S = 10.0


class AttachCallback(Callback):
    """Attaches when the fit begins, after checkpoint and optimizers are restored, and detaches when it ends or fails.

    ``overlap``: overlap mode, in which gradients also travel during the next forward pass; False for hook mode. In
    overlap mode gradcast also clips where Lightning would (``gradient_clip_val``). ``options``: as for
    ``gradcast.attach``. ``handle``: what ``attach`` returned, None before.
    """

    def __init__(self, overlap: bool = True, options: gradcast.Options | None = None) -> None:
        self.overlap, self.options = overlap, options
        self.handle: gradcast.Handle | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers if self.overlap else None
        detach_left(trainer.strategy.model)
        options = self._options(trainer) if self.overlap else self.options
        self.handle = gradcast.attach(trainer.strategy.model, optimizers, options=options)
        if self.overlap:
            _take_over(trainer.precision_plugin, ClipCalls(self.handle, options))

    def _options(self, trainer: Trainer) -> gradcast.Options | None:
        """Those that were given, with Lightning's clipping."""
        limit = trainer.gradient_clip_val
        setting = f"Trainer has gradient_clip_val={limit}"
        if not limit:
            return self.options
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            if trainer.is_global_zero:
                tell_scaler(setting)
            return self.options
        kind = "value" if trainer.gradient_clip_algorithm == "value" else "norm"
        return with_clipping(self.options, f"{setting} by {kind}", **{kind: float(limit)})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        give_back(trainer.precision_plugin, *_CLIP_CALLS)
        self.handle.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.handle is None:
            return
        give_back(trainer.precision_plugin, *_CLIP_CALLS)
        try:
            self.handle.detach(wait_s=_AFTER_ERROR_S)
        except gradcast.Error as error:
            _log.error("after the error of the fit: %s", error)


_CLIP_CALLS = ("clip_grad_by_norm", "clip_grad_by_value")


def _take_over(plugin: Precision, calls: ClipCalls) -> None:
    """From now on ``calls`` are what Lightning's clipping leads to."""
    by_norm, by_value = (getattr(plugin, name) for name in _CLIP_CALLS)

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        calls.norm(lambda: by_norm(optimizer, clip_val), plugin.main_params(optimizer), clip_val)

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        calls.value(lambda: by_value(optimizer, clip_val), plugin.main_params(optimizer), clip_val)

    replace(plugin, clip_grad_by_norm=clip_grad_by_norm, clip_grad_by_value=clip_grad_by_value)
