"""Device memory that is registered with NCCL's communicator before anything is sent from it.

NCCL then sends from where the bytes are, where its network and algorithm can (NVLink SHARP, InfiniBand SHARP), with
fewer thread blocks. NOT YET RUN ON A GPU.

It is no symmetric memory (``symm=True``). Registering that is collective, and torch does it inside of the allocation: a
rank that has no memory left would leave the others waiting in NCCL, and no rank could refuse. The kernels for it serve
ranks in one NVLink domain only, and sum in an order of their own, so the numbers would not be DDP's.

Thread safety: the training thread.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from gradcast.errors import first_line, refused
from gradcast.training.ranks.group import Group

# Inside what it returns, tensors are allocated in some memory.
Allocating = Callable[[], contextlib.AbstractContextManager[None]]


def registered_memory(group: Group) -> Allocating:
    """Memory of ``group.device``, registered with the communicator of ``group.own``. Collective.

    Raises Error(invalid_use), on every rank, if it cannot be made on one.
    """
    with group.together("registering memory with NCCL"):
        try:
            backend = _backend(group.own, group.device)
            pool = torch.cuda.MemPool(backend.mem_allocator)
            backend.register_mem_pool(pool)  # what is allocated in it from now on is registered at once
        except (RuntimeError, AttributeError) as error:
            raise refused(
                f"options.nccl.register_buffers asks for memory that NCCL knows beforehand, which rank "
                f"{group.rank} cannot make ({first_line(error)}); leave the option out"
            ) from error
    return lambda: torch.cuda.use_mem_pool(pool, group.device)


def _backend(process_group: Any, device: torch.device | None) -> Any:
    return process_group._get_backend(device)
