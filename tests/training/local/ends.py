"""Programs that end with local steps. Each tells what it got as one line of JSON."""

import json
import sys
import time

import gradcast
from training.local.reference import net, train
from training.local.test_rounds import sgd
from training.needs import torch


def attached(**options):
    module = net(0)
    optimizer = sgd(module)
    handle = gradcast.attach(module, optimizer, options=gradcast.Options(**options))
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
    module, optimizer, _, rank = attached(sync_every=4, outer_overlap=1)
    loop(8 if rank == 0 else 20, module, optimizer, rank)


def is_short():
    module, optimizer, _, rank = attached(sync_every=50)
    loop(3, module, optimizer, rank)


def is_damaged():
    module, optimizer, handle, rank = attached(sync_every=4)
    if rank == 1:
        handle._session._fragments.pieces[0][0].values[5] += 1e-3
    loop(20, module, optimizer, rank)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    programs = {each.__name__: each for each in (ends_earlier, is_short, is_damaged)}
    programs[sys.argv[1]]()
