"""Taking the gradients of a DistributedDataParallel module over, and giving them back.

DDP keeps what it does besides: buffers from rank 0 before forward, ``no_sync``, its forward. Only its reduction goes.
"""

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def take_over(module: DistributedDataParallel) -> dict[str, Any]:
    """DDP reduces nothing any more. Returns what give_back needs."""
    before = {"find_unused_parameters": module.find_unused_parameters}
    # It would make DDP's reducer count unused parameters as ready and reduce buckets by itself.
    module.find_unused_parameters = False
    module.reducer._remove_autograd_hooks()
    return before


def give_back(module: DistributedDataParallel, before: dict[str, Any]) -> None:
    """DDP reduces again, with a new reducer: the hooks of the old one are gone for good."""
    module.find_unused_parameters = before["find_unused_parameters"]
    parameters, expect_sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, expect_sparse, names, module.static_graph)
