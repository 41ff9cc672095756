"""Trains a small GPT-2 with the Trainer of Hugging Face on the text of char_gpt.py: with DDP, or with gradcast.

    torchrun --nproc-per-node 2 examples/trainer_gpt.py --gradcast off       # the Trainer's DDP as it is
    torchrun --nproc-per-node 2 examples/trainer_gpt.py --gradcast hook      # the same semantics, better blocks
    torchrun --nproc-per-node 2 examples/trainer_gpt.py --gradcast overlap   # also under the next forward

With --clip 1.0, the Trainer's default, gradcast clips in overlap mode, with the Trainer's numbers. Nothing is
downloaded. Needs: pip install transformers accelerate. One process works too: python examples/trainer_gpt.py
"""

import argparse
import tempfile
import time
from typing import Any

import torch
from char_gpt import CONTEXT, load_text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, logging, set_seed
from transformers.trainer_callback import PrinterCallback

LOGGING_STEPS = 20


class Texts(torch.utils.data.Dataset):
    """The text in pieces that the model sees at once. It learns to predict each byte from those before it."""

    def __init__(self) -> None:
        text = load_text()
        self.pieces = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Teller(TrainerCallback):
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            step_ms = 1e3 * (time.perf_counter() - self.start) / LOGGING_STEPS
            print(f"step {state.global_step:4}: loss {logs['loss']:.3f}, {step_ms:.1f} ms per step", flush=True)
            self.start = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradcast", choices=["off", "hook", "overlap"], default="overlap")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="texts per process and step (default: 8)")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients (default: any)")
    args = parser.parse_args()

    logging.set_verbosity_error()
    set_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, use_cpu=True, max_steps=args.steps, per_device_train_batch_size=args.batch, learning_rate=1e-3,
            max_grad_norm=args.clip, logging_steps=LOGGING_STEPS, save_strategy="no", report_to=[],
            disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=Texts(), callbacks=[Teller])
        trainer.remove_callback(PrinterCallback)
        if args.gradcast != "off":
            from gradcast.frameworks.transformers import AttachCallback

            trainer.add_callback(AttachCallback(trainer, overlap=args.gradcast == "overlap"))
        trainer.train()


if __name__ == "__main__":
    main()
