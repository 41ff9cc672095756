"""The program of one process of the pool: python -m training.worker <pipe> <rank> <port of the store>."""

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

from training.needs import torch

PR_SET_PDEATHSIG = 1
# benchmarks/gpu_check.py asks for "cpu:gloo,cuda:nccl".
BACKEND = os.environ.get("GRADCAST_TEST_BACKEND", "gloo")


class Rank:
    """What a function on a rank is given."""

    def __init__(self, index: int, size: int, store) -> None:
        self.index = index
        self.size = size
        self.store = store

    def signal(self, name: str) -> None:
        """Lets every rank pass that waits for this name."""
        self.store.set(f"signal/{name}", "1")

    def wait_for(self, name: str) -> None:
        self.store.wait([f"signal/{name}"])

    def gather(self, name: str, value) -> list:
        """The value of each rank, on every rank; through the store, so that no collective of a test is disturbed."""
        self.store.set(f"gather/{name}/{self.index}", pickle.dumps(value))
        return [pickle.loads(self.store.get(f"gather/{name}/{rank}")) for rank in range(self.size)]


def run(call: tuple, index: int, root_store) -> object:
    number, world_size, module, function, arguments, wait_s = call
    timeout = timedelta(seconds=wait_s)
    store = torch.distributed.PrefixStore(f"call{number}", root_store)
    store.set_timeout(timeout)
    torch.distributed.init_process_group(BACKEND, store=store, rank=index, world_size=world_size, timeout=timeout)
    torch.manual_seed(1000 + index)
    gc.freeze()  # what is alive now lives on: looking through torch's objects for garbage takes 0.2 s
    target = getattr(importlib.import_module(module), function)
    target = getattr(target, "on_rank", target)  # of a test
    return target(Rank(index, world_size, torch.distributed.PrefixStore("test", store)), *arguments)


def end() -> list:
    """Ends the groups of a call, and frees what it has left. What it has raised is free by now.

    Returns the groups. Hold them until the next call has ended: a callback of torch's PowerSGD owns its group, may be
    dropped later, by a thread of that group, and a thread that waits for its own end aborts the process.
    """
    # WORKAROUND(torch 2.11, pytorch/pytorch#56297): held until garbage is collected. If a DDP is a group's last owner,
    # torch ends the group's threads with the GIL held, and waits forever for one that needs it to drop a Python
    # callback.
    groups = [*torch.distributed.distributed_c10d._world.pg_map]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    forget_meshes()
    gc.collect()
    return groups


def forget_meshes() -> None:
    """DTensors are planned once for all meshes of the same ranks, and so also with groups that are no more."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute

        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


def main(pipe_handle: int, index: int, port: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # those of threads that Python does not know, too
    torch.set_num_threads(1)
    if "nccl" in BACKEND:
        from benchmarks.gpu_ranks import as_a_host_of_its_own

        os.environ.update(as_a_host_of_its_own(index))
    pipe = Connection(pipe_handle)
    store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=120))
    ended: list = []  # groups
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = ("done", run(call, index, store))
        except BaseException:
            answer = ("failed", traceback.format_exc())
        try:
            ended[:] = end()  # frees those of the call before
        except BaseException:
            answer = ("failed", f"{answer}, then {traceback.format_exc()}")
        pipe.send(answer)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
