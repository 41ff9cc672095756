"""The settings of NCCL's communicators for blocks: those that the program has given its own process group, such as the
traffic class that a cluster reserves for training, and those of the options, which come first."""

import datetime
from typing import Any

import torch
import torch.distributed as dist

from gradcast.errors import refused
from gradcast.training.options import Nccl

# By name and value. Equal on all ranks if the program's are.
Settings = tuple[tuple[str, Any], ...]
AS_THE_PROGRAM = Nccl()

# Of ncclConfig_t, as far as torch has them. The others are about one communicator: its name, how it is made.
_INHERITED = (
    "traffic_class",
    "net_name",
    "min_ctas",
    "max_ctas",
    "cga_cluster_size",
    "nvls_ctas",
    "collnet_enable",
    "cta_policy",
)


def settings_for(backend: Any, nccl: Nccl) -> Settings:
    """The settings of a group of blocks. ``backend``: that of the program's group for the blocks' device. Raises
    Error(invalid_use) if torch cannot pass on what the options ask for."""
    if not dist.is_nccl_available():
        return ()
    unset = dist.ProcessGroupNCCL.Options().config
    theirs = getattr(getattr(backend, "options", None), "config", unset)  # other backends have none
    found = {name: getattr(theirs, name) for name in _INHERITED if hasattr(unset, name)}
    found = {name: value for name, value in found.items() if value != getattr(unset, name)}
    if nccl.max_ctas is not None:
        found["max_ctas"] = nccl.max_ctas
    if nccl.cta_policy is not None:
        found["cta_policy"] = _policy(nccl.cta_policy, unset)
    if "min_ctas" in found and "max_ctas" in found:  # NCCL refuses a minimum above the maximum
        found["min_ctas"] = min(found["min_ctas"], found["max_ctas"])
    return tuple(sorted(found.items()))


def stream_settings(backend: Any, nccl: Nccl) -> tuple[bool, bool, bool]:
    """For blocks on a device: they run on gradcast's stream; it has priority over compute; its events time them.
    ``backend``: that of the program's group. Blocks on gradcast's stream run with its priority, as DDP's buckets would;
    the communicator's stream has a high one (options_with)."""
    theirs = getattr(getattr(backend, "options", None), "is_high_priority_stream", False)
    return nccl.own_stream, bool(theirs) or not nccl.own_stream, nccl.event_times


def _policy(name: str, config: Any) -> int:
    value = getattr(dist.ProcessGroupNCCL, f"NCCL_CTA_POLICY_{name.upper()}", None)
    if value is None or not hasattr(config, "cta_policy"):
        raise refused(
            f"options.nccl.cta_policy is {name!r}, which torch {torch.__version__} cannot pass to NCCL; omit it, or "
            "set NCCL_CTA_POLICY, which holds for all communicators"
        )
    return int(value)


def options_with(settings: Settings, timeout: datetime.timedelta | None) -> Any:
    """Options of a process group. NCCL's kernels get priority over compute, since a late block delays the next forward
    pass. The group's other backends ignore these options."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    for name, value in settings:
        setattr(options.config, name, value)
    return options
