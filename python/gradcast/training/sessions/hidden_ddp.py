"""DDP around bare modules that the program still calls directly: hooks do the work of DDP's own forward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcast.training.compat.module_hooks import around_forward


class HiddenDdp:
    """Hidden DDP modules. ``wrappers``: by module, the DDP module that averages its gradients."""

    def __init__(self, modules: Sequence[nn.Module], process_group: Any, *, broadcast_buffers: bool) -> None:
        self._broadcast_buffers = broadcast_buffers
        # DDP refuses a module that has nothing to reduce.
        trained = [each for each in modules if any(p.requires_grad for p in each.parameters())]
        # find_unused_parameters: attach accepts steps that do not use all parameters.
        self.wrappers = {
            each: DistributedDataParallel(
                each, process_group=process_group, find_unused_parameters=True, broadcast_buffers=broadcast_buffers
            )
            for each in trained
        }
        self._hooks = around_forward(trained, self._before_forward, self._after_forward)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for wrapper in self.wrappers.values():
            wrapper.reducer._remove_autograd_hooks()

    def _before_forward(self, module: nn.Module, _: Any, _compiled: bool) -> None:
        # In evaluation the other ranks take no part, as with gradcast.
        if torch.is_grad_enabled():
            wrapper = self.wrappers[module]
            wrapper.broadcast_buffers = self._broadcast_buffers and module.training
            wrapper._pre_forward()

    def _after_forward(self, module: nn.Module, output: Any, _: bool) -> Any:
        """Returns the outputs that DDP passes on; DDP notes through which of them backward will come."""
        return self.wrappers[module]._post_forward(output) if torch.is_grad_enabled() else None
