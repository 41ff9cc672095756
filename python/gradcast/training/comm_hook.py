"""A DDP communication hook: ``ddp.register_comm_hook(gradcast.HookState(), gradcast.comm_hook)``.

A hook can only cut the buckets that DDP passes to it, and send the pieces in order, on a group of its own. DDP still
decides which gradients share a bucket, when a bucket is passed on, and that ``backward()`` waits for everything.
``gradcast.attach`` decides these itself.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist

from gradcast.errors import Error
from gradcast.training.compat import extension
from gradcast.training.ranks.group import Group, make_group


class HookState:
    """The state of ``comm_hook``, one per DDP module.

    ``process_group``: that of the DDP module (default: all workers). ``block_bytes``: the largest piece of a bucket
    that one operation sends. ``timeout_s``: as in ``Options``.
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
        """gradcast's own group. Made at the first bucket, which comes on all ranks together and shows the device."""
        if self._group is None:
            self._group = make_group(self._process_group, device, self._timeout_s)
            weakref.finalize(self, extension.load().drop_results)
        return self._group


def comm_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket over the workers. The numbers are those of DDP: multiplied by 1 / workers, then summed."""
    if not isinstance(state, HookState):
        raise Error(
            "register the hook with its state: ddp.register_comm_hook(gradcast.HookState(), gradcast.comm_hook)"
        )
    # Python must not hold the bucket's tensor: see csrc/transport/torch/control.h.
    group = state.group(bucket.parameters()[0].device)
    if group.world_size == 1:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    return extension.load().average_bucket(group.own, bucket, state.block_bytes)
