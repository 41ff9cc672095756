"""Trainings with Lightning, all of the same small model: python -m frameworks.lightning_cases FOLDER"""

import contextlib
import functools
import logging
import sys
import warnings
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import gradcast
import gradcast.frameworks.fabric as gradcast_fabric
from frameworks.watch import BATCH, BATCHES, EPOCHS, Watch, cases_of, options, run, small_data, small_model
from gradcast.frameworks.lightning import AttachCallback

CLIPPED_NORM = 0.7  # some steps are clipped, others not


class Net(LightningModule):
    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch, index: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index: int) -> None:
        self.log("validation", cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Watching(Callback):
    """Tells the watch of steps, and of the names of the hooks on the DDP module."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_start(self, trainer, module) -> None:
        self.watch.notes["hooks"] = [hook.__name__ for hook, _ in trainer.strategy.model._comm_hooks]

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.watch.after_step()


class HooksOnAnyDevice(DDPStrategy):
    """Lightning registers the strategy's hook on CUDA alone. This is what it does there."""

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


class NoMoreDataError(Exception):
    pass


class FailsAt(Callback):
    """On every rank; with snapshots, when the last one is complete. A second callback takes nothing."""

    def __init__(self, attach: AttachCallback | None, step: int) -> None:
        self.attach, self.step = attach, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx: int) -> None:
        if self.attach is not None:
            self.attach.handle._snapshots.wait()
        if trainer.global_step == self.step:
            raise NoMoreDataError


def train(
    watch: Watch, *, strategy=DDPStrategy, hook=False, attach: AttachCallback | None = None, manual=False, **more
) -> Net:
    module = Net(manual)
    hooks = {"ddp_comm_hook": gradcast.comm_hook, "ddp_comm_state": gradcast.HookState()} if hook else {}
    fit(watch, module, strategy(process_group_backend="gloo", **hooks), attach, **more)
    return module


def resumed(watch: Watch, *, attach: AttachCallback | None = None) -> Net:
    """Trains to the end with a checkpoint in the middle, then goes on from that with a new model in a new Trainer."""
    folder = Path(sys.argv[1]) / ("stock" if attach is None else "attached")  # of both ranks
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=BATCHES, save_top_k=-1)
    fit(watch, Net(manual=False), DDPStrategy(process_group_backend="gloo"), attach, keep)
    module = Net(manual=False)
    strategy = DDPStrategy(process_group_backend="gloo")
    fit(watch, module, strategy, attach, resume=folder / f"step={BATCHES}.ckpt")
    return module


def fitted_again(watch: Watch, *, attach: AttachCallback | None = None) -> Net:
    """The same module after a fit that has raised."""
    module = Net(manual=False)
    with contextlib.suppress(NoMoreDataError):
        fit(watch, module, DDPStrategy(process_group_backend="gloo"), attach, FailsAt(None, BATCHES - 1))
    fit(watch, module, DDPStrategy(process_group_backend="gloo"), attach)
    return module


def counted_loader() -> gradcast.ResumableLoader:
    data = small_data(BATCHES)
    return gradcast.ResumableLoader(DataLoader(data, BATCH, sampler=gradcast.ResumableSampler(data)))


