"""The modules that gradcast is attached to, and the ways in which it leaves them."""

import atexit
import gc
import sys
import weakref

from torch import nn

from gradcast.training.compat.wrappers import unwrapped
from gradcast.training.sessions.kinds import Attached

# By module, without its wrappers.
attached_modules: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Attached]]" = weakref.WeakKeyDictionary()
# Those to which it is attached by a pipeline's stage.
stage_modules: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def detach(attached: Attached, wait_s: float | None = None) -> None:
    """Completes what is in flight, logs the summary, and gives the module back. Idempotent. ``wait_s``: see
    Handle.detach."""
    for module, reference in list(attached_modules.items()):
        if reference() is attached:
            del attached_modules[module]
    if attached.released:
        return
    flushed = False
    try:
        if not attached.session.released:  # True if a session has ended and the next one could not begin
            attached.session.finish(wait_s)
            flushed = True
    finally:
        # Also if what is in flight never arrives: the module is then an ordinary one that can be read and saved.
        attached.release(reusable=flushed)
        attached.callbacks.remove_all()


def collect_dropped() -> None:
    """Frees models that the program has dropped without detach(), which only the garbage collector finds: a session and
    its module refer to each other."""
    found = [reference() for reference in attached_modules.values()]
    if any(attached is not None and not attached.released for attached in found):
        del found
        gc.collect()


def detach_left(module: nn.Module) -> None:
    """Detaches from the module a training that has ended with an error. Collective, as the error was."""
    attached = attached_to(module)
    if attached is not None:
        detach(attached)


def attached_to(module: nn.Module) -> Attached | None:
    reference = attached_modules.get(unwrapped(module))
    attached = None if reference is None else reference()
    return None if attached is None or attached.released else attached


def parameters_outside_stages() -> list[nn.Parameter]:
    """Those of attached modules."""
    found = [module for module in list(attached_modules) if module not in stage_modules and attached_to(module)]
    return [each for module in found for each in module.parameters()]


def close_at_exit(attached: Attached) -> None:
    """Closes the session when the interpreter exits, if it is still attached then."""

    def close() -> None:
        attached = reference()
        if attached is not None:
            attached.session.close_at_exit(failed=getattr(sys, "last_value", None) is not None)

    reference = weakref.ref(attached, lambda _: atexit.unregister(close))
    atexit.register(close)
