"""Training with PyTorch: measure, plan, agree, follow. Only this part of the package needs torch."""

from gradcast.training.attach import attach
from gradcast.training.comm_hook import HookState, comm_hook
from gradcast.training.handle import Handle
from gradcast.training.options import Options, Watch
from gradcast.training.verify import Verification, verify

__all__ = ["Handle", "HookState", "Options", "Verification", "Watch", "attach", "comm_hook", "verify"]
