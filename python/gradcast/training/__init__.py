"""Training with PyTorch: measure, plan, agree, follow. The only part of the package that needs torch."""

from gradcast.training.comm_hook import HookState, comm_hook
from gradcast.training.handle import Handle, attach
from gradcast.training.options import Options
from gradcast.training.verify import Verification, verify

__all__ = ["Handle", "HookState", "Options", "Verification", "attach", "comm_hook", "verify"]
