"""A training that resumes from its snapshots, started by launch() on every rank, and killed by tests.

With DIES_AT in its environment, torchrun's first attempt kills itself behind that step. Each step appends a line to
``log-RANK``: the step, the samples that the loop was handed, and the bits of the loss.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import gradcast

SAMPLES, FEATURES, BATCH = 120, 8, 2


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 1))


def dataset() -> list[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(index, torch.randn(FEATURES, generator=generator)) for index in range(SAMPLES)]


def digest(state: dict) -> str:
    """A hash of the state's tensors. ``state``: "model" by name, "optimizer" by name of the parameter and key."""
    found = hashlib.sha256()
    for name, value in sorted(state["model"].items()):
        found.update(name.encode() + value.detach().numpy().tobytes())
    for name, entry in sorted(state["optimizer"].items()):
        for key, value in sorted(entry.items()):
            found.update(f"{name}.{key}".encode() + value.numpy().tobytes())
    return found.hexdigest()


def train(
    folder: Path, *, steps: int, mode: str, every: int, log: Path | None, waits: bool, digests: dict | None = None
) -> dict:
    """Returns the statistics of the snapshots. ``waits``: for each to be written, so that none is taken later.
    ``digests``: gets that of each step's state."""
    module, data = model(), dataset()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    sampler = gradcast.ResumableSampler(data)
    loader = gradcast.ResumableLoader(DataLoader(data, BATCH, sampler=sampler, drop_last=True, num_workers=0))
    extra = {"scheduler": scheduler}
    step = gradcast.resume(folder, module, optimizer, loader, extra) or 0 if mode != "local" else None
    # Blocks of a few elements, so that a forward pass waits for updates one after the other.
    small = {"policy": "p3", "policy_parameters": {"slice_elements": 150}}
    options = gradcast.Options(plan=gradcast.Planning(warmup_steps=3, adapt=False, **small))
    if mode == "local":
        options = gradcast.Options(local=gradcast.LocalSteps(5, overlap=2))
    handle = gradcast.attach(module, None if mode == "hook" else optimizer, options=options)
    if step is None:
        step = gradcast.resume(folder, module, optimizer, loader, extra) or 0
    parts = 0

    def count(names: list[str], _: list[nn.Parameter]) -> None:
        nonlocal parts
        parts += bool(taking._taken is not None and taking._taken.awaiting and names)

    handle.on_update(count)
    taking = handle.snapshots(folder, every=every, loader=loader, extra=extra, optimizer=optimizer)
    while step < steps:
        for ids, batch in loader:
            loss = module(batch).square().mean()
            if log is not None:
                line = json.dumps([step + 1, ids.tolist(), loss.item().hex()]) + "\n"
                with log.open("a") as file:
                    file.write(line)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step == int(os.environ.get("DIES_AT", -1)) and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if digests is not None:
                names = {id(parameter): name for name, parameter in module.named_parameters()}
                entries = {names[id(parameter)]: dict(entry) for parameter, entry in optimizer.state.items()}
                digests[step] = digest({"model": module.state_dict(), "optimizer": entries})
            if waits:
                taking.wait()
            else:
                time.sleep(0.004)
            if step >= steps:
                break
    assert handle.stats()["snapshots"].keys() == taking.stats().keys()
    handle.detach()  # takes the snapshot of the last step, if it is due
    return taking.stats() | {"parts": parts}


def main() -> None:
    _, folder, log, steps, mode, every, waits = sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    log = Path(log, f"log-{os.environ['RANK']}")
    told = train(Path(folder), steps=int(steps), mode=mode, every=int(every), log=log, waits=waits == "waits")
    print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
