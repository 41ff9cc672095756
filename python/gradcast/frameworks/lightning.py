"""For Lightning: ``Trainer(strategy="ddp", callbacks=[AttachCallback()])``."""

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from torch.optim import Optimizer

import gradcast
from gradcast.errors import refused
from gradcast.frameworks.clipping import ClipCalls, give_back, replace, tell_scaler, with_clipping
from gradcast.frameworks.snapshots import FrameworkSnapshots, LoopState
from gradcast.snapshots.whole import Whole
from gradcast.training.attached_modules import detach_left

_log = logging.getLogger("gradcast")
# After an error of all ranks, gradients in flight arrive soon; after an error of this rank alone they never do.
_AFTER_ERROR_S = 10.0


class AttachCallback(Callback):
    """Attaches when the fit begins, after checkpoint and optimizers are restored, and detaches when it ends or fails.

    ``overlap``: overlap mode, in which gradients are also sent during the next forward pass; False for hook mode. In
    overlap mode gradcast also clips where Lightning would (``gradient_clip_val``). ``options``: as for
    ``gradcast.attach``. ``handle``: returned by ``attach``, None before.

    ``snapshots``: a folder that all ranks see, for snapshots of the training, from which ``Trainer.fit(...,
    ckpt_path=callback.checkpoint())`` resumes. ``snapshot_options``: arguments of ``handle.snapshots``.
    """

    def __init__(
        self,
        overlap: bool = True,
        options: gradcast.Options | None = None,
        snapshots: str | Path | None = None,
        **snapshot_options: Any,
    ) -> None:
        self.overlap, self.options = overlap, options
        self.handle: gradcast.Handle | None = None
        self._snapshots = FrameworkSnapshots(snapshots, snapshot_options)

    def checkpoint(self) -> Path | None:
        """The newest snapshot, as a checkpoint of Lightning's; None if there is none. Raises Error(invalid_use) if the
        snapshot lacks files, and OSError."""
        return self._snapshots.checkpoint("lightning.ckpt", _write_checkpoint)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers if self.overlap else None
        detach_left(trainer.strategy.model)
        options = self._options(trainer) if self.overlap else self.options
        self.handle = gradcast.attach(trainer.strategy.model, optimizers, options=options)
        if self.overlap:
            _take_over(trainer.precision_plugin, ClipCalls(self.handle, options))
        if self._snapshots.is_on:
            self._snapshots.take(
                self.handle,
                trainer.strategy.model,
                trainer.global_step,
                loader=_counted_loader(trainer),
                extra={"loop": LoopState(lambda: _loop_state(trainer))},
                optimizer=None if self.overlap else trainer.optimizers,
            )

    def _options(self, trainer: Trainer) -> gradcast.Options | None:
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


def _counted_loader(trainer: Trainer) -> gradcast.ResumableLoader | None:
    """The loader whose place is saved; None if none has a state. Raises Error(invalid_use) for one that has handed out
    the next step's batch when a snapshot is taken.
    """
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) == 1 and isinstance(loaders[0], gradcast.ResumableLoader):
        return loaders[0]
    if stateful := next((each for each in loaders if hasattr(each, "state_dict")), None):
        raise refused(
            f"snapshots cannot save the place of a {type(stateful).__name__} under Lightning, except of one "
            "gradcast.ResumableLoader; train on that alone"
        )
    return None


def _loop_state(trainer: Trainer) -> dict[str, Any]:
    """Lightning's checkpoint without model and optimizers. Lightning makes it with the same private functions."""
    checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "loops": trainer._checkpoint_connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    plugin = trainer.precision_plugin
    if state := plugin.state_dict():
        checkpoint[type(plugin).__qualname__] = state
    return {"steps": trainer.global_step, "checkpoint": checkpoint}


def _write_checkpoint(whole: Whole, place: Path) -> None:
    checkpoint = whole.extra["loop"]["checkpoint"]
    if whole.ranks[0]["loader"] is not None:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [whole.ranks[0]["loader"]]
    torch.save(checkpoint | {"state_dict": whole.model(), "optimizer_states": whole.optimizers()}, place)


_CLIP_CALLS = ("clip_grad_by_norm", "clip_grad_by_value")


def _take_over(plugin: Precision, calls: ClipCalls) -> None:
    """Redirects Lightning's clipping to ``calls``."""
    by_norm, by_value = (getattr(plugin, name) for name in _CLIP_CALLS)

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        calls.norm(lambda: by_norm(optimizer, clip_val), plugin.main_params(optimizer), clip_val)

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        calls.value(lambda: by_value(optimizer, clip_val), plugin.main_params(optimizer), clip_val)

    replace(plugin, clip_grad_by_norm=clip_grad_by_norm, clip_grad_by_value=clip_grad_by_value)
