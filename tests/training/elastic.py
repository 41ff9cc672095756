"""A training that torchrun starts again: python -m torch.distributed.run … elastic.py FOLDER MODE KILLED_STEP.

Writes a checkpoint with plan and profile every other step; in its first life rank 1 kills itself. Rank 0 tells at the
end how it went on.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed

import gradcast
from training import compare
from training.models import TASKS

STEPS = 16


def main(folder: Path, mode: str, killed_step: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, life = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    task = TASKS["plain"]
    module = task.module(seed=rank)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    handle = gradcast.attach(
        module,
        optimizer if mode == "overlap" else None,
        options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"),
    )
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["gradcast"])
        first = state["step"]
    policy_at_start = handle.plan.policy
    for number in range(first, STEPS):
        if (life, rank, number) == (0, 1, killed_step):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        task.loss(module, task.batch(rank, number)).backward()
        optimizer.step()
        if number % 2 and rank == 0:
            state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": number + 1}
            torch.save(state | {"gradcast": handle.state_dict()}, folder / "new.pt")
            os.replace(folder / "new.pt", path)
    handle.flush()
    if rank == 0:
        facts = {"life": life, "first": first, "policy": policy_at_start, "digest": compare.digest(module)}
        (folder / "facts.json").write_text(json.dumps(facts))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
