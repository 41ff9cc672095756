"""Programs that end with local steps. Each tells what it got as one line of JSON."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import gradcast
from training import compare
from training.inside import session_of
from training.local.reference import net, train
from training.local.test_rounds import sgd
from training.needs import torch


def attached(every, **local):
    module = net(0)
    optimizer = sgd(module)
    handle = gradcast.attach(module, optimizer, options=gradcast.Options(local=gradcast.LocalSteps(every, **local)))
    return module, optimizer, handle, torch.distributed.get_rank()


def loop(steps, module, optimizer, rank):
    start_s = time.monotonic()
    try:
        for step in range(steps):
            train(module, optimizer, rank, step)
    except gradcast.Error as error:
        print(json.dumps({"code": error.code, "message": str(error), "waited_s": time.monotonic() - start_s}))
        sys.stdout.flush()
        sys.exit(1)


def ends_earlier():
    module, optimizer, _, rank = attached(4, overlap=1)
    loop(8 if rank == 0 else 20, module, optimizer, rank)


def is_short():
    module, optimizer, _, rank = attached(50)
    loop(3, module, optimizer, rank)


def is_damaged():
    module, optimizer, handle, rank = attached(4)
    if rank == 1:
        session_of(handle).report.fragments.pieces[0][0].values[5] += 1e-3
    loop(20, module, optimizer, rank)


def restarts(folder, killed_step):
    """Started by torchrun. Each rank keeps its state of every step; in its first life rank 1 kills itself."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    module, optimizer, handle, rank = attached(6, overlap=2)
    parts = {"module": module, "optimizer": optimizer, "handle": handle}
    steps = [int(path.stem) for path in Path(folder).glob(f"{rank}/*.pt")]
    newest = torch.tensor(max(steps, default=0))
    torch.distributed.all_reduce(newest, op=torch.distributed.ReduceOp.MIN)
    first = int(newest)
    if first > 0:
        state = torch.load(Path(folder, str(rank), f"{first}.pt"))
        for name, part in parts.items():
            part.load_state_dict(state[name])
    Path(folder, str(rank)).mkdir(exist_ok=True)
    for step in range(first, 21):
        if (life, rank, step) == (0, 1, int(killed_step)):
            os.kill(os.getpid(), signal.SIGKILL)
        train(module, optimizer, rank, step)
        path = Path(folder, str(rank), f"{step + 1}.pt")
        torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}.new")
        os.replace(f"{path}.new", path)
    handle.end_round()
    if rank == 0:
        print(json.dumps({"life": life, "first": first, "digest": compare.digest(module)}))
    handle.detach()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    programs = {each.__name__: each for each in (ends_earlier, is_short, is_damaged, restarts)}
    programs[sys.argv[1]](*sys.argv[2:])
