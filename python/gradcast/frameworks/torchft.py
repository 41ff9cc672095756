"""For torchft: ``attach(manager, module)`` in place of torchft's DistributedDataParallel.

torchft computes a quorum in each step, while forward runs. If other replicas are in it than before, or if a step has
failed, it makes another process group::

    optimizer.zero_grad()   torchft begins the quorum on a thread of its own
    forward                 where it ends: wait for the quorum; if its group is another one, begin a session over it
    backward                blocks are sent over the C++ group inside torchft's, without Python
    optimizer.step()        manager.should_commit(): the update only if nothing was reported

training/sessions/quorum.py does that. This module alone knows torchft and its private parts: ``Manager._pg`` and the
group inside.
"""

import weakref
from typing import Any

from torch import nn

from gradcast.errors import Error, refused

try:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
except ImportError as error:
    raise Error(
        f"gradcast.frameworks.torchft needs torchft ({error}); pip install 'gradcast[torchft]'", "environment"
    ) from error

from gradcast.training import Handle, Options
from gradcast.training.attach import attach_to_quorum
from gradcast.training.compat.wrappers import the_ddp
from gradcast.training.sessions.quorum import Plans

_STATE_KEY = "gradcast"


def attach(manager: Manager, module: nn.Module, optimizer: Any = None, *, options: Options | None = None) -> Handle:
    """Averages the module's gradients over the replicas of torchft's quorum, by a plan, in hook mode. Not collective.

    ``manager``: with a ProcessGroupGloo or ProcessGroupNCCL. ``module``: the bare module, or a list of several, as with
    ``gradcast.attach``. torchft sends its parameters and buffers: a replica that joins gets them from another one, and
    each replica keeps its own buffers. ``optimizer``: none; overlap mode is refused.

    The training loop is torchft's: ``zero_grad()`` and ``step()`` of torchft.Optimizer. Gradients are summed over the
    replicas and divided by ``manager.num_participants()``. A replica that heals, or that is a spare, sends zeros.
    Raises Error(invalid_use) for what would give wrong numbers.
    """
    options = options or Options()
    _check(manager, module, optimizer, options)
    if manager not in _plans:
        plans = _plans[manager] = Plans()
        # On torchft's own thread, while the quorum is made.
        manager.register_state_dict_fn(_STATE_KEY, plans.load, plans.saved)
    return attach_to_quorum(_Quorum(manager), _plans[manager], module, options)


# torchft takes what belongs into its state only once per manager.
_plans: "weakref.WeakKeyDictionary[Manager, Plans]" = weakref.WeakKeyDictionary()


def _check(manager: Any, module: Any, optimizer: Any, options: Options) -> None:
    if not isinstance(manager, Manager):
        raise refused(f"the manager is a {type(manager).__name__}; a torchft.Manager is expected")
    if not isinstance(manager._pg, ProcessGroupGloo | ProcessGroupNCCL):
        raise refused(
            f"the manager's process group is a {type(manager._pg).__name__}, whose C++ group gradcast cannot reach; "
            "give the manager a torchft.ProcessGroupGloo or ProcessGroupNCCL"
        )
    if optimizer is not None:
        raise refused(
            "overlap mode is not possible with torchft: manager.should_commit() decides about a step before step() "
            "updates anything, so all gradients have to be there by then; leave the optimizer out (hook mode)"
        )
    if isinstance(module, nn.Module) and the_ddp(module) is not None:
        raise refused(
            "the module holds a DistributedDataParallel, which would average its gradients, too; give the plain module"
        )
    for name, value in options.changed(_NOT_WITH_TORCHFT).items():
        raise refused(f"options.{name} is {value!r}, and with torchft {_NOT_WITH_TORCHFT[name]}; omit it")


_NOT_WITH_TORCHFT = {
    "weight": "each participant counts alike",
    "nccl": "the process groups are torchft's",
    "wire": "gradients are sent in their own type",
    "compare_every": "a replica that heals has received sums for parameters that it does not have yet",
    "watch.timeout_s": "the timeout is that of its process group: ProcessGroupGloo(timeout=...)",
}


class _Quorum:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def process_group(self) -> Any:
        if self._manager.num_participants() == 0:  # waits for the quorum
            raise refused(
                "no quorum was started for this step; call zero_grad() of torchft.Optimizer, or "
                "manager.start_quorum(), before forward"
            )
        return None if self._manager.errored() else self._manager._pg._pg

    def share(self) -> float:
        return 1.0 / self._manager.num_participants() if self._manager.is_participating() else 0.0

    def report(self, error: Error) -> None:
        self._manager.report_error(error)

    def abort(self) -> None:
        self._manager._pg.abort()
