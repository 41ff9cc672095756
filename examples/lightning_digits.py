"""Trains the CNN of digits.py with Lightning: with its own DDP, or with gradcast through a callback.

    torchrun --nproc-per-node 2 examples/lightning_digits.py --gradcast off       # strategy="ddp" as it is
    torchrun --nproc-per-node 2 examples/lightning_digits.py --gradcast hook      # the same semantics, better blocks
    torchrun --nproc-per-node 2 examples/lightning_digits.py --gradcast overlap   # also under the next forward

Needs: pip install lightning. One process works too: python examples/lightning_digits.py
"""

import argparse
import logging
import os
import time
import warnings

import torch
from digits import TEST_COUNT, load_data, make_model
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = make_model()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        self.start = time.perf_counter()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, targets = batch
        self.loss = cross_entropy(self(images), targets)
        return self.loss

    def on_validation_epoch_start(self) -> None:
        self.step_ms = 1e3 * (time.perf_counter() - self.start) / self.trainer.num_training_batches

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, targets = batch
        self.log("accuracy", (self(images).argmax(1) == targets).float().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            accuracy = self.trainer.callback_metrics["accuracy"].item()
            told = f"loss {self.loss.item():.4f}, accuracy {accuracy:.1%}, {self.step_ms:.1f} ms per step"
            print(f"epoch {self.current_epoch + 1:2}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradcast", choices=["off", "hook", "overlap"], default="overlap")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=50, help="images per process and step (default: 50)")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    # What Lightning says about workers of data loaders and about its other products.
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0)
    images, targets = load_data()
    training = TensorDataset(images[:-TEST_COUNT], targets[:-TEST_COUNT])
    test = TensorDataset(images[-TEST_COUNT:], targets[-TEST_COUNT:])

    callbacks = []
    if args.gradcast != "off":
        from gradcast.frameworks.lightning import AttachCallback

        callbacks.append(AttachCallback(overlap=args.gradcast == "overlap"))  # the one line

    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        accelerator="cpu", devices=local, num_nodes=world // local, strategy="ddp", callbacks=callbacks,
        max_epochs=args.epochs, num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loaders = (DataLoader(training, args.batch, shuffle=True, drop_last=True), DataLoader(test, TEST_COUNT))
    trainer.fit(Digits(args.lr), *loaders)


if __name__ == "__main__":
    main()
