"""The plan that the open iteration follows."""

import dataclasses

from gradcast import _core


@dataclasses.dataclass(frozen=True)
class ActivePlan:
    """``profile`` lists the tensors in the order of the buffers. Tensor k is the gradient of parameter ``order[k]``."""

    profile: _core.Profile
    plan: _core.Plan
    order: tuple[int, ...]
