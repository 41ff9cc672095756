"""gradcast plans the gradient traffic of data-parallel training.

>>> import gradcast
>>> profile = gradcast.load_profile("resnet50", scale=0.5)
>>> link = gradcast.LinkModel(all_reduce=[gradcast.LinkPiece(alpha_ns=700e3, beta_ns_per_byte=4.7)])
>>> plan = gradcast.make_plan(profile, link)
>>> plan.predicted_ns >= plan.bound_ns
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from gradcast._core import (
    Block,
    Bound,
    LinkModel,
    LinkPiece,
    Plan,
    Profile,
    Tensor,
    Timeline,
    __version__,
    bound,
    make_plan,
    play,
    policies,
)
from gradcast.errors import Error, UsageError
from gradcast.files import load_profile

if TYPE_CHECKING:
    from gradcast.diagnosis.context import doctor
    from gradcast.snapshots import BalancedBatchSampler, ResumableLoader, ResumableSampler, Snapshots, resume
    from gradcast.training import Handle, HookState
    from gradcast.training.attach import attach
    from gradcast.training.comm_hook import comm_hook
    from gradcast.training.options import Clip, LocalSteps, Nccl, Options, Planning, Watch
    from gradcast.training.verify import verify

__all__ = [
    "BalancedBatchSampler",
    "Block",
    "Bound",
    "Clip",
    "Error",
    "Handle",
    "HookState",
    "LinkModel",
    "LinkPiece",
    "LocalSteps",
    "Nccl",
    "Options",
    "Plan",
    "Planning",
    "Profile",
    "ResumableLoader",
    "ResumableSampler",
    "Snapshots",
    "Tensor",
    "Timeline",
    "UsageError",
    "Watch",
    "__version__",
    "attach",
    "bound",
    "comm_hook",
    "doctor",
    "load_profile",
    "make_plan",
    "play",
    "policies",
    "resume",
    "verify",
]

# These need torch, which the commands and the core do without: imported when first asked for.
_TRAINING = dict.fromkeys(("Handle", "HookState", "attach", "comm_hook", "verify"), "gradcast.training")
_OPTIONS = ("Clip", "LocalSteps", "Nccl", "Options", "Planning", "Watch")
_TRAINING |= dict.fromkeys(_OPTIONS, "gradcast.training.options")
_TRAINING["doctor"] = "gradcast.diagnosis.context"
_SNAPSHOTS = ("BalancedBatchSampler", "ResumableLoader", "ResumableSampler", "Snapshots", "resume")
_TRAINING |= dict.fromkeys(_SNAPSHOTS, "gradcast.snapshots")


def __getattr__(name: str) -> Any:
    if name not in _TRAINING:
        raise AttributeError(f"module 'gradcast' has no attribute {name!r}")
    try:
        module = importlib.import_module(_TRAINING[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise Error(
            f"gradcast.{name} needs PyTorch, which is not installed: pip install torch", "invalid_use"
        ) from None
    value = getattr(module, name)
    globals()[name] = value
    return value
