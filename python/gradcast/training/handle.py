"""The handle that ``attach`` returns."""

import contextlib
import json
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from gradcast import _core
from gradcast.alarms import Alarm
from gradcast.disk import write_file
from gradcast.errors import refused
from gradcast.training.attached_modules import close_at_exit, detach
from gradcast.training.averaged_model import kept_average
from gradcast.training.sessions.kinds import Attached, TrainingSession, require_attached
from gradcast.training.state import TrainingState
from gradcast.training.step.gradient_buffers import GradientRange
from gradcast.training.step.update_callbacks import (
    Owned,
    UpdateCallback,
    UpdateFunction,
    UpdateRegistration,
    owned_tensors,
)
from gradcast.training.step_stream import Step, StepStream

if TYPE_CHECKING:
    from gradcast.snapshots.snapshots import Snapshots


class Handle:
    """Returned by ``attach``. The program need not keep it: training goes on without it."""

    def __init__(
        self, module: nn.Module, attached: Attached, called: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        """``module``: without DDP's wrapper; for a list, an nn.ModuleList of it. ``called``: whose forward the program
        calls."""
        self._training = TrainingState(attached, module, called, optimizers)
        self._snapshots: Snapshots | None = None
        close_at_exit(attached)

    @property
    def _session(self) -> TrainingSession:
        return self._training.session

    @property
    def mode(self) -> str:
        """ "hook" or "overlap"; "local" with options.local; "ddp" if GRADCAST_DISABLE is set, so that stock DDP
        trains."""
        return self._session.mode

    @property
    def rank(self) -> int:
        return self._session.group.rank

    @property
    def world_size(self) -> int:
        return self._session.group.world_size

    @property
    def plan(self) -> _core.Plan | None:
        """The plan in force; during the warm-up a DDP baseline. None with a single worker."""
        return self._session.report.plan

    @property
    def plan_version(self) -> int:
        """Grows with each plan, those of the warm-up included."""
        return self._session.report.plan_version

    @property
    def profile(self) -> _core.Profile | None:
        """The profile that the warm-up has measured, the same on every rank; None before."""
        return self._session.report.profile

    @property
    def measuring(self) -> bool:
        """True while a warm-up is running, the first one or one after a change."""
        return self._session.report.measuring

    @property
    def layout(self) -> tuple[GradientRange, ...]:
        """The place of each gradient, and of the values sent with them, in the order of the plan's profile."""
        return self._session.report.layout

    def flush(self) -> None:
        """Waits until every gradient in flight has arrived, and runs every pending update (on a device: puts it on the
        current stream).

        Needed only before parameters are read in ways that PyTorch does not show: raw pointers, to_dlpack(),
        TorchScript.
        """
        if not self._session.released:
            self._session.flush()

    def send_buffers(self) -> None:
        """Sends rank 0's buffers to all ranks now, after ``flush()``. Collective.

        Needed only if the program changes buffers between backward and the next forward pass, and not to the same
        values on all ranks (``load_state_dict()`` of each rank's own state, ``module.half().float()``): those of a bare
        module, and in overlap mode those of a DDP module, are sent with the gradients.
        """
        self._session.send_buffers(list(self._require_module().buffers()))

    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Context for collective operations of the program's own: waits until nothing of gradcast is in flight, and
        starts nothing before the block ends, so that all ranks begin them in one order, as NCCL requires of the
        communicators on a device. Put it on every rank, outside of backward. It waits as ``flush()`` does, so use it
        for what is rare: metrics, evaluation, checkpoints. Over Gloo it is not needed.

        Raises Error(invalid_use) inside backward; ``backward()`` inside the block raises it, too, and with local steps
        ``step()``.
        """
        session = self._session
        if session.released:
            return contextlib.nullcontext()
        return session.progress.fence.around(session.reach_fence)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients of backward passes inside stay on this worker and add up, as with DDP's no_sync()."""
        require_attached(self._session)
        return self._session.progress.no_sync_blocks.around()

    def weight(self, n: float) -> contextlib.AbstractContextManager[None]:
        """Context for backward: this rank counts n in the mean over the ranks, which is the sum of n times the rank's
        gradient over the sum of all n. The loss is the mean over the rank's own samples, as usual.

        ``n``: a number from 0 to 2^53: the samples or tokens of the whole step, with all its micro-batches. A rank
        without any takes part with ``with handle.weight(0): pass``, and steps as the others do; what it computes all
        the same does not count, NaN included. The first call is collective, and from then on every rank has to give
        each step a weight. Raises Error(invalid_use), on every rank where the sum is used first, for other weights,
        for one that is missing, and if all are 0.
        """
        require_attached(self._session)
        return self._training.attached.weight(n)

    def end_round(self) -> None:
        """Averages the ranks' parameters now, with local steps, whatever is left of the round, so that afterwards all
        ranks have the global copy. Collective: after the same step on all ranks, or an Error says that they differ.
        Call it after the last step, before the model is saved or used. The next round begins anew.

        Raises Error(invalid_use) without ``Options(local=...)``.
        """
        require_attached(self._session)
        self._session.rounds.end_round()

    def global_model(self) -> contextlib.AbstractContextManager[None]:
        """Context for local steps: inside, the module has the global copy's parameters and buffers, the same on all
        ranks, and afterwards this rank's own. Not collective. Needs memory for one more copy of the model meanwhile.

        Raises Error(invalid_use) without ``Options(local=...)``, and for ``step()`` inside.
        """
        require_attached(self._session)
        return self._session.rounds.global_model()

    def stats(self) -> dict[str, Any]:
        """Statistics of the last steps; times in ms, sizes in bytes, None for what is not known yet."""
        snapshots = None if self._snapshots is None else self._snapshots.stats()
        return self._session.stats() | {"snapshots": snapshots}

    def alarms(self) -> list[Alarm]:
        """The alarms since the module's parameters last changed, in order, the same on every rank. One that lasts has
        ``until_step`` None."""
        return self._session.report.alarms()

    def timeline(self) -> dict[str, Any]:
        """The last steps of this rank as a Chrome trace; ui.perfetto.dev opens it."""
        return {
            "traceEvents": self._session.report.timeline_events(),
            "distributedInfo": {"rank": self.rank, "world_size": self.world_size},
        }

    def save_timeline(self, path: str) -> None:
        write_file(path, json.dumps(self.timeline()), "timeline")

    def save_profile(self, path: str) -> None:
        """Saves the measured profile for ``gradcast simulate`` and ``gradcast dev plan``."""
        if self.profile is None:
            raise refused("the profile is not measured yet; save it after the warm-up steps")
        write_file(path, self.profile.to_json(), "profile")

    def save_plan(self, path: str, profile_path: str | None = None) -> None:
        """Saves the plan in force; ``Options(plan=Planning(file=path))`` follows it again. ``profile_path``: noted in
        the file for ``gradcast dev plot``."""
        write_file(path, self._session.report.plan_text(profile_path), "plan")

    def on_update(self, function: UpdateFunction, owned: Owned | None = None) -> UpdateRegistration:
        """Calls ``function(names, parameters)`` with parameters whose update has just run: each trained parameter once
        per step, in parts as gradients arrive. So averages, norms and logs keep the overlap, where code behind
        ``step()`` would wait for everything.

        ``names``: list of str, as in ``module.named_parameters()``, without DDP's wrapper. ``parameters``: list of
        nn.Parameter, of the same length. The function runs under ``no_grad``, on the stream of the update; ``.grad``
        may be gone. While step() itself waits (warm-up, DDP baseline, hook mode, one worker, GRADCAST_DISABLE) it is
        called where step() ends. It may read other parameters, and waits for them then. It must not do collective
        operations, since parts differ between ranks, nor wait for another thread that reads parameters.

        ``owned``: tensors that the function writes: a module with the same parameter names, or a dict from parameter
        names to a tensor or a list of tensors. Reading one waits until its parameter is updated and the function has
        run, so an averaged model can be evaluated or saved at any time. (Views of them taken earlier do not wait.)

        Pending updates run first: the function is called for steps from the next one on. An exception of the function
        is raised, as gradcast.Error, where the program waits for the parameter; all parameters are updated, and other
        functions are called, as if it had not failed. Functions stay when the module's parameters change,
        and end with ``detach()``. Not collective: a single rank may keep an average.

        Raises Error(invalid_use) if ``function`` cannot be called, or if ``owned`` has an unknown name, a tensor twice,
        or a parameter of the module.
        """
        module = self._require_module()
        if not callable(function):
            raise refused(f"on_update() got {function!r}; a function of names and parameters is expected")
        callback = UpdateCallback(function, owned_tensors(owned, module))
        return self._training.follow(callback)

    def on_step(self, function: Callable[[Step], Any]) -> UpdateRegistration:
        """Calls ``function(step)`` once for each step of this rank, with a ``gradcast.training.observe.Step``. A step
        ends where the next backward pass begins, so it comes where the ``step()`` after that returns; an exception of
        the function is raised there. Not collective. Raises Error(invalid_use) if ``function`` cannot be called."""
        self._require_module()
        if not callable(function):
            raise refused(f"on_step() got {function!r}; a function of a step is expected")
        stream = StepStream(self._training.attached, function)
        return self._training.follow(UpdateCallback(after_step=stream.after_step))

    def keep_average(self, averaged: AveragedModel) -> UpdateRegistration:
        """Keeps a torch.optim.swa_utils.AveragedModel of the module: the bits of ``averaged.update_parameters(module)``
        after each step, with the overlap of ``on_update``, whose notes apply. Reading a parameter of ``averaged`` waits
        as long as necessary.

        ``averaged``: made of the module without DDP's wrapper, any avg_fn, multi_avg_fn and use_buffers. With several
        optimizers, a step is one of that with the first parameter, and each has to step once in it.

        Raises Error(invalid_use) if ``averaged`` has other parameters than the module.
        """
        return self._training.follow(kept_average(averaged, self._require_module()))

    def snapshots(
        self,
        folder: str | Path,
        *,
        overhead: float = 0.035,
        keep: int = 2,
        every: int | None = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        write_bytes_per_s: float | None = None,
        over_network: bool = False,
        signals: Collection[int] = (signal.SIGTERM, signal.SIGUSR1),
    ) -> "Snapshots":
        """Writes a snapshot of the training into ``folder`` again and again, from which ``gradcast.resume`` goes on.
        Collective. Ends with ``detach()``, or with the program.

        ``folder``: one that all ranks see, or one of each host's own. ``overhead``: the share of the training's time
        that snapshots may cost; ``every``: steps from one to the next, in place of it. ``keep``: so many complete ones
        stay. ``loader``: a ResumableLoader, or anything with state_dict() and load_state_dict(). ``extra``: by name,
        more objects with these, the same on all ranks (a scheduler, a GradScaler). ``optimizer``: in hook mode, where
        ``attach`` is given none. ``write_bytes_per_s``: the most that a rank writes, for a disk that others need, too.
        ``over_network``: the folder is reached over the network of the training, so that a part is written while no
        block is in flight. ``signals``: those that end the program once a last snapshot is complete, if they leave time
        for that.

        Raises Error(invalid_use), on every rank, if the folder cannot be written, if it holds snapshots that this
        program has not resumed, or checkpoints of another program, or if a state is more than plain data and tensors,
        since reading that could run code: ``torch.serialization.add_safe_globals`` allows it.
        """
        from gradcast.snapshots.start import start
        from gradcast.snapshots.writer import SnapshotOptions

        options = SnapshotOptions(overhead, keep, every, loader, extra, write_bytes_per_s, over_network, signals)
        self._training.require_whole("handle.snapshots()")
        if self._snapshots is not None:
            self._snapshots.close()
        self._session.reduction.take_back()
        self.flush()  # blocks in flight share the group on which ranks agree
        self._snapshots = start(self._training, self._require_module(), folder, optimizer, options)
        return self._snapshots

    def _require_module(self) -> nn.Module:
        require_attached(self._session)
        module = self._training.module()
        assert module is not None, "a session that has not been released keeps its module"
        return module

    def state_dict(self) -> dict[str, Any]:
        """Plan and profile for a checkpoint: a dict of strings and numbers.

        With local steps it holds tensors, too: this rank's parameters, the global copy, the outer momentum, and the
        fragments in flight. Each rank saves its own. Never starts a collective operation.
        """
        require_attached(self._session)
        return self._session.checkpoint.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Follows the plan of a checkpoint instead of measuring, if model, mode and number of workers are the same.
        With another number of workers, on several hosts of equally many ranks, a plan is made at once from the
        checkpoint's profile, and its first steps correct it. Otherwise the warm-up goes on. Rank 0's state counts.
        Collective; not between backward and step().

        With local steps each rank loads what it has saved, right after ``attach``, and training goes on with the same
        bits, also inside a round. Raises Error(invalid_use) on every rank if one of them cannot.
        """
        require_attached(self._session)
        self._session.checkpoint.load_state_dict(state)

    def detach(self, *, wait_s: float | None = None) -> None:
        """Completes what is in flight and gives back module and optimizers as they were. Collective. Idempotent.

        ``wait_s``: for use after an error, when other ranks may never answer. Raises Error(communication) if it takes
        longer; the module is given back all the same, and its parameters may lack an update.
        """
        try:
            if self._snapshots is not None and not self._training.attached.released and wait_s is None:
                self._snapshots.close()
        finally:
            detach(self._training.attached, wait_s)
