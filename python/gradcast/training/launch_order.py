"""Variables of the environment that decide how NCCL and CUDA begin operations beside each other: refused where training
could hang, warned of where it may, or takes longer. This module alone reads them for training.

With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` or ``NCCL_LAUNCH_ORDER_IMPLICIT=1`` an operation begins after all that this host
has queued before it, in any communicator. Blocks are queued when their gradients are ready, so beside collectives of
the program the order differs between ranks, and each rank may wait for what another one has queued behind. In hook mode
blocks are queued in backward only, where few programs have collectives.
"""

import os
from typing import Any

import torch
from torch import nn

from gradcast.errors import refused
from gradcast.training.ranks.group import backend_of, shared_group

CONNECTIONS, ORDER = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_TRUE = ("1", "y", "yes", "t", "true")  # as torch reads variables
_FEW_CONNECTIONS = 8  # CUDA's default; it can make 32


def check_launch_order(mode: str, process_group: Any, device: torch.device, module: nn.Module) -> None:
    """Raises if blocks and the program's own collectives could wait for each other for good."""
    shared = shared_group(process_group)
    if mode == "ddp" or shared is None or shared.size() == 1 or backend_of(shared, device.type) != "nccl":
        return
    if _number(CONNECTIONS) == 1:
        order = f"{CONNECTIONS} is 1, so the GPU has one queue, in which"
    elif _number(ORDER):
        order = f"{ORDER} is set, so NCCL begins operations in the order in which this host calls them, in which"
    else:
        return
    if mode in ("overlap", "local"):
        what = "blocks under forward and collectives of the program's own"
        instead = "use hook mode: gradcast.attach(module) without the optimizer"
    elif norms := _sync_norms(module):
        what = f"blocks and the collectives of {norms[0]}, a SyncBatchNorm,"
        instead = "leave the model to DDP with GRADCAST_DISABLE=1"
    else:
        return
    raise refused(f"{order} {what} may wait for each other for good; unset the variable, or {instead}")


def warnings_of(mode: str, module: nn.Module) -> list[str]:
    """Sentences about training over NCCL in this mode."""
    found = []
    connections = _number(CONNECTIONS)
    if mode in ("overlap", "local") and connections is not None and 1 < connections <= _FEW_CONNECTIONS:
        found.append(
            f"{CONNECTIONS} is {connections}, so the GPU's streams share {connections} queues: a block may wait for "
            "kernels that it does not depend on, and training may hang if the program has collectives of its own in "
            "forward or backward; set it to 32"
        )
    norms = _sync_norms(module) if mode == "overlap" else []
    if norms:
        found.append(
            f"{norms[0]} is a SyncBatchNorm, whose collectives run in forward beside blocks, and NCCL wants both to "
            f"fit on the GPU together; if training hangs there, set {CONNECTIONS}=32, use hook mode, or bound the "
            "blocks with Options(nccl=Nccl(max_ctas=4))"
        )
    blocking = next((name for name in BLOCKING if os.environ.get(name, "").lower() in _TRUE), None)
    if blocking is not None:
        found.append(
            f"{blocking} is set, so the host waits for the end of each block and queues the kernels behind it only "
            "then, and steps take longer; unset it (by TORCH_NCCL_ASYNC_ERROR_HANDLING operations that hang end anyway)"
        )
    return found


def _sync_norms(module: nn.Module) -> list[str]:
    return [name for name, each in module.named_modules() if isinstance(each, nn.SyncBatchNorm)]


def _number(variable: str) -> int | None:
    try:
        return int(os.environ.get(variable, ""), 0)
    except ValueError:
        return None
