"""Programs of one rank for test_ends.py, each of which ends right after an operation while Gloo's threads are late (see
ends_late.cc): python -m training.ends_programs <name>.
"""

import atexit
import ctypes
import os

# Keeps the GIL, unlike CDLL, and is called last since it is registered first: no thread gets it before Python ends.
LATE = ctypes.PyDLL(None)
RANK = int(os.environ["RANK"])
if RANK == 0:
    atexit.register(LATE.end_late, 1000)

import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from datetime import timedelta  # noqa: E402

import torch  # noqa: E402

# Its functions keep, as a default argument, the process group that there is when it is imported, which DDP does.
import torch.distributed.nn.functional  # noqa: E402
from torch import distributed, nn  # noqa: E402

from training.threads import threads_named  # noqa: E402


def tell_threads() -> None:
    """How many of Gloo's there are."""
    print(json.dumps({"threads": len(threads_named("pt_gloo"))}), flush=True)


# Called after what gradcast registers when it is imported.
atexit.register(tell_threads)

import gradcast  # noqa: E402
from gradcast.training.ranks.group import Group  # noqa: E402


def late() -> None:
    """From here on, and on rank 0 alone, which then waits for rank 1: what follows is ended by Gloo's thread."""
    distributed.barrier()
    if RANK == 0:
        LATE.be_late(1500)
    else:
        time.sleep(0.5)


def whole_group() -> Group:
    """Over the program's own process group, which gradcast does not end."""
    return Group(RANK, 2, distributed.group.WORLD, distributed.group.WORLD)


def plain() -> None:
    late()
    distributed.all_reduce(torch.ones(1000))


def gather() -> None:
    late()
    assert whole_group().gather(RANK) == [0, 1]


def from_first() -> None:
    late()
    assert whole_group().from_first(RANK) == 0


def copy_from_first() -> None:
    tensors = [torch.full((1000,), float(RANK)), torch.full((3, 5), float(RANK)), torch.full((2,), RANK)]
    late()
    whole_group().copy_from_first(tensors, "the tensors")
    assert not any(tensor.any() for tensor in tensors)


def collects() -> None:
    """DDP's reducer is the last owner of the group: it waits for Gloo's threads, and keeps the GIL meanwhile."""
    module = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
    module(torch.ones(2, 10)).sum().backward()
    tensors = [torch.full((1000,), float(RANK))]
    late()
    whole_group().copy_from_first(tensors, "the tensors")
    distributed.destroy_process_group()
    del module
    gc.collect()
    tell_threads()


def run_hook(state: gradcast.HookState) -> None:
    module = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
    module.register_comm_hook(state, gradcast.comm_hook)
    module(torch.ones(2, 10)).sum().backward()
    loss = module(torch.ones(2, 10)).sum()
    late()
    loss.backward()


def hook() -> None:
    """On the group that the hook makes for itself."""
    run_hook(gradcast.HookState())
    tell_threads()


KEPT = gradcast.HookState()


def hook_is_kept() -> None:
    """Its state outlives the DDP and every group."""
    run_hook(KEPT)
    distributed.destroy_process_group()


def step() -> None:
    """Neither detached nor destroyed afterwards."""
    module = nn.Linear(10, 10)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    gradcast.attach(module, sgd)
    late()
    module(torch.ones(2, 10)).sum().backward()
    sgd.step()
    tell_threads()


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    globals()[sys.argv[1]]()
