"""The plain form that frameworks expect: ``ddp.register_comm_hook(gradcast.HookState(), gradcast.comm_hook)``.

All that a hook can do is to cut the buckets that DDP hands it, and to send the pieces in order, on a group of its own.
Which gradients share a bucket, when a bucket is handed over, and that everything is waited for before ``backward()``
returns, stays DDP's decision. ``gradcast.attach`` decides these.
"""

from typing import Any

import torch
import torch.distributed as dist

from gradcast.errors import Error
from gradcast.training.group import Group, backend_of, make_group


class HookState:
    """One per DDP module.

    ``process_group``: that of the DDP module (default: all workers). ``block_bytes``: the largest piece of a bucket
    that travels in one operation. ``timeout_s``: as in ``Options``.
    """

    def __init__(
        self, process_group: Any = None, *, block_bytes: int = 8 << 20, timeout_s: float | None = None
    ) -> None:
        if not isinstance(block_bytes, int) or block_bytes < 1:
            raise Error(f"block_bytes is {block_bytes!r}; a whole number of bytes above 0 is expected")
        self.block_bytes = block_bytes
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._group: Group | None = None

    def group(self, device: torch.device) -> Group:
        """Made at the first bucket, which comes on all ranks at the same time and tells the device."""
        if self._group is None:
            self._group = make_group(self._process_group, device, self._timeout_s)
        return self._group


def comm_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the workers. The numbers are DDP's: multiplied by 1 / workers, then summed."""
    if not isinstance(state, HookState):
        raise Error(
            "register the hook with its state: ddp.register_comm_hook(gradcast.HookState(), gradcast.comm_hook)"
        )
    buffer = bucket.buffer()
    group = state.group(buffer.device)
    buffer.mul_(1.0 / group.world_size)
    if group.world_size == 1:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    pieces = buffer.split(max(1, state.block_bytes // buffer.element_size()))
    works = [dist.all_reduce(piece, group=group.own, async_op=True) for piece in pieces]
    return finished(works, buffer, group.own)


def finished(works: list[Any], buffer: torch.Tensor, process_group: Any) -> torch.futures.Future[torch.Tensor]:
    """Done with the buffer when the works are. Who waits for it on a device has its current stream wait."""
    futures = [work.get_future() for work in works]
    backend = backend_of(process_group, buffer.device.type)
    # A future of several knows of no device: what waits for it waits for no stream. NCCL's works end in their order.
    last = futures[-1] if backend == "nccl" else torch.futures.collect_all(futures)

    def result(_: Any) -> torch.Tensor:
        # Raises what failed on the network; DDP passes it on to the caller of backward(). With NCCL this orders the
        # stream that torch gives to what follows a future, behind which whoever waits for this one is put.
        for future in futures:
            future.wait()
        if buffer.is_cuda and backend != "nccl":  # Gloo's futures know of no device, and come before the copies end
            _wait_for_copies(works, buffer.device)
        return buffer

    return last.then(result)


def _wait_for_copies(works: list[Any], device: torch.device) -> None:
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for work in works:
            work.synchronize()
    stream.synchronize()