class StatefulLoader(DataLoader):
    """As torchdata's."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def stateful(watch: Watch, *, snapshots: bool) -> Net:
    module, folder = Net(manual=False), Path(sys.argv[1]) / "stateful"
    attach = AttachCallback(options=options(), snapshots=folder if snapshots else None)
    try:
        loader = StatefulLoader(small_data(BATCHES), BATCH)
        fit(watch, module, DDPStrategy(process_group_backend="gloo"), attach, loader=loader)
    except gradcast.Error as error:
        watch.notes["refused"] = str(error)
    return module


def uninterrupted(watch: Watch) -> Net:
    module = Net(manual=False)
    fit(watch, module, DDPStrategy(process_group_backend="gloo"), None, loader=counted_loader())
    return module


def interrupted(watch: Watch, *, overlap: bool, step: int) -> Net:
    """A training that fails behind this step, and another one that goes on from its snapshot."""
    more = {"overlap": overlap, "options": options(), "snapshots": Path(sys.argv[1]) / f"{overlap} {step}", "every": 2}
    first, second = AttachCallback(**more), AttachCallback(**more)
    assert first.checkpoint() is None
    with contextlib.suppress(NoMoreDataError):
        gloo = DDPStrategy(process_group_backend="gloo")
        fit(watch, Net(manual=False), gloo, first, FailsAt(first, step), loader=counted_loader())
    torch.manual_seed(9)
    module, found = Net(manual=False), second.checkpoint()
    watch.notes["found"] = f"{found.parent.parent.name}/{found.name}"
    gloo = DDPStrategy(process_group_backend="gloo")
    try:
        fit(watch, module, gloo, second, loader=counted_loader())
    except gradcast.Error as error:
        watch.notes["refused"] = str(error)
    third = AttachCallback(**more)
    gloo = DDPStrategy(process_group_backend="gloo")
    fit(watch, module, gloo, third, resume=third.checkpoint(), loader=counted_loader())
    return module


def fit(watch, module, strategy, attach, other: Callback | None = None, resume=None, loader=None, **more):
    data = small_data(EPOCHS * BATCHES)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=EPOCHS,
        limit_train_batches=BATCHES,
        limit_val_batches=1,
        callbacks=[Watching(watch), *filter(None, [attach, other])],
        logger=False,
        enable_checkpointing=isinstance(other, ModelCheckpoint),
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    loader = loader or DataLoader(data, BATCH, shuffle=True)
    trainer.fit(watch.of(module), loader, DataLoader(data, BATCH), ckpt_path=resume)
    if attach is not None:
        watch.end(attach.handle)
        assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)


def callback(overlap: bool) -> AttachCallback:
    return AttachCallback(overlap=overlap, options=options())


def with_fabric(watch: Watch, *, gradcast_clips=False, **clip) -> torch.nn.Module:
    """The loop of Fabric's documentation. ``clip``: what ``clip_gradients`` is called with."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricDDP(process_group_backend="gloo"))
    fabric.launch()
    module = small_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    model, optimizer = fabric.setup(watch.of(module), optimizer)
    loader = fabric.setup_dataloaders(DataLoader(small_data(BATCHES), BATCH))
    if gradcast_clips:
        limit = gradcast.Clip(norm=clip.get("max_norm"), value=clip.get("clip_val"))
        handle = gradcast_fabric.attach(fabric, model, optimizer, options=options(clip=limit))
    norms = []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(cross_entropy(model(inputs), targets))
            norms.append(fabric.clip_gradients(model, optimizer, **clip))
            optimizer.step()
            watch.after_step()
    if gradcast_clips:
        handle.detach()
    watch.notes["norms"] = [norm if norm is None else float(norm) for norm in norms]
    return module


CLIP = gradcast.Clip(CLIPPED_NORM)
FABRIC = {
    f"fabric {kind} {who}": functools.partial(with_fabric, gradcast_clips=who == "taken over", **clip)
    for kind, clip in {"norm": {"max_norm": CLIPPED_NORM}, "value": {"clip_val": 0.01}}.items()
    for who in ("stock", "taken over")
}
KINDS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": CLIPPED_NORM},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "manual": {"manual": True},
}
CASES = cases_of(train, KINDS, {"stock": None, "hook": callback(False), "overlap": callback(True)}) | {
    "strategy": functools.partial(train, strategy=HooksOnAnyDevice, hook=True),
    "strategy on cpu": functools.partial(train, hook=True),
    "resumed stock": resumed,
    "resumed overlap": functools.partial(resumed, attach=callback(True)),
    "uninterrupted": uninterrupted,
    "interrupted in overlap mode": functools.partial(interrupted, overlap=True, step=9),
    "interrupted in hook mode": functools.partial(interrupted, overlap=False, step=5),
    "interrupted between epochs": functools.partial(interrupted, overlap=True, step=7),
    "stateful loader": functools.partial(stateful, snapshots=False),
    "stateful loader with snapshots": functools.partial(stateful, snapshots=True),
    "again stock": fitted_again,
    "again hook": functools.partial(fitted_again, attach=callback(False)),
    "again overlap": functools.partial(fitted_again, attach=callback(True)),
    "clipped inside": functools.partial(train, attach=AttachCallback(options=options(clip=CLIP))),
}
CASES |= FABRIC

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    run(CASES)
